"""QoQ: progressive quantization to INT8 per channel, then UINT4 groups whose scales and zero points are integers."""

from __future__ import annotations

import torch

from halfbyte.algorithms.clip import clip_mse_grid, clip_output_grid
from halfbyte.algorithms.grid_search import least_error_grid, output_error_of_tiles, weight_error
from halfbyte.errors import NonFiniteError
from halfbyte.formats.grid import Grid, Ranges
from halfbyte.formats.qoq import channel_scales, check_format, group_grid, level_one_
from halfbyte.formats.quantize import encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling

LARGEST_GROUP_SCALE = 16
# Steps from the scale that covers a group's whole range.
_SCALE_STEPS = (0, 1, -1, -2, -3, -4)


def qoq(weight: torch.Tensor, fmt: TensorFormat, moment: torch.Tensor | None = None) -> QuantizedTensor:
    """A weight ``[..., out, in]`` in ``fmt``, each scale and zero point the best of a few.

    fmt: asymmetric INT4 in groups with int8 scales and outer scales per channel (QoQ g128), or asymmetric INT4 per
        channel (QoQ per channel, which has one level).
    moment: mean of ``x x^T`` over the layer's inputs, fp32 ``[in, in]``, or ``[..., in, in]`` with one for each member
        of a stack: least output error, otherwise least squared error of the weights. No group ends worse than rounded
        to nearest.
    Source: Lin et al., "QServe: W4A8KV4 Quantization and System Co-design", 2024, section 4.1.
    Errors: those of :func:`halfbyte.formats.quantize.quantize`; other formats; a moment of another shape.
    """
    return encode(weight, fmt, qoq_grid(weight, fmt, moment))


def qoq_grid(weight: torch.Tensor, fmt: TensorFormat, moment: torch.Tensor | None = None) -> Grid:
    """The grid of :func:`qoq`, for an algorithm that rounds by itself."""
    if fmt.granularity == "channel" and fmt.element == "int4" and not fmt.symmetric:
        return clip_mse_grid(weight, fmt) if moment is None else clip_output_grid(weight, fmt, moment)
    check_format(fmt)
    ranges = Ranges.of(weight, fmt)
    outer = channel_scales(ranges.absmax.amax(-1, keepdim=True), fmt.outer_dtype)
    # Rounding is monotonic: the range of the rounded weights is the rounded range.
    low, high = (level_one_(bound.clone(), outer) for bound in (ranges.low, ranges.high))
    candidates = [Grid(scales, zero_points, outer) for scales, zero_points in group_candidates(low, high)]
    if moment is None:
        return least_error_grid(weight, fmt, candidates, weight_error)
    measure = output_error_of_tiles(moment, Tiling.of(tuple(weight.shape), fmt))
    return least_error_grid(weight, fmt, candidates, measure)


def group_candidates(low: torch.Tensor, high: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zero points (int8, as :func:`halfbyte.formats.qoq.group_grid` gives them) worth trying.

    low, high: fp32 level-one integers, ``-119 <= low <= 0 <= high <= 119``, any one shape. The round-to-nearest grid
    comes first; then, for scales about it, the two zero points next to where the 16 codes lie about the range's middle.

    Every code that rounding can give decodes within INT8: scales are at most 16, so rounding moves a level-one
    integer by 8 at most, 119 + 8 = 127, and zero lies among the codes, so a code that saturates moves towards it.
    """
    nearest = group_grid(low, high)
    candidates = [nearest]
    for step in _SCALE_STEPS:
        scales = (nearest[0].float() + step).clamp_(1, LARGEST_GROUP_SCALE)
        middle = 7.5 - (low + high) / (2 * scales)
        candidates += [
            (scales.to(torch.int8), (zeros.clamp_(0, 15) - 8).to(torch.int8))
            for zeros in (middle.floor(), middle.ceil())
        ]
    return candidates


def channel_order(absmax: torch.Tensor) -> torch.Tensor:
    """Order of input channels by salience, the largest inputs first: int64 ``[in]``, stable.

    absmax: largest magnitude of each channel, ``[in]``. Channels that are alike then share groups: the weight's
    columns are taken in this order, and so is what puts the channels out (rows of a linear, never a residual stream).
    Source: Lin et al., "QServe", 2024, section 4.3.
    Errors: a magnitude that is not finite (NonFiniteError).
    """
    if not bool(absmax.isfinite().all()):
        raise NonFiniteError(
            f"input magnitudes {list(absmax.shape)} hold NaN or Inf; accepted: finite numbers only"
        )
    return absmax.argsort(descending=True, stable=True)
