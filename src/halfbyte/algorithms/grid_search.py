"""The best of several grids for each tile of a weight, in squared error of weights or of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.grid import Grid
from halfbyte.formats.parallel import for_each
from halfbyte.formats.ranges import as_float
from halfbyte.formats.rounding import decode_tiles, encode_tiles_
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling

# fp32 errors of tiles [down, rows, across, columns], which may be overwritten, and the place of the first one down
# among all tiles -> [down, 1, across, 1].
Measure = Callable[[torch.Tensor, int], torch.Tensor]


def weight_error(errors: torch.Tensor, _: int) -> torch.Tensor:
    """Squared error of each tile's weights."""
    return errors.square_().sum((1, 3), keepdim=True)


def output_error_of_tiles(moment: torch.Tensor, tiling: Tiling) -> Measure:
    """Squared output error of each tile by itself: the sum over its rows of e M e^T, M its block of the diagonal.

    moment: mean of ``x x^T``, ``[in, in]``, or ``[..., in, in]`` with one for each member of a stack. The products of
    two tiles' errors are left out, so that each tile can be judged alone (Lin et al., "AWQ", 2024, section 3.2, do so
    for groups).
    Errors: a moment of another shape.
    """
    *lead, _, features = tiling.shape
    if list(moment.shape) not in ([features, features], [*lead, features, features]):
        raise HalfbyteError(f"a moment {list(moment.shape)} does not fit a weight {list(tiling.shape)}")
    moments = moment.reshape(-1, features, features)
    blocks = moment.new_zeros(
        len(moments), tiling.across, tiling.columns, tiling.columns, dtype=torch.float32
    )
    for index in range(tiling.across):
        start = index * tiling.columns
        stop = min(start + tiling.columns, features)
        blocks[:, index, : stop - start, : stop - start] = moments[:, start:stop, start:stop]
    each = tiling.down // len(moments)

    def measure(errors: torch.Tensor, first: int) -> torch.Tensor:
        down, rows, across, columns = errors.shape
        found = errors.new_empty(down, across)
        for members, here in _runs(first, down, each):
            own = blocks[members].flatten(0, 1)
            # [members, tiles down, rows, across, columns]
            by_member = errors[here].unflatten(0, (members.stop - members.start, -1))
            by_block = by_member.permute(0, 3, 1, 2, 4).reshape(len(own), -1, columns)
            squares = torch.bmm(by_block, own).mul_(by_block).sum(-1)
            by_tile = squares.view(members.stop - members.start, across, -1, rows).sum(-1)
            found[here] = by_tile.mT.flatten(0, 1)
        return found[:, None, :, None]

    return measure


def _runs(first: int, count: int, each: int) -> Iterator[tuple[slice, slice]]:
    """Tiles ``first`` to ``first + count`` as members (``each`` tiles of them), whole ones together, and tiles."""
    done = 0
    while done < count:
        member, offset = divmod(first + done, each)
        whole = (count - done) // each if offset == 0 else 0
        size = whole * each or min(each - offset, count - done)
        yield slice(member, member + max(whole, 1)), slice(done, done + size)
        done += size


def least_error_grid(
    weight: torch.Tensor, fmt: TensorFormat, candidates: Sequence[Grid], measure: Measure
) -> Grid:
    """The candidate with the least error, tile by tile; on a tie, or where errors are no numbers, the first one.

    weight: finite, ``[..., out, in]``, any float dtype. candidates: at least one; all have the same outer scales.
    """
    tiling = Tiling.of(tuple(weight.shape), fmt)
    tiles = tiling.tiles(as_float(weight))
    grids = [grid.per_tile(tiling) for grid in candidates]
    errors = torch.zeros(len(grids), tiling.down, 1, tiling.across, 1, device=weight.device)

    def try_all(chunks: list[tuple[slice, slice]]) -> None:
        for down, rows in chunks:
            values = tiles[down, rows].to(torch.float32)
            for error, grid in zip(errors, grids, strict=True):
                decoded = decode_tiles(encode_tiles_(values.clone(), fmt, grid[down]), fmt, grid[down])
                error[down] += measure(decoded.sub_(values), down.start)

    for_each(try_all, tiling.bands(weight.device), weight.device)
    least, best = errors[0], candidates[0]
    for error, candidate in zip(errors[1:], candidates[1:], strict=True):
        better = error < least
        least = torch.where(better, error, least)
        best = _replaced(best, candidate, better.reshape(best.scales.shape))
    return best


def _replaced(grid: Grid, other: Grid, where: torch.Tensor) -> Grid:
    zero_points = grid.zero_points
    if zero_points is not None and other.zero_points is not None:
        zero_points = torch.where(where, other.zero_points, zero_points)
    return Grid(_where(where, other.scales, grid.scales), zero_points, grid.outer_scales)


def _where(condition: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``torch.where``, which not every device has for E4M3, on bytes."""
    if one.dtype is not torch.float8_e4m3fn:
        return torch.where(condition, one, other)
    return torch.where(condition, one.view(torch.uint8), other.view(torch.uint8)).view(one.dtype)
