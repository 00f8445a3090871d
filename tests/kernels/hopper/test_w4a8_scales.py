"""Scales as fp16 times a power of two for a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.kernels.hopper.w4a8_scales import normalized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@given(
    rows=st.integers(1, 5),
    groups=st.integers(0, 6),
    size=st.floats(-40, 20),
    spread=st.floats(0, 40),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=300, deadline=None)
def test_every_bit_comes_back_or_none_does(
    rows: int, groups: int, size: float, spread: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = size + spread * torch.rand(rows, groups, generator=generator, dtype=torch.float64)
    scales = (torch.randn(rows, groups, generator=generator, dtype=torch.float64) * 2**exponents).to(dtype)
    found = normalized(scales)
    if found is None:
        return
    halves, factors = found
    assert halves.dtype == FP16
    assert factors.dtype == FP32
    assert torch.equal((halves.float() * factors[:, None]).to(dtype), scales)
    assert torch.equal(torch.frexp(factors).mantissa, torch.full_like(factors, 0.5))  # powers of two
    largest = halves.float().abs().amax(1) if groups else torch.zeros(rows)
    assert ((largest == 0) | ((largest >= 2**-4) & (largest < 2**-3))).all()


def test_scales_of_a_model_are_held() -> None:
    """bf16 scales of which the smallest is 1/8192 of the largest, in rows of very different size."""
    scales = torch.tensor([[1.0, 0.123, 1.2e-4], [3e-9, 2e-9, 1e-9], [0, 0, 0], [1e6, 0, -1e5]]).to(BF16)
    assert normalized(scales) is not None


@pytest.mark.parametrize(
    "scales",
    [
        torch.tensor([[0.1, 1 / 3]]),  # more than 11 digits
        torch.tensor([[1.0, 2.0**-23]]),  # too far apart
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([[1.0, float("inf")]]),
        torch.tensor([[2.0**-90]]),
    ],
)
def test_others_are_not(scales: torch.Tensor) -> None:
    assert normalized(scales) is None
