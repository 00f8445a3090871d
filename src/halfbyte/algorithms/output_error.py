"""How far a layer's output moves when its weight is quantized: what calibrated algorithms make small."""

from __future__ import annotations

import torch

# Elements of a weight that are worked on at a time.
_SLAB = 1 << 24


def output_error(weight: torch.Tensor, decoded: torch.Tensor, moment: torch.Tensor) -> float:
    """Size of the output's error over that of the output: sqrt(tr(E M E^T) / tr(W M W^T)), E = W - decoded.

    weight, decoded: ``[..., out, in]``, float dtypes; traces are added up over the leading axes. moment: mean (or any
    multiple) of x x^T, fp32 ``[in, in]`` or ``[..., in, in]``. Returns: 0 where the output itself is zero.
    """
    rows = max(1, _SLAB * weight.shape[-2] // max(weight.numel(), 1))
    error = torch.zeros((), dtype=torch.float64, device=weight.device)
    output = torch.zeros_like(error)
    for given, kept in zip(weight.split(rows, -2), decoded.split(rows, -2), strict=True):
        values = given.float()
        error += _trace(values - kept.float(), moment)
        output += _trace(values, moment)
    return float((error / output).clamp(min=0).sqrt()) if float(output) > 0 else 0.0


def _trace(values: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """tr(V M V^T), float64 ``[]``, summed over the leading axes."""
    return (values @ moment).double().mul_(values).sum()
