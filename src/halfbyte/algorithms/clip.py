"""Clipping: narrower ranges round the many small weights better and saturate the few large ones."""

from __future__ import annotations

import torch

from halfbyte.formats.grid import Ranges, choose_grid
from halfbyte.formats.parallel import for_each
from halfbyte.formats.quantize import encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.ranges import as_float
from halfbyte.formats.rounding import decode_tiles, encode_tiles_
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling

# Multiples of a tile's range that are tried: the whole range first, so that a tie leaves it alone. Those above one
# serve integers, whose largest positive code is half a step short of the range.
RATIOS = (1.0, 1.1, 1.05, *(1.0 - step / 20 for step in range(1, 11)))
# Powers of two know halves and doubles only; the double spares the magnitudes that MX scales saturate.
POWER_OF_TWO_RATIOS = (1.0, 2.0, 0.5)


def clip_mse(weight: torch.Tensor, fmt: TensorFormat, *, elsewhere: float = 0.0) -> QuantizedTensor:
    """A weight ``[..., out, in]`` in ``fmt`` with the range ratio per scale that has the least squared error.

    Every tile tries the same ratios by itself; the whole range is among them, so no tile ends worse than with
    :func:`halfbyte.algorithms.rtn.rtn`. Codes, scales and zero points all come from the weight as it was given.
    elsewhere: largest magnitude of the weights that share its outer scale per tensor (NVFP4).
    Errors: those of :func:`halfbyte.formats.quantize.quantize`.
    """
    ranges = Ranges.of(weight, fmt, elsewhere)
    return encode(weight, fmt, choose_grid(ranges, fmt, _best_ratios(weight, fmt, ranges)))


def _best_ratios(weight: torch.Tensor, fmt: TensorFormat, ranges: Ranges) -> torch.Tensor:
    """Ratio of each tile with the least squared error, fp32, shaped like the scales."""
    tiling = Tiling.of(tuple(weight.shape), fmt)
    tiles = tiling.tiles(as_float(weight))
    ratios = POWER_OF_TWO_RATIOS if fmt.scale == "e8m0" else RATIOS
    grids = [choose_grid(ranges, fmt, ratio).per_tile(tiling) for ratio in ratios]
    errors = torch.zeros(len(ratios), tiling.down, 1, tiling.across, 1, device=weight.device)

    def try_all(chunks: list[tuple[slice, slice]]) -> None:
        for down, rows in chunks:
            values = tiles[down, rows].to(torch.float32)
            for error, grid in zip(errors, grids, strict=True):
                decoded = decode_tiles(encode_tiles_(values.clone(), fmt, grid[down]), fmt, grid[down])
                error[down] += decoded.sub_(values).square_().sum((1, 3), keepdim=True)

    for_each(try_all, tiling.bands(), weight.device)
    best, chosen = errors[0], torch.full_like(errors[0], ratios[0])
    for error, ratio in zip(errors[1:], ratios[1:], strict=True):
        better = error < best
        best, chosen = torch.where(better, error, best), chosen.masked_fill(better, ratio)
    return chosen.reshape(fmt.scale_shape(weight.shape))
