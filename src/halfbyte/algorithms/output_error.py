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
    error = float(row_energies(weight.float() - decoded.float(), moment).sum())
    return relative_error(error, float(row_energies(weight, moment).sum()))


def relative_error(error: float, output: float) -> float:
    """The size of an error over that of an output, from their squares; 0 where the output is zero."""
    return (max(error, 0.0) / output) ** 0.5 if output > 0 else 0.0


def row_energies(rows: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """w M w^T, the mean square of what each row w puts out: float64 ``[..., out]``.

    rows: ``[..., out, in]``, a float dtype. moment: mean (or any multiple) of x x^T, fp32 ``[in, in]`` or
    ``[..., in, in]``.
    """
    step = max(1, _SLAB * rows.shape[-2] // max(rows.numel(), 1))
    parts = [
        (some := part.float()).matmul(moment).double().mul_(some).sum(-1) for part in rows.split(step, -2)
    ]
    return torch.cat(parts, -1)
