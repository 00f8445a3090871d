"""QServe's form: read as its kernel computes, written as OmniServe's converter writes, refused where neither can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.checkpoint.qserve import decode, encode, stored_entries
from halfbyte.checkpoint.qserve_config import scheme_of
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from tests.checkpoint.qserve_files import GROUP, packed, packed_groups, per_channel, two_levels

M = "model.layers.0.mlp.up_proj"
GROUPED, ROWS = scheme_of(128), scheme_of(-1)


def random(*shape: int, low: int = 0, high: int = 15, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def channel_scales(rows: int) -> torch.Tensor:
    return (torch.rand(rows, generator=torch.Generator().manual_seed(9)) + 0.01).mul(1e-3).half()


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    pairs = [
        (getattr(a, part), getattr(b, part)) for part in ("codes", "scales", "zero_points", "outer_scales")
    ]
    return a.format == b.format and all(
        x is y is None or (x.dtype is y.dtype and torch.equal(x, y)) for x, y in pairs
    )


def kernel_weight(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, channels: torch.Tensor
) -> Any:
    """What the kernel multiplies with, float64: bytes, added modulo 256, times the channel's scale."""
    spread = scales.repeat_interleave(GROUP, 1), offsets.repeat_interleave(GROUP, 1)
    level_one = (codes * spread[0] + spread[1] + 128) % 256 - 128
    return level_one.double() * channels.double()[:, None]


def test_two_levels_are_read_as_the_kernel_computes() -> None:
    codes, scales, zeros = random(64, 256), random(64, 2, low=1, high=16), random(64, 2, seed=1)
    zeros = torch.minimum(zeros, 127 // scales)
    codes = torch.minimum(codes, (zeros + 127 // scales).repeat_interleave(GROUP, 1))
    channels = channel_scales(64)
    q = decode(M, GROUPED, two_levels(M, codes, scales, -zeros * scales, channels))
    assert q.format == GROUPED.weights
    assert torch.equal(q.codes.long(), codes - 8)
    assert q.zero_points is not None
    assert torch.equal(q.zero_points.long(), zeros - 8)
    assert torch.equal(q.scales.long(), scales)
    assert torch.equal(
        dequantize(q).double(), kernel_weight(codes, scales, -zeros * scales, channels).float().double()
    )


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_any_offsets_that_stay_in_int8_are_read_exactly(seed: int) -> None:
    codes, scales = random(32, 128, seed=seed), random(32, 1, low=0, high=127, seed=seed + 1)
    products = codes * scales
    low, high = products.amin(1, keepdim=True), products.amax(1, keepdim=True)
    scales = torch.where(high - low <= 255, scales, 3)
    low, high = ((codes * scales).amin(1, keepdim=True), (codes * scales).amax(1, keepdim=True))
    # Every offset from the lowest to the highest that keeps the group in INT8.
    offsets = -128 - low + random(32, 1, low=0, high=10_000, seed=seed + 2) % (256 - (high - low))
    channels = channel_scales(32)
    q = decode(M, GROUPED, two_levels(M, codes, scales, offsets, channels))
    want = (codes * scales + offsets).double() * channels.double()[:, None]
    assert torch.equal(dequantize(q).double(), want.float().double())


def test_zeros_that_are_no_multiples_become_int8_of_the_same_value() -> None:
    codes, scales = random(32, 128, high=12), torch.full((32, 1), 7)
    offsets, channels = random(32, 1, low=-40, high=30, seed=3), channel_scales(32)
    q = decode(M, GROUPED, two_levels(M, codes, scales, offsets, channels))
    assert (q.format.element, q.format.granularity, q.format.scale) == ("int8", "channel", "f16")
    assert torch.equal(q.codes.long(), codes * 7 + offsets)
    assert torch.equal(q.scales, channels[:, None])
    with pytest.raises(HalfbyteError, match=f"{M}: is held as .*int8"):
        encode(M, GROUPED, q, "f16")


def test_a_one_sided_group_keeps_its_values() -> None:
    # All of a group in [100, 115]: its zero is -100 steps of 1, no code's zero point.
    codes = random(32, 128)
    q = decode(M, GROUPED, two_levels(M, codes, torch.ones(32, 1), torch.full((32, 1), 100), torch.ones(32)))
    assert torch.equal(dequantize(q).long(), codes + 100)


def test_an_offset_below_int8_is_stored_modulo_256() -> None:
    # Zero point 15 with scale 16: -240 is 16 as a byte. Codes of at least 7 keep level one in INT8.
    codes = random(32, 128, low=7)
    stored = two_levels(M, codes, torch.full((32, 1), 16), torch.full((32, 1), -240), torch.ones(32))
    assert set(stored[f"{M}.s2_zeros"].flatten().tolist()) == {16}
    q = decode(M, GROUPED, stored)
    assert torch.equal(dequantize(q).long(), codes * 16 - 240)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in encode(M, GROUPED, q, "f16").items())


@given(st.integers(0, 2**31), st.sampled_from([GROUPED, ROWS]))
@settings(max_examples=20, deadline=None)
def test_what_is_written_is_omniserves_and_is_read_back(seed: int, scheme: Any) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.005
    q = quantize(weight, scheme.weights)
    stored = encode(M, scheme, q, "bf16")
    assert q.zero_points is not None
    codes, zeros = q.codes.long() + 8, q.zero_points.long() + 8
    if q.outer_scales is None:
        want = per_channel(M, codes, q.scales.flatten(), zeros.flatten())
    else:
        scales = q.scales.long()
        want = two_levels(M, codes, scales, -zeros * scales, q.outer_scales.flatten())
    assert list(stored) == [entry.name for entry in stored_entries(M, scheme, (64, 256), "bf16")]
    for name, tensor in want.items():
        assert stored[name].dtype is tensor.dtype
        assert torch.equal(stored[name], tensor), name
    assert same(decode(M, scheme, stored), q)


def test_channels_are_read_as_the_kernel_computes_up_to_the_rounding_of_its_offset() -> None:
    codes, zeros, scales = random(32, 64), torch.arange(32) % 16, channel_scales(32)
    stored = per_channel(M, codes, scales, zeros)
    q = decode(M, ROWS, stored)
    assert q.format == ROWS.weights
    kernel = codes * scales.double()[:, None] - stored[f"{M}.s1_szeros"].double()[:, None]
    meant = (codes - zeros[:, None]) * scales.double()[:, None]
    assert torch.equal(dequantize(q).double(), meant)  # exact: 4 + 11 bits
    off = (kernel - meant).abs() / scales.double()[:, None]
    assert 0 < off.max() <= 15 * 2.0**-11
    # What of a zero point is no power of two and the scale's 11 bits is what fp16 rounds off.
    powers = (zeros & (zeros - 1)) == 0
    assert not off[powers].any()


def test_a_channel_of_zeros() -> None:
    stored = per_channel(M, random(32, 32), torch.zeros(32), torch.zeros(32))
    assert not dequantize(decode(M, ROWS, stored)).any()


def test_layouts_in_other_shapes_are_squeezed_or_strided() -> None:
    codes, scales = random(32, 128, high=7), torch.full((32, 1), 8)
    stored = two_levels(M, codes, scales, -4 * scales, torch.ones(32))
    stored[f"{M}.s1_scales"] = stored[f"{M}.s1_scales"][:, None]
    assert torch.equal(dequantize(decode(M, GROUPED, stored)).long(), (codes - 4) * 8)


# What is refused, with the tensor and the value


def grouped() -> dict[str, torch.Tensor]:
    scales = torch.full((32, 1), 8)
    return two_levels(M, random(32, 128), scales, -8 * scales, torch.ones(32))


def rows() -> dict[str, torch.Tensor]:
    return per_channel(M, random(32, 128), torch.full((32,), 0.01), torch.full((32,), 7))


@pytest.mark.parametrize("name", ["qweight", "s1_scales", "s2_scales", "s2_zeros"])
def test_a_missing_tensor(name: str) -> None:
    stored = grouped()
    del stored[f"{M}.{name}"]
    with pytest.raises(HalfbyteError, match=rf"missing {M}\.{name}"):
        decode(M, GROUPED, stored)


def test_tensors_of_the_other_kind_say_what_is_there() -> None:
    with pytest.raises(HalfbyteError, match=rf"missing {M}\.s2_scales.*found instead: {M}\.s1_szeros"):
        decode(M, GROUPED, rows())
    with pytest.raises(HalfbyteError, match=rf"missing {M}\.s1_szeros.*found instead: {M}\.s2_scales"):
        decode(M, ROWS, grouped())


@pytest.mark.parametrize(
    ("name", "dtype"), [("qweight", torch.uint8), ("s1_scales", torch.float32), ("s2_zeros", torch.int32)]
)
def test_another_dtype(name: str, dtype: torch.dtype) -> None:
    stored = grouped()
    stored[f"{M}.{name}"] = stored[f"{M}.{name}"].to(dtype)
    with pytest.raises(HalfbyteError, match=rf"{M}\.{name}: is .* calls for"):
        decode(M, GROUPED, stored)


@pytest.mark.parametrize(("out", "inputs"), [(48, 128), (32, 144), (33, 128)])
def test_no_whole_tiles(out: int, inputs: int) -> None:
    for scheme in (GROUPED, ROWS):
        with pytest.raises(HalfbyteError, match=f"{M}: .*32 x 32.*{out} x {inputs}"):
            stored_entries(M, scheme, (out, inputs), "f16")


def test_groups_of_another_size() -> None:
    with pytest.raises(HalfbyteError, match=r"groups of 128 in 192 inputs.*group_size -1"):
        stored_entries(M, GROUPED, (32, 192), "f16")
    smaller = replace(GROUPED, weights=GROUPED.weights.with_group_size(64))
    with pytest.raises(HalfbyteError, match="groups of 64 in 128 inputs"):
        stored_entries(M, smaller, (32, 128), "f16")


@pytest.mark.parametrize(
    ("scale", "offset", "value"),
    [(8, 8, 128), (8, -129 + 256, 247), (1, -128 - 1 + 256, 142), (16, -120 - 9, 367)],
)
def test_level_one_outside_of_int8(scale: int, offset: int, value: int) -> None:
    """Neither the offset nor the same less 256 keeps codes 0 to 15 of one group inside."""
    codes = random(32, 256, low=4, high=12)
    scales, offsets = torch.full((32, 2), 8), torch.full((32, 2), -64)
    codes[3, 130], codes[3, 131], scales[3, 1], offsets[3, 1] = 0, 15, scale, offset
    with pytest.raises(
        HalfbyteError, match=rf"{M}\.s2_zeros: row 3, group 1: {value} is a value of level one"
    ):
        decode(M, GROUPED, two_levels(M, codes, scales, offsets, torch.ones(32)))


def test_a_negative_group_scale() -> None:
    stored = grouped()
    stored[f"{M}.s2_scales"] = packed_groups(torch.where(torch.arange(32)[:, None] == 5, -1, 8))
    with pytest.raises(HalfbyteError, match=rf"{M}\.s2_scales: row 5, group 0: -1 is negative"):
        decode(M, GROUPED, stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("scheme", [GROUPED, ROWS])
def test_a_channel_scale_that_is_none(scheme: Any, value: float) -> None:
    stored = grouped() if scheme is GROUPED else rows()
    stored[f"{M}.s1_scales"][7] = value
    with pytest.raises(HalfbyteError, match=rf"{M}\.s1_scales: row 7: {value:g} is no scale"):
        decode(M, scheme, stored)


@pytest.mark.parametrize("product", [0.0731, -0.01, 0.16, float("nan"), float("inf")])
def test_channel_zeros_that_are_no_zero_point(product: float) -> None:
    stored = rows()
    stored[f"{M}.s1_szeros"][11] = product
    with pytest.raises(HalfbyteError, match=rf"{M}\.s1_szeros: row 11: .* is no whole zero point"):
        decode(M, ROWS, stored)


def test_scales_that_fp16_does_not_hold() -> None:
    q = quantize(torch.randn(32, 128), GROUPED.weights)
    assert q.outer_scales is not None
    q.outer_scales[4] = 70_000.0
    with pytest.raises(HalfbyteError, match=rf"{M}\.s1_scales: row 4: 70000 is no fp16 number"):
        encode(M, GROUPED, q, "f16")
    q.outer_scales[4] = 0.1  # rounded, codes would no longer be the nearest
    with pytest.raises(HalfbyteError, match=r"row 4: 0\.1 is no fp16 number"):
        encode(M, GROUPED, q, "f16")


def test_products_that_fp16_does_not_hold() -> None:
    q = quantize(torch.randn(32, 128) * 3e4, ROWS.weights)
    with pytest.raises(HalfbyteError, match=rf"{M}\.s1_szeros: row \d+: .* fp16 does not hold"):
        encode(M, ROWS, q, "f16")


def test_a_scale_that_saturated() -> None:
    weight = torch.rand(32, 128)
    weight[6, 3] = 1e7  # its zero point is 0, so that no product tells
    with pytest.raises(HalfbyteError, match=rf"{M}\.s1_scales: row 6: 65504 is the largest fp16"):
        encode(M, ROWS, quantize(weight, ROWS.weights), "f16")


def test_a_weight_of_another_format() -> None:
    q = quantize(torch.randn(32, 128), ROWS.weights)
    with pytest.raises(HalfbyteError, match=f"{M}: is held as"):
        encode(M, GROUPED, q, "f16")


def test_codes_of_the_wrong_rank() -> None:
    stored = {**grouped(), f"{M}.qweight": packed(random(32, 128)).flatten()}
    with pytest.raises(HalfbyteError, match=rf"{M}\.qweight: is \[2048\]; accepted: two dimensions"):
        decode(M, GROUPED, stored)
