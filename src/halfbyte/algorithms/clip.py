"""Clipping: narrower ranges round the many small weights better and saturate the few large ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.formats.grid import Ranges, choose_grid
from halfbyte.formats.quantize import dequantize, encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.ranges import as_float
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import CHUNK, Tiling

# Shares of a tile's range that are tried, the whole range first, so that a tie leaves it alone.
RATIOS = tuple(1.0 - step / 20 for step in range(11))
# Powers of two know halves and doubles only; the double spares the magnitudes that MX scales saturate.
POWER_OF_TWO_RATIOS = (1.0, 0.5, 2.0)


def clip_mse(weight: torch.Tensor, fmt: TensorFormat) -> QuantizedTensor:
    """A weight ``[..., out, in]`` in ``fmt`` with the range ratio per scale that has the least squared error.

    Every tile tries the same ratios by itself; the whole range is among them, so no tile ends worse than with
    :func:`halfbyte.algorithms.rtn.rtn`. Codes, scales and zero points all come from the weight as it was given.
    Errors: those of :func:`halfbyte.formats.quantize.quantize`.
    """
    ranges = Ranges.of(weight, fmt)
    ratios = POWER_OF_TWO_RATIOS if fmt.scale == "e8m0" else RATIOS
    ...
