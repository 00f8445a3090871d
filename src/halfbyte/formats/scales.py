"""Scales: rounding them to the dtype they are stored in, and the smallest one that is allowed.

A scale is never zero, so that nothing divides by it, and never one in place of zero: a tile of zeros must not
raise the largest scale of its neighbours, from which a two-level scheme takes its outer scale.
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.floats import E8M0_BIAS, E8M0_NAN, decode_e8m0

FLOAT_SCALE_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}
# The smallest normal number where that is tiny; the smallest number at all where it is not.
SMALLEST_SCALE = {"bf16": 2.0**-126, "f32": 2.0**-126, "f16": 2.0**-24, "e4m3": 2.0**-9}
LARGEST_SCALE = {name: torch.finfo(dtype).max for name, dtype in FLOAT_SCALE_DTYPES.items()}


def divided(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """``values / divisor``, rounded once on every device.

    torch on a GPU multiplies by the reciprocal of a Python number instead, which may be off by the last bit.
    """
    return values / values.new_full((), divisor)


def round_scales(ideal: torch.Tensor, dtype: str) -> torch.Tensor:
    """Non-negative fp32 scales rounded to nearest in ``dtype`` (``bf16``, ``f16``, ``f32`` or ``e4m3``), same shape.

    Saturates at both ends: to the largest finite scale, and to the smallest positive one.
    Errors: a dtype that is chosen by a rule of its own (``e8m0``, ``int8``) or not settled (``model``).
    """
    if dtype not in FLOAT_SCALE_DTYPES:
        raise HalfbyteError(
            f"scale dtype {dtype!r} cannot be rounded to; accepted: {', '.join(FLOAT_SCALE_DTYPES)}"
        )
    return ideal.clamp(SMALLEST_SCALE[dtype], LARGEST_SCALE[dtype]).to(FLOAT_SCALE_DTYPES[dtype])


def shared_exponents(absmax: torch.Tensor, largest: float) -> torch.Tensor:
    """MX scales in E8M0 (uint8), same shape, of tiles with the given largest magnitudes.

    The exponent is floor(log2(absmax)) - floor(log2(``largest`` element)), kept within E8M0 (OCP MX 1.0,
    section 6.3), so magnitudes in the last part of a binade saturate. Tiles of zeros get the smallest scale.
    """
    _, exponent = torch.frexp(absmax)
    _, largest_exponent = torch.frexp(torch.tensor(largest))
    code = (exponent - largest_exponent.to(exponent.device) + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    return torch.where(absmax == 0, 0, code).to(torch.uint8)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Stored scales of any dtype, as ``QuantizedTensor.scales`` holds them, in fp32: uint8 is E8M0."""
    return decode_e8m0(scales) if scales.dtype == torch.uint8 else scales.float()
