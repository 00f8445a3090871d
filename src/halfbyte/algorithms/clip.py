"""Clipping: narrower ranges round the many small weights better and saturate the few large ones."""

from __future__ import annotations

import torch

from halfbyte.algorithms.grid_search import (
    Measure,
    least_error_grid,
    output_error_of_tiles,
    weight_error,
)
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.quantize import encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
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
    return encode(weight, fmt, clip_mse_grid(weight, fmt, elsewhere=elsewhere))


def clip_mse_grid(weight: torch.Tensor, fmt: TensorFormat, *, elsewhere: float = 0.0) -> Grid:
    """The grid of :func:`clip_mse`, for an algorithm that rounds by itself."""
    return _best_grid(weight, fmt, weight_error, elsewhere)


def clip_output(
    weight: torch.Tensor, fmt: TensorFormat, moment: torch.Tensor, *, elsewhere: float = 0.0
) -> QuantizedTensor:
    """As :func:`clip_mse`, with the least squared output error in place of the weights'.

    moment: mean of ``x x^T`` over the layer's inputs, fp32 ``[in, in]`` (``InputStatistics.moment``), or
        ``[..., in, in]`` with one for each member of a stack.
    Each tile is judged by its own block of the diagonal: no tile ends worse than with its whole range. Source: the
    clip search of Lin et al., "AWQ: Activation-aware Weight Quantization", 2024, section 3.2 and its code.
    Errors: those of :func:`halfbyte.formats.quantize.quantize`; a moment of another shape.
    """
    return encode(weight, fmt, clip_output_grid(weight, fmt, moment, elsewhere=elsewhere))


def clip_output_grid(
    weight: torch.Tensor, fmt: TensorFormat, moment: torch.Tensor, *, elsewhere: float = 0.0
) -> Grid:
    """The grid of :func:`clip_output`, for an algorithm that rounds by itself."""
    measure = output_error_of_tiles(moment, Tiling.of(tuple(weight.shape), fmt))
    return _best_grid(weight, fmt, measure, elsewhere)


def _best_grid(weight: torch.Tensor, fmt: TensorFormat, measure: Measure, elsewhere: float) -> Grid:
    ranges = Ranges.of(weight, fmt, elsewhere)
    ratios = POWER_OF_TWO_RATIOS if fmt.scale == "e8m0" else RATIOS
    return least_error_grid(weight, fmt, [choose_grid(ranges, fmt, ratio) for ratio in ratios], measure)
