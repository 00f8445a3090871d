"""Integer elements INT2..INT8: signed codes, round to nearest with ties to even, saturating."""

from __future__ import annotations

import torch

from halfbyte.formats.scales import divided, round_scales, scale_values
from halfbyte.formats.spec import TensorFormat


def symmetric_reach(bits: int) -> float:
    """The magnitude, in codes, that a symmetric range is stretched over: 7.5 for INT4.

    Half a step more than the largest code: the positive end rounds down into it, the negative end up to the
    smallest code, and all 2**bits codes are of use (compressed-tensors does the same).
    """
    return ((1 << bits) - 1) / 2


def asymmetric_grid(
    low: torch.Tensor, high: torch.Tensor, fmt: TensorFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of ranges ``low <= 0 <= high`` (fp32, any one shape).

    scale = (high - low) / (2**bits - 1) in ``fmt.scale``; zero point = round(-low / scale) + qmin, int8.
    As the range includes zero, the zero point is a code and zero stays exactly zero.
    """
    steps = (1 << fmt.bits) - 1
    # In float64, as high - low may pass the largest fp32.
    scales = round_scales(divided(high.double() - low.double(), steps).float(), fmt.scale)
    zero_points = (-low / scale_values(scales)).round_() + fmt.qmin
    return scales, zero_points.clamp_(fmt.qmin, fmt.qmax).to(torch.int8)


def encode_integer_(
    quotients: torch.Tensor, fmt: TensorFormat, zero_points: torch.Tensor | None
) -> torch.Tensor:
    """Weights over scales (fp32, overwritten) as codes, still in fp32: clamp(round(quotient) + zero point)."""
    quotients.round_()
    if zero_points is not None:
        quotients.add_(zero_points)
    return quotients.clamp_(fmt.qmin, fmt.qmax)
