"""Group scales in the form in which the W4A8 kernel can keep sums in fp16: fp16 numbers times a power of two for a row.

A power of two changes no digit of a scale, so scales of 8 or 11 digits stay exact, and a row's results are multiplied
by it at the end. With a row's largest scale between 1/16 and 1/8, sums do not leave fp16's range, whatever the inputs;
and with its smallest not less than 1/1024 of that, none is so small that fp16 has fewer digits for it.
"""

from __future__ import annotations

import torch

_LARGEST_EXPONENT = -3  # the largest scale of a row is below 2 to this
_MOST_APART = 2.0**10  # the largest scale of a row by the smallest
_MOST_EXPONENT = 64  # of a factor: times sums and the tokens' scales, results stay in fp32's range


def normalized(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """fp16 ``[N, G]`` and fp32 factors ``[N]``, powers of two, whose products are ``scales [N, G]``, bit for bit.

    A scale of 0 stays 0. None where fp16 does not hold them so: more than 11 digits, scales of a row that are too far
    apart, NaN or Inf.
    """
    exact = scales.float()
    sizes = exact.abs()
    largest = sizes.amax(1) if exact.shape[1] else exact.new_zeros(len(exact))
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - _LARGEST_EXPONENT, 0)
    factors = torch.ldexp(torch.ones_like(largest), exponents)
    halves = (exact / factors[:, None]).half()
    holds = (halves.float() * factors[:, None] == exact).all() & largest.isfinite().all()
    holds &= ((sizes == 0) | (sizes * _MOST_APART >= largest[:, None])).all()
    holds &= (exponents.abs() <= _MOST_EXPONENT).all()
    return (halves, factors) if bool(holds) else None


def dead_groups(codes: torch.Tensor, group_size: int, zero_points: torch.Tensor | None) -> torch.Tensor:
    """Which of the flattened scales ``[N, G]`` count for nothing, int64: all ``codes [N, K]`` of their groups are 0, or
    equal to their ``zero_points [N, G]``. Often they are the smallest number there is.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % group_size))
    groups = padded.view(len(codes), -1, group_size)
    zero = 0 if zero_points is None else zero_points[:, :, None]
    inside = torch.arange(padded.shape[1], device=codes.device).view(1, -1, group_size) < codes.shape[1]
    return ((groups == zero) | ~inside).all(2).flatten().nonzero().flatten()
