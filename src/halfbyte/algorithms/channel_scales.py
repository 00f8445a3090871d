"""Scales per input channel that are always of use: finite, positive, within bounds, one where nothing is known."""

from __future__ import annotations

import torch

# Beyond it a scale says more about a dead channel than about its weights.
LARGEST_RATIO = 1e4


def log_magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Natural logarithms in fp64, NaN where a value is zero, negative or not finite."""
    usable = values.isfinite() & (values > 0)
    return values.double().log().masked_fill(~usable, torch.nan)


def scales_from_logs(logs: torch.Tensor) -> torch.Tensor:
    """fp32 scales of fp64 logarithms, within 1e-4 to 1e4, and one where a logarithm is NaN."""
    return logs.nan_to_num(nan=0.0).exp().clamp(1 / LARGEST_RATIO, LARGEST_RATIO).float()
