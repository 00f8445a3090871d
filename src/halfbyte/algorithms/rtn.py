"""Round to nearest: the quickest algorithm, and the one that all others have to beat."""

from __future__ import annotations

import torch

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat


def rtn(weight: torch.Tensor, fmt: TensorFormat, *, elsewhere: float = 0.0) -> QuantizedTensor:
    """A weight ``[..., out, in]`` in ``fmt``, each value at the nearest code of a grid over its tile's whole range.

    elsewhere: largest magnitude of the weights that share its outer scale per tensor (NVFP4).
    Errors: those of :func:`halfbyte.formats.quantize.quantize`.
    """
    return quantize(weight, fmt, elsewhere=elsewhere)
