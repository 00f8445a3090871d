"""QoQ's two levels: INT8 per output channel, then UINT4 groups with integer scales and zero points.

A kernel turns group codes back into INT8 with integer arithmetic alone, (code - zero) * scale, and scales whole
channels at the end. Level one stays within [-119, 119], so that level two, which rounds by half a scale of at most
16, never leaves INT8. Source: Lin et al., "QServe: W4A8KV4 Quantization and System Co-design", 2024, section 4.1.
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.scales import LARGEST_SCALE, SMALLEST_SCALE, divided
from halfbyte.formats.spec import TensorFormat

PROTECTED_RANGE = 119
SMALLEST_CHANNEL_SCALE = 2.0**-126


def check_format(fmt: TensorFormat) -> None:
    """Errors: integer group scales with anything but what the protective range was made for."""
    if (fmt.element, fmt.granularity, fmt.symmetric, fmt.outer) != ("int4", "group", False, "channel"):
        raise HalfbyteError(
            "int8 scales go with asymmetric int4 groups and outer scales per channel only, not with "
            f"{'symmetric' if fmt.symmetric else 'asymmetric'} {fmt.element} per {fmt.granularity}, "
            f"outer scale {fmt.outer}"
        )


def channel_scales(absmax: torch.Tensor, dtype: str = "f32") -> torch.Tensor:
    """Level one: fp32 scales that map a channel's largest magnitude (fp32, any shape) to 119.

    dtype: what they are rounded to, ``f32`` or ``f16``; a magnitude that rounding leaves above 119 saturates.
    Errors: a scale that is beyond the largest fp16.
    """
    scales = divided(absmax, PROTECTED_RANGE).clamp(min=SMALLEST_CHANNEL_SCALE)
    if dtype == "f32":
        return scales
    rounded = scales.clamp(min=SMALLEST_SCALE["f16"]).half().float()
    if not rounded.isfinite().all():
        raise HalfbyteError(
            f"a channel's scale {float(scales.amax()):g} is beyond the largest fp16, {LARGEST_SCALE['f16']:g}; "
            f"accepted: magnitudes up to {PROTECTED_RANGE} times that"
        )
    return rounded


def level_one_(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 weights (overwritten) as level-one integers in [-119, 119], still in fp32."""
    return weight.div_(scales).round_().clamp_(-PROTECTED_RANGE, PROTECTED_RANGE)


def group_grid(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Level two: int8 scales 1..16 and signed zero points of ranges ``-119 <= low <= 0 <= high <= 119``.

    low, high: fp32, in level-one integers (fractions where a range was clipped), any one shape.
    The zero points lie in [-8, 7] as the codes do: QoQ's unsigned zero minus 8.
    """
    scales = divided(high - low, 15).round_().clamp_(min=1)
    zeros = (-low / scales).round_().clamp_(0, 15)
    return scales.to(torch.int8), (zeros - 8).to(torch.int8)
