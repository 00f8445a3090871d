"""Small floating-point elements: E4M3, E5M2 (OCP FP8), E2M1 (OCP FP4) and the E8M0 scale.

All encoders round to nearest, ties to even, and saturate: finite values and infinities beyond the largest
finite element become that element with their sign. NaN stays NaN where the format has one.
Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0, section 5.
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.spec import FLOAT_MAX

FLOAT8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E8M0_NAN = 255


def encode_float8(x: torch.Tensor, element: str) -> torch.Tensor:
    """``x`` as ``e4m3`` (``torch.float8_e4m3fn``) or ``e5m2`` (``torch.float8_e5m2``), same shape.

    NaN stays NaN; infinities saturate, although E5M2 could hold them: a weight never means infinity.
    """
    limit = FLOAT_MAX[element]
    return x.float().clamp(-limit, limit).to(FLOAT8_DTYPES[element])


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """``x`` as E2M1 codes in uint8, same shape: bit 3 is the sign (kept for zeros), bits 0..2 the magnitude.

    Errors: NaN, for which the format has no code.
    """
    x = x.float()
    magnitude = x.abs().clamp_(max=6.0)
    if bool(magnitude.sum().isnan()):
        raise NonFiniteError("E2M1 has no NaN; accepted: numbers and infinities, which saturate to 6")
    # Codes are linear in three pieces of slope 2, 1 and 1/2; the lower envelope of the rounded pieces is the code,
    # and as each piece starts at an even code, ties to even in a piece are ties to even in the codes.
    code = (magnitude * 2.0).round_()
    torch.minimum(code, magnitude.round().add_(2.0), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4.0), out=code)
    return code.to(torch.uint8).bitwise_or_(x.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (any integer dtype, 0..15) as fp32, same shape."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    return values[codes.int()]


def encode_e8m0(x: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to ``x`` as E8M0 in uint8 (exponent + 127), same shape; halfway goes up.

    Saturates to 2^-127 .. 2^127; zero becomes 2^-127. NaN and negative values become NaN (255).
    """
    x = x.float()
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    code = (exponent - 1 + (mantissa >= 0.75).int() + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    code = torch.where(x.isinf(), E8M0_NAN - 1, code)
    code = torch.where(x == 0, 0, code)
    return torch.where(x.isnan() | (x < 0), E8M0_NAN, code).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 codes (uint8) as fp32 powers of two, same shape; 255 becomes NaN.

    Errors: another dtype, as a signed exponent would be misread.
    """
    if codes.dtype != torch.uint8:
        raise HalfbyteError(f"E8M0 codes of dtype {codes.dtype} are not understood; accepted: torch.uint8")
    return codes.view(torch.float8_e8m0fnu).float()
