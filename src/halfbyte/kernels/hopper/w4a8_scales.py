"""Group scales in the form in which the W4A8 kernel can keep sums in fp16: fp16 numbers times a power of two for a row.

A power of two changes no digit of a scale, so scales of 8 or 11 digits stay exact, and a row's results are multiplied
by it at the end. With a row's largest scale between 1/16 and 1/8, sums neither leave fp16's range, whatever the
inputs, nor lose digits at its lower end.
"""

from __future__ import annotations

import torch

_LARGEST_EXPONENT = -3  # the largest scale of a row is below 2 to this
_MOST_EXPONENT = 64  # of a factor: times sums and the tokens' scales, results stay in fp32's range


def normalized(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """fp16 ``[N, G]`` and fp32 factors ``[N]``, powers of two, whose products are ``scales [N, G]``, bit for bit.

    None where fp16 does not hold them: more than 11 digits, scales of a row that are too far apart, NaN or Inf.
    """
    exact = scales.float()
    largest = exact.abs().amax(1) if exact.shape[1] else exact.new_zeros(len(exact))
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - _LARGEST_EXPONENT, 0)
    factors = torch.ldexp(torch.ones_like(largest), exponents)
    halves = (exact / factors[:, None]).half()
    holds = (halves.float() * factors[:, None] == exact).all() & largest.isfinite().all()
    holds &= (exponents.abs() <= _MOST_EXPONENT).all()
    return (halves, factors) if bool(holds) else None
