"""SmoothQuant: part of what makes activations hard to quantize moves into the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.algorithms.channel_scales import log_magnitudes, scales_from_logs
from halfbyte.algorithms.shared_columns import SharedColumns, unshared
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.errors import HalfbyteError


def smoothquant_scales(
    weights: Sequence[torch.Tensor],
    statistics: InputStatistics,
    alpha: float = 0.5,
    *,
    shared: SharedColumns | None = None,
) -> torch.Tensor:
    """Scales of the channels that ``weights``, ``[out_i, in]`` each, read: fp32 ``[channels]``, within 1e-4 to 1e4.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha); weights are multiplied by s, inputs divided. One where a channel or
    all its weights are zero. shared: which columns must have one scale; each has its own unless said otherwise.
    Source: Xiao et al., "SmoothQuant", 2023, section 4, equation 4.
    Errors: an ``alpha`` outside 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise HalfbyteError(f"SmoothQuant's alpha {alpha} is not accepted; accepted: 0 to 1")
    columns = shared or unshared(statistics.absmax.numel())
    largest = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)
    inputs, outputs = (log_magnitudes(columns.largest(part)) for part in (statistics.absmax, largest))
    return scales_from_logs(alpha * inputs - (1 - alpha) * outputs)
