"""The best of several grids for each tile of a weight, in squared error of weights or of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.grid import Grid
from halfbyte.formats.parallel import for_each
from halfbyte.formats.ranges import as_float
from halfbyte.formats.rounding import decode_tiles, encode_tiles_
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling

# fp32 errors of tiles [down, rows, across, columns], which may be overwritten -> [down, 1, across, 1].
Measure = Callable[[torch.Tensor], torch.Tensor]


def weight_error(errors: torch.Tensor) -> torch.Tensor:
    """Squared error of each tile's weights."""
    return errors.square_().sum((1, 3), keepdim=True)


def output_error_of_tiles(moment: torch.Tensor, tiling: Tiling) -> Measure:
    """Squared output error of each tile by itself: the sum over its rows of e M e^T, M its block of the diagonal.

    moment: mean of ``x x^T``, ``[in, in]``. The products of two tiles' errors are left out, so that each tile can be
    judged alone (Lin et al., "AWQ", 2024, section 3.2, do so for groups).
    Errors: a moment of another shape.
    """
    features = tiling.shape[-1]
    if moment.shape != (features, features):
        raise HalfbyteError(f"a moment {list(moment.shape)} does not fit a weight {list(tiling.shape)}")
    blocks = moment.new_zeros(tiling.across, tiling.columns, tiling.columns, dtype=torch.float32)
    for index in range(tiling.across):
        start = index * tiling.columns
        stop = min(start + tiling.columns, features)
        blocks[index, : stop - start, : stop - start] = moment[start:stop, start:stop]

    def measure(errors: torch.Tensor) -> torch.Tensor:
        down, rows, across, columns = errors.shape
        by_block = errors.permute(2, 0, 1, 3).reshape(across, down * rows, columns)
        squares = torch.bmm(by_block, blocks).mul_(by_block).sum(-1)
        return squares.view(across, down, rows).sum(-1).t()[:, None, :, None]

    return measure


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
                error[down] += measure(decoded.sub_(values))

    for_each(try_all, tiling.bands(weight.device), weight.device)
    least, best = errors[0], candidates[0]
    for error, candidate in zip(errors[1:], candidates[1:], strict=True):
        better = error < least
        least = torch.where(better, error, least)
        best = _replaced(best, candidate, better.reshape(best.scales.shape))
    return best


def stacked(grids: Sequence[Grid]) -> Grid:
    """One grid of a stack of weights, from those of its members."""

    def stack(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.stack(present) if present else None

    return Grid(
        torch.stack([grid.scales for grid in grids]),
        stack([grid.zero_points for grid in grids]),
        stack([grid.outer_scales for grid in grids]),
    )


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
