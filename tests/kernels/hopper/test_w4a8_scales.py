"""Scales as fp16 times a power of two for a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.hopper.w4a8_scales import dead_groups, normalized
from halfbyte.kernels.hopper_int4 import HopperW4A8
from halfbyte.kernels.problem import LinearProblem
from tests.kernels.cases import settled

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
    """bf16 scales of which the smallest is 1/1000 of the largest, in rows of very different size."""
    scales = torch.tensor([[1.0, 0.123, 1e-3], [3e-9, 2e-9, 1e-9], [0, 0, 0], [1e6, 0, -1e5]]).to(BF16)
    assert normalized(scales) is not None


@pytest.mark.parametrize(
    "scales",
    [
        torch.tensor([[0.1, 1 / 3]]),  # more than 11 digits
        torch.tensor([[1.0, 2.0**-11]]),  # too far apart
        torch.tensor([[1.0, 0.0, 2.0**-23]]),
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([[1.0, float("inf")]]),
        torch.tensor([[2.0**-90]]),
    ],
)
def test_others_are_not(scales: torch.Tensor) -> None:
    assert normalized(scales) is None


def test_groups_of_zeros_are_dead() -> None:
    codes = torch.zeros(3, 6, dtype=torch.int8)
    codes[0, 1], codes[1, 5], codes[2] = 3, -1, 2
    zeros = torch.tensor([[0, 0], [0, -1], [2, 2]], dtype=torch.int8)
    assert dead_groups(codes, 4, None).tolist() == [1, 2]
    assert dead_groups(codes, 4, zeros).tolist() == [1, 2, 4, 5]


CPU = torch.device("cpu")


def there_and_back(q: QuantizedTensor) -> dict[str, torch.Tensor]:
    scheme = replace(settled("w4a8"), weights=q.format)
    prepared = HopperW4A8().prepare(q, LinearProblem(scheme, *q.shape, CPU, BF16))
    found = HopperW4A8().restore(prepared)
    assert torch.equal(found.codes, q.codes)
    assert torch.equal(found.scales, q.scales)
    assert found.scales.dtype == q.scales.dtype
    if q.zero_points is not None:
        assert found.zero_points is not None
        assert torch.equal(found.zero_points, q.zero_points)
    return dict(prepared.tensors)


@pytest.mark.parametrize("columns", [512, 640])
@pytest.mark.parametrize("dead", [None, "group", "row"])
def test_packed_weights_come_back(columns: int, dead: str | None) -> None:
    """Also where rounding gave the smallest of all numbers to a group or row of zeros."""
    weight = torch.randn(96, columns)
    if dead == "group":
        weight[3, 256:384] = 0
    if dead == "row":
        weight[5] = 0
    q = quantize(weight, settled("w4a8").weights)
    assert dead is None or q.scales.float().min() < 1e-37
    tensors = there_and_back(q)
    assert tensors["weight"].shape[2] == 4096 + 64 * 2
    assert tensors["row_factors"].shape == (96,)
    assert ("dead_groups" in tensors) == (dead is not None)


@pytest.mark.parametrize("dead", [False, True])
def test_packed_weights_with_zero_points_come_back(dead: bool) -> None:
    q = quantize(torch.randn(96, 512), replace(settled("w4a8").weights, symmetric=False))
    assert q.zero_points is not None
    if dead:
        q.codes[3, 256:384] = q.zero_points[3, 2]
        q.scales[3, 2] = 2.0**-126
    tensors = there_and_back(q)
    assert tensors["weight"].shape[2] == 4096 + 64 * 4
    assert "row_factors" in tensors
    assert ("dead_groups" in tensors) == dead


def test_packed_weights_with_other_scales_come_back() -> None:
    q = quantize(torch.randn(64, 256), settled("w4a8", "f32").weights)
    tensors = there_and_back(q)
    assert set(tensors) == {"weight"}
    assert tensors["weight"].shape[2] == 4096 + 64 * 4
