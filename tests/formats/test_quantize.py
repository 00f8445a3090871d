from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats import tiles
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from tests.formats.hostile import FORMATS, bits, weights

ELEMENTS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
ALL = pytest.mark.parametrize("name", FORMATS)


def wide_enough(name: str, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)) * 0.02


@ALL
@settings(max_examples=25, deadline=None)
@given(weight=weights())
def test_hostile_weights_give_finite_numbers(name: str, weight: torch.Tensor) -> None:
    fmt = FORMATS[name]
    q = quantize(weight, fmt)
    scales = q.scales.int() + 1 if fmt.scale == "e8m0" else q.scales.float()
    assert (scales > 0).all()
    assert scales.isfinite().all()
    assert q.outer_scales is None or ((q.outer_scales > 0) & q.outer_scales.isfinite()).all()
    values = dequantize(q)
    assert values.shape == weight.shape
    assert values.isfinite().all()
    assert (values[weight == 0] == 0).all()
    if fmt.is_integer:
        assert q.codes.min() >= fmt.qmin
        assert q.codes.max() <= fmt.qmax


@pytest.mark.parametrize("bits_", range(2, 9))
@pytest.mark.parametrize("scale", ["f32", "bf16", "f16"])
@settings(max_examples=10, deadline=None)
@given(weight=weights())
def test_symmetric_integers_follow_their_definition(bits_: int, scale: str, weight: torch.Tensor) -> None:
    fmt = TensorFormat(f"int{bits_}", "group", 32, scale=scale)
    q = quantize(weight, fmt)
    numpy_dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[scale]
    groups = weight.numpy().reshape(3, 4, 32)
    ideal = np.abs(groups).max(-1) / np.float32((2**bits_ - 1) / 2)
    smallest = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-24}[scale]
    largest = 65504.0 if scale == "f16" else np.finfo(np.float32).max
    stored = np.clip(ideal, np.float32(smallest), np.float32(largest)).astype(numpy_dtype)
    np.testing.assert_array_equal(q.scales.float().numpy(), stored.astype(np.float32))
    codes = np.clip(np.rint(groups / stored.astype(np.float32)[..., None]), fmt.qmin, fmt.qmax)
    np.testing.assert_array_equal(q.codes.numpy(), codes.reshape(3, 128))


@pytest.mark.parametrize("bits_", range(2, 9))
@settings(max_examples=15, deadline=None)
@given(weight=weights())
def test_asymmetric_integers_follow_their_definition(bits_: int, weight: torch.Tensor) -> None:
    fmt = TensorFormat(f"int{bits_}", "group", 32, symmetric=False, scale="f32")
    q = quantize(weight, fmt)
    assert q.zero_points is not None
    groups = weight.numpy().reshape(3, 4, 32)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scale = np.maximum(
        ((high.astype(np.float64) - low) / (2**bits_ - 1)).astype(np.float32), np.float32(2.0**-126)
    )
    zero = np.clip(np.rint(-low / scale) + fmt.qmin, fmt.qmin, fmt.qmax)
    np.testing.assert_array_equal(q.scales.numpy(), scale)
    np.testing.assert_array_equal(q.zero_points.numpy(), zero)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], fmt.qmin, fmt.qmax)
    np.testing.assert_array_equal(q.codes.numpy(), codes.reshape(3, 128))


@pytest.mark.parametrize(("element", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_float8_follows_its_definition(element: str, largest: float) -> None:
    weight = wide_enough(element).bfloat16()
    q = quantize(weight, TensorFormat(element, "channel", scale="bf16"))
    scale = (weight.float().abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    expected = (weight.float() / scale).clamp(-largest, largest).numpy().astype(ELEMENTS[element])
    np.testing.assert_array_equal(q.codes.view(torch.uint8).numpy(), expected.view(np.uint8))


def test_ties_go_to_even_codes() -> None:
    fmt = TensorFormat("int4", "channel", scale="f32")
    weight = torch.tensor([[7.5, 0.5, 1.5, 2.5, -0.5, -1.5, -7.5, 6.5]])  # scale 1
    assert quantize(weight, fmt).codes.tolist() == [[7, 0, 2, 2, 0, -2, -8, 6]]


@ALL
def test_stacks_equal_their_members(name: str) -> None:
    stack = torch.stack([wide_enough(name) * 10.0**i for i in range(4)]).reshape(2, 2, 3, 256)
    q = quantize(stack, FORMATS[name])
    values = dequantize(q)
    for i in range(2):
        for j in range(2):
            alone = quantize(stack[i, j], FORMATS[name])
            assert torch.equal(bits(q.codes[i, j]), bits(alone.codes))
            assert torch.equal(bits(q.scales[i, j]), bits(alone.scales))
            assert torch.equal(values[i, j], dequantize(alone))


@ALL
@pytest.mark.parametrize("chunk", [1, 100, 1 << 19])
def test_chunks_do_not_show(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = wide_enough(name, rows=7)
    whole = quantize(weight, FORMATS[name])
    monkeypatch.setattr(tiles, "CPU_CHUNK", chunk)
    parts = quantize(weight, FORMATS[name])
    assert torch.equal(bits(whole.codes), bits(parts.codes))
    assert torch.equal(bits(whole.scales), bits(parts.scales))
    assert torch.equal(dequantize(whole), dequantize(parts))


@ALL
def test_the_weight_is_left_alone(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = wide_enough(name).to(dtype)
        before = weight.clone()
        q = quantize(weight, FORMATS[name])
        codes = q.codes.clone()
        dequantize(q)
        assert torch.equal(weight, before)
        assert torch.equal(bits(q.codes), bits(codes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_float_dtype_is_read_in_fp32(dtype: torch.dtype) -> None:
    weight = wide_enough("x").to(dtype)
    q, expected = (quantize(w, FORMATS["w4a8"]) for w in (weight, weight.float()))
    assert torch.equal(q.codes, expected.codes)
    assert torch.equal(q.scales, expected.scales)


def test_strided_weights_are_read_in_place() -> None:
    weight = wide_enough("x", rows=256)
    q, expected = quantize(weight.T, FORMATS["w4a8"]), quantize(weight.T.contiguous(), FORMATS["w4a8"])
    assert torch.equal(q.codes, expected.codes)


@ALL
def test_zero_tiles_are_zero_and_finite(name: str) -> None:
    weight = wide_enough(name, rows=6)
    weight[1] = 0
    weight[3, :128] = 0
    values = dequantize(quantize(weight, FORMATS[name]))
    assert (values[1] == 0).all()
    assert (values[3, :128] == 0).all()
    assert (dequantize(quantize(torch.zeros(3, 256), FORMATS[name])) == 0).all()


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_named(name: str, bad: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = wide_enough(name).to(dtype)
        weight[2, 130] = bad
        with pytest.raises(NonFiniteError, match=r"\[2, 130\]"):
            quantize(weight, FORMATS[name])


def test_nvfp4_zero_block_does_not_become_nan_bytes() -> None:
    weight = torch.full((1, 32), 0.01)
    weight[0, :16] = 0
    q = quantize(weight, FORMATS["nvfp4"])
    assert q.scales.float().tolist() == [[2.0**-9, 448.0]]
    assert torch.equal(dequantize(q)[0, :16], torch.zeros(16))


def test_nvfp4_follows_its_definition() -> None:
    weight = wide_enough("nvfp4").bfloat16().float()
    q = quantize(weight, FORMATS["nvfp4"])
    assert q.outer_scales is not None
    ideal = weight.abs().max() / (448 * 6)
    assert q.outer_scales.shape == (1, 1)
    assert torch.equal(q.outer_scales, (1 / (1 / ideal)).reshape(1, 1))
    assert torch.equal(1 / (1 / q.outer_scales), q.outer_scales)  # files that store the divisor say the same
    blocks = weight.reshape(3, 16, 16)
    scales = (blocks.abs().amax(-1) / 6 / q.outer_scales).numpy().astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(q.scales.view(torch.uint8).numpy(), scales.view(np.uint8))
    divisor = scales.astype(np.float32)[..., None] * q.outer_scales.numpy()[..., None]
    codes = np.clip(blocks.numpy() / divisor, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(q.codes.numpy(), codes.reshape(3, 256))


@pytest.mark.parametrize("exponent", [-149, -127, -126, -120, -10, 0, 3, 100, 127])
@pytest.mark.parametrize(("element", "largest_exponent"), [("e4m3", 8), ("e2m1", 2)])
def test_mx_exponents_follow_the_specification(exponent: int, element: str, largest_exponent: int) -> None:
    fmt = TensorFormat(element, "group", 32, scale="e8m0")
    for mantissa in (1.0, 1.5, 1.75, 1.9375):
        weight = torch.zeros(1, 32)
        weight[0, 5] = math.ldexp(mantissa, exponent) if exponent > -126 else math.ldexp(1.0, exponent)
        code = quantize(weight, fmt).scales.item()
        assert code == max(0, exponent - largest_exponent + 127)


def test_mx_saturates_the_end_of_a_binade() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0] = 7.9  # floor(log2) = 2, so the scale is 1 and E2M1 ends at 6
    assert dequantize(quantize(weight, FORMATS["mxfp4"]))[0, 0] == 6.0


def test_ragged_blocks_scale_what_is_there() -> None:
    weight = torch.arange(1.0, 7 * 11 + 1).reshape(7, 11)
    q = quantize(weight, TensorFormat("e4m3", "block", block_shape=(3, 5), scale="f32"))
    assert q.scales.shape == (3, 3)
    assert q.codes.shape == (7, 11)
    assert q.scales[2, 2].item() == np.float32(77) / np.float32(448)
    assert q.scales[0, 1].item() == np.float32(weight[:3, 5:10].max()) / np.float32(448)


def nearest_distance(weight: torch.Tensor, fmt: TensorFormat, q: QuantizedTensor) -> torch.Tensor:
    """Distance of each weight from the nearest of all numbers that its own scale and zero point can say, float64."""
    if fmt.is_integer:
        table = torch.arange(fmt.qmin, fmt.qmax + 1, dtype=torch.float64)
    else:
        codes = np.arange(1 << fmt.bits, dtype=np.uint8).view(ELEMENTS[fmt.element]).astype(np.float64)
        table = torch.from_numpy(codes[np.isfinite(codes)])
    columns = fmt.group_size or weight.shape[-1]

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().repeat_interleave(columns, -1).unsqueeze(-1)

    scales = 2.0 ** (q.scales.double() - 127) if fmt.scale == "e8m0" else q.scales.double()
    zero_points = torch.zeros_like(scales) if q.zero_points is None else q.zero_points
    numbers = (table - spread(zero_points)) * spread(scales)
    if q.outer_scales is not None:
        numbers = numbers * q.outer_scales.double().unsqueeze(-1)
    return (numbers - weight.double().unsqueeze(-1)).abs().amin(-1)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.5])
@pytest.mark.parametrize(
    "name", [n for n, f in FORMATS.items() if f.granularity in ("channel", "group") and f.scale != "int8"]
)
@settings(max_examples=10, deadline=None)
@given(weight=weights())
def test_codes_are_the_nearest_on_the_scales_that_are_returned(
    name: str, ratio: float, weight: torch.Tensor
) -> None:
    fmt = FORMATS[name]
    q = quantize(weight, fmt, ratio=ratio)
    distance = (dequantize(q).double() - weight.double()).abs()
    nearest = nearest_distance(weight, fmt, q)
    slack = 1e-6 * weight.abs().double() + 1e-44  # ties, decided by a division in fp32
    assert (distance <= nearest + slack).all()


def test_ratio_may_differ_per_scale() -> None:
    weight, fmt = wide_enough("x"), FORMATS["w4a8"]
    ratio = torch.tensor([[1.0, 0.5], [0.5, 1.0], [0.75, 0.75]])
    q = quantize(weight, fmt, ratio=ratio)
    expected = (weight.reshape(3, 2, 128).abs().amax(-1) * ratio / 7.5).bfloat16()
    assert torch.equal(q.scales, expected)


def test_dequantize_has_the_original_shape_and_dtype() -> None:
    weight = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    for fmt in (
        TensorFormat("int4", "group", 8, scale="f32"),
        TensorFormat("e4m3", "block", block_shape=(128, 128), scale="f32"),
    ):
        values = dequantize(quantize(weight, fmt), torch.bfloat16)
        assert values.shape == (20, 1000)
        assert values.dtype == torch.bfloat16


@pytest.mark.gpu
@ALL
def test_gpus_give_the_same_bits(name: str) -> None:
    weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0))
    want, found = (quantize(tensor, FORMATS[name]) for tensor in (weight, weight.cuda()))
    for part in ("codes", "scales", "zero_points", "outer_scales"):
        one, other = getattr(found, part), getattr(want, part)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(bits(one.cpu()), bits(other)), part


@pytest.mark.parametrize(
    ("weight", "fmt", "says"),
    [
        (torch.ones(8), FORMATS["w4a8"], "out, in"),
        (torch.ones(8, 0), FORMATS["fp8"], "above 0"),
        (torch.ones(0, 128), FORMATS["nvfp4"], "above 0"),
        (torch.ones(8, 100), FORMATS["w4a8"], "does not divide"),
        (torch.ones(8, 128, dtype=torch.int32), FORMATS["w4a8"], "int32"),
        (torch.ones(8, 128), TensorFormat("int4", "group", 128), "'model'"),
        (
            torch.ones(8, 128),
            TensorFormat("int3", "group", 128, symmetric=False, scale="int8", outer="channel"),
            "int4",
        ),
        (torch.ones(8, 128), TensorFormat("int4", "group", 128, scale="bf16", outer="tensor"), "outer scale"),
        (torch.ones(8, 128), TensorFormat("e4m3", "group", 32, scale="e8m0", outer="tensor"), "outer scale"),
        (torch.ones(8, 128), TensorFormat("int4", "group", 32, symmetric=False, scale="e8m0"), "symmetric"),
    ],
)
def test_bad_input_is_one_line(weight: torch.Tensor, fmt: TensorFormat, says: str) -> None:
    with pytest.raises(HalfbyteError, match=says) as caught:
        quantize(weight, fmt)
    assert "\n" not in str(caught.value)
