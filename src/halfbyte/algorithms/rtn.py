"""Round to nearest: the quickest algorithm, and the one that all others have to beat."""

from __future__ import annotations

import torch

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat


def rtn(weight: torch.Tensor, fmt: TensorFormat) -> QuantizedTensor:
    """A weight ``[..., out, in]`` in ``fmt``, each value at the nearest code of a grid over its tile's whole range.

    Errors: those of :func:`halfbyte.formats.quantize.quantize`.
    """
    return quantize(weight, fmt)
