from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import quantize
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.vllm_scales import VLLM_W4A8, rounded_weight, settle, split_scales, vllm_dequantize

E4M3 = ml_dtypes.float8_e4m3fn


def converted(scales: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """vLLM's conversion from its definition: float32 groups ``[out, groups]`` and channels ``[out, 1]``."""
    values = scales.float().numpy()
    token = np.maximum(values.max(-1, keepdims=True) / np.float32(448), np.float32(1 / (448 * 512)))
    groups = (values / token).astype(E4M3).astype(np.float32)
    return (groups / np.float32(8)).astype(E4M3).astype(np.float32), token * np.float32(8)


@st.composite
def scale_rows(draw: st.DrawFn) -> torch.Tensor:
    """bfloat16 ``[4, groups]``: rows of any magnitude, groups of similar or of very different ones."""
    groups = draw(st.integers(1, 9))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    magnitudes = [draw(st.sampled_from([-126, -60, -30, -12, -10, -9, -8, -5, 0, 20, 120])) for _ in range(4)]
    spread = draw(st.sampled_from([0.0, 0.5, 4.0, 20.0]))
    exponents = torch.tensor(magnitudes)[:, None] - spread * torch.rand(4, groups, generator=seed)
    rows = torch.exp2(exponents) * (1 + torch.rand(4, groups, generator=seed))
    return rows.clamp(min=2.0**-126).to(torch.bfloat16)


@settings(max_examples=200, deadline=None)
@given(scales=scale_rows())
def test_scales_split_as_vllm_converts_them(scales: torch.Tensor) -> None:
    groups, channels = split_scales(scales)
    wanted_groups, wanted_channels = converted(scales)
    np.testing.assert_array_equal(groups.float().numpy(), wanted_groups)
    np.testing.assert_array_equal(channels.unsqueeze(-1).numpy(), wanted_channels)


@settings(max_examples=200, deadline=None)
@given(scales=scale_rows())
def test_settled_scales_survive_the_conversion(scales: torch.Tensor) -> None:
    settled = settle(scales)
    assert settled.dtype == torch.bfloat16
    assert (settled > 0).all()
    groups, channels = converted(settled)
    products = torch.from_numpy(groups.astype(np.float64) * channels.astype(np.float64))
    floored = torch.from_numpy(channels[:, 0] == np.float32(8 / (448 * 512)))
    # To float64 and back: exactly equal, not after rounding.
    assert torch.equal(products[~floored], settled[~floored].double())
    assert torch.equal(products[floored].float().to(torch.bfloat16), settled[floored])
    assert (groups[~floored.numpy()].max(-1) == 56).all()
    assert torch.equal(settle(settled), settled)


@settings(max_examples=200, deadline=None)
@given(scales=scale_rows())
def test_settled_scales_stay_close(scales: torch.Tensor) -> None:
    given_scales, settled = scales.double(), settle(scales).double()
    moved = (settled - given_scales).abs()
    groups, channels = (torch.from_numpy(part).double() for part in converted(settle(scales)))
    # Half a step of E4M3, whether normal (1/17 of the scale at most) or not; 2^-9 for storing a floored row's.
    room = torch.maximum(given_scales / 17, 2.0**-10 * channels) + settled * 2.0**-9
    smallest = groups == 2.0**-9
    assert ((moved <= room) | smallest).all()
    assert (settled[smallest] <= (2.0**-9 * channels.expand_as(groups)[smallest]) * (1 + 2.0**-8)).all()


def test_rows_around_the_floor_settle_on_either_side() -> None:
    scales = torch.tensor([[2.0**-9 * 0.98], [2.0**-9], [2.0**-9 * 1.03], [2.0**-9 * 1.1]]).to(torch.bfloat16)
    _, channels = split_scales(settle(scales))
    floor = torch.tensor(8 / (448 * 512))
    assert torch.equal(channels[:3], floor.expand(3))
    assert channels[3] == 1.25 * 2.0**-18 * 8


def test_small_rows_keep_their_sizes() -> None:
    """Rows under the floor must not be raised to it."""
    scales = torch.tensor([[1e-4, 2e-5, 1e-6]]).to(torch.bfloat16)
    torch.testing.assert_close(settle(scales).float(), scales.float(), rtol=1 / 16, atol=0)


def test_a_weight_is_what_the_kernel_multiplies() -> None:
    weight = torch.randn(2, 5, 384, generator=torch.Generator().manual_seed(0)) * 0.03
    q = quantize(weight, VLLM_W4A8)
    found = vllm_dequantize(q)
    for member in range(2):
        groups, channels = converted(q.scales[member])
        products = q.codes[member].numpy().astype(np.float32) * np.repeat(groups, 128, -1)
        np.testing.assert_array_equal(
            found[member].numpy(), products.astype(E4M3).astype(np.float32) * channels
        )
    assert torch.equal(found, rounded_weight(q.codes, q.scales))


@pytest.mark.parametrize(
    "fmt", [TensorFormat("int4", "group", 64, scale="bf16"), TensorFormat("int8", "channel", scale="bf16")]
)
def test_other_formats_are_refused(fmt: TensorFormat) -> None:
    with pytest.raises(HalfbyteError, match="accepted: symmetric int4 in groups of 128"):
        vllm_dequantize(quantize(torch.ones(2, 128), fmt))
