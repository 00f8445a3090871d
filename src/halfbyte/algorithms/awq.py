"""AWQ: scales per input channel that spare the weights which large inputs meet, found by trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from halfbyte.algorithms.channel_scales import log_magnitudes, scales_from_logs
from halfbyte.algorithms.rtn import rtn
from halfbyte.algorithms.shared_columns import SharedColumns, unshared
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.devices import tf32_products
from halfbyte.errors import NonFiniteError
from halfbyte.formats.grid import Ranges
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling

# A weight -> the weight that a kernel will see, both [out, in].
RoundTrip = Callable[[torch.Tensor], torch.Tensor]
STEPS = 20
# fp32 elements whose products with the moment are held at a time.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class AwqResult:
    """What the search found.

    scales: fp32 ``[channels]``; weights are multiplied by them, inputs divided. exponent: a of the chosen candidate,
    none where the identity won. duo: its weights took part, with exponent 1 - a.
    error_before, error_after: squared output error with the identity and with ``scales``, summed over the consumers.
    """

    scales: torch.Tensor
    exponent: float | None
    duo: bool
    error_before: float
    error_after: float


def awq_scales(
    weights: Sequence[torch.Tensor],
    formats: Sequence[TensorFormat],
    statistics: InputStatistics,
    shared: SharedColumns | None = None,
    round_trips: Sequence[RoundTrip] | None = None,
) -> AwqResult:
    """The scales with the least squared output error for ``weights``, ``[out_i, in]`` each, that read one tensor.

    Candidates are mean|x|^a / mean|w|^b for a = 0, 1/20, ..., 1 and b = 1 - a or 0, where |w| is relative to the
    largest of its tile, each divided by sqrt(largest * smallest) and kept within 1e-4 to 1e4; channels whose inputs
    or weights are zero or not finite have scale one. The identity is the first candidate and keeps a tie.
    The error of a candidate s is the sum of tr(E M E^T) with E = Q(W diag(s)) diag(1/s) - W and M the moment.
    shared: which columns must have one scale; each has its own unless said otherwise.
    round_trips: what of each scaled weight a kernel will see; rounded to nearest and decoded unless said otherwise.
    Source: Lin et al., "AWQ: Activation-aware Weight Quantization", 2024, section 3.2 and its code.
    Errors: weights or a moment whose error with the identity is not finite (NonFiniteError).
    """
    columns = shared or unshared(statistics.absmean.numel())
    inputs = log_magnitudes(columns.mean(statistics.absmean))
    magnitudes = log_magnitudes(columns.mean(_relative_magnitudes(weights, formats)))
    choices = [(step / STEPS, duo) for step in range(STEPS + 1) for duo in (True, False)]
    # With a = 1 both are the same; with a = 0 and without weights there is only the identity.
    choices = [choice for choice in choices if choice not in ((1.0, True), (0.0, False))]

    def candidate(a: float, duo: bool) -> torch.Tensor:
        # Times zero as well, so that a channel without weights is left out of either kind.
        return scales_from_logs(_centered(a * inputs - (1 - a if duo else 0.0) * magnitudes))

    seen_as = round_trips or [partial(_nearest, fmt=fmt) for fmt in formats]

    def error(scales: torch.Tensor) -> torch.Tensor:
        spread = columns.to_columns(scales)
        parts = [
            _scaled_error(weight, spread, statistics.moment, round_trip)
            for weight, round_trip in zip(weights, seen_as, strict=True)
        ]
        return torch.stack(parts).sum()

    identity = torch.ones_like(inputs, dtype=torch.float32)
    errors = torch.stack([error(identity), *(error(candidate(*choice)) for choice in choices)]).tolist()
    before = errors[0]
    if not math.isfinite(before):
        raise NonFiniteError(
            f"the output error of {len(weights)} weights {[list(w.shape) for w in weights]} is {before}; "
            "accepted: inputs and weights whose products are finite"
        )
    best = min(range(len(errors)), key=lambda index: math.inf if math.isnan(errors[index]) else errors[index])
    if best == 0:
        return AwqResult(identity, None, False, before, before)
    exponent, duo = choices[best - 1]
    return AwqResult(candidate(exponent, duo), exponent, duo, before, errors[best])


def _relative_magnitudes(weights: Sequence[torch.Tensor], formats: Sequence[TensorFormat]) -> torch.Tensor:
    """Mean over all rows of each column's magnitudes relative to the largest of their tiles, fp32 ``[in]``."""
    rows = sum(len(weight) for weight in weights)
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight, fmt in zip(weights, formats, strict=True):
        tiling = Tiling.of(tuple(weight.shape), fmt)
        largest = tiling.per_tile(Ranges.of(weight, fmt).absmax)
        relative = tiling.tiles(weight.float().abs()).div_(largest.masked_fill(largest == 0, 1.0))
        total += tiling.restore(relative).sum(0)
    return total / rows


def _centered(logs: torch.Tensor) -> torch.Tensor:
    """Logarithms whose smallest and largest are the same distance from zero, NaN left out."""
    low, high = logs.nan_to_num(nan=torch.inf).amin(), logs.nan_to_num(nan=-torch.inf).amax()
    return logs - (low + high) / 2


def _nearest(weight: torch.Tensor, fmt: TensorFormat) -> torch.Tensor:
    """The weight rounded to nearest and decoded, fp32."""
    return dequantize(rtn(weight, fmt))


def _scaled_error(
    weight: torch.Tensor, scales: torch.Tensor, moment: torch.Tensor, round_trip: RoundTrip
) -> torch.Tensor:
    """tr(E M E^T) of one weight and candidate, fp64 scalar; NaN where scaled weights are no numbers any more."""
    exact = weight.float()
    try:
        decoded = round_trip(exact * scales)
    except NonFiniteError:
        return torch.full((), torch.nan, dtype=torch.float64, device=weight.device)
    errors = (decoded / scales).sub_(exact)
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for part in errors.split(max(1, _CHUNK // errors.shape[1])):
        with tf32_products():  # candidates differ by far more than that
            total += (part @ moment).mul_(part).sum(dtype=torch.float64)
    return total
