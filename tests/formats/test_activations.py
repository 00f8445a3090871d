from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from halfbyte.errors import HalfbyteError
from halfbyte.formats.activations import dequantize_activations, quantize_activations
from halfbyte.formats.spec import ActivationFormat
from tests.formats.hostile import bits, weights

FORMATS = {
    "fp8-token": ActivationFormat("e4m3", "token"),
    "int8-token": ActivationFormat("int8", "token"),
    "fp8-tensor": ActivationFormat("e4m3", "tensor"),
    "int8-tensor": ActivationFormat("int8", "tensor"),
    "fp8-group": ActivationFormat("e4m3", "group", 32),
    "mxfp8": ActivationFormat("e4m3", "group", 32, scale="e8m0"),
    "e5m2-token": ActivationFormat("e5m2", "token"),
}
ALL = pytest.mark.parametrize("name", FORMATS)
SCALE_SHAPES = {"token": (2, 3, 1), "tensor": (1,), "group": (2, 3, 4)}
LARGEST = {"e4m3": 448.0, "int8": 127.0, "e5m2": 57344.0}


def inputs() -> torch.Tensor:
    return torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0))


@ALL
def test_shapes_and_dtypes(name: str) -> None:
    fmt = FORMATS[name]
    codes, scales = quantize_activations(inputs().bfloat16(), fmt)
    assert codes.shape == (2, 3, 128)
    assert scales.shape == SCALE_SHAPES[fmt.granularity]
    assert scales.dtype == torch.float32
    expected = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "e5m2": torch.float8_e5m2}
    assert codes.dtype == expected[fmt.element]


def test_tokens_follow_their_definition() -> None:
    x = inputs()
    codes, scales = quantize_activations(x, FORMATS["fp8-token"])
    assert torch.equal(scales, x.abs().amax(-1, keepdim=True) / 448)
    expected = (x / scales).clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected.view(np.uint8))
    codes, scales = quantize_activations(x, FORMATS["int8-token"])
    assert torch.equal(scales, x.abs().amax(-1, keepdim=True) / 127)
    assert torch.equal(codes.float(), torch.round(x / scales).clamp(-127, 127))


def test_groups_follow_their_definition() -> None:
    x = inputs()
    absmax = x.reshape(2, 3, 4, 32).abs().amax(-1)
    assert torch.equal(quantize_activations(x, FORMATS["fp8-group"])[1], absmax / 448)
    powers = quantize_activations(x, FORMATS["mxfp8"])[1]
    assert torch.equal(powers, 2.0 ** (absmax.log2().floor() - 8))


@ALL
@settings(max_examples=30, deadline=None)
@given(x=weights())
def test_hostile_inputs_give_finite_numbers_close_by(name: str, x: torch.Tensor) -> None:
    fmt = FORMATS[name]
    codes, scales = quantize_activations(x, fmt)
    values = dequantize_activations(codes, scales, fmt.group_size)
    assert (scales > 0).all()
    assert scales.isfinite().all()
    assert values.isfinite().all()
    assert (values[x == 0] == 0).all()
    if fmt.element == "int8":
        assert codes.min() >= -127
    spread = scales.repeat_interleave(32, -1) if fmt.group_size else scales.broadcast_to(3, 1)
    step = {"int8": 0.501, "e4m3": 32.1, "e5m2": 8200.0}[
        fmt.element
    ]  # half of the widest step, above 448 too
    assert ((values - x).abs() <= spread * (step if fmt.scale == "f32" else 64.1)).all()


@ALL
def test_tiny_and_zero_tokens_leave_scales_finite(name: str) -> None:
    x = torch.zeros(3, 128)
    x[1, 7] = 1e-37
    codes, scales = quantize_activations(x, FORMATS[name])
    assert scales.isfinite().all()
    assert (scales > 0).all()
    values = dequantize_activations(codes, scales, FORMATS[name].group_size)
    assert (values[0] == 0).all()
    assert values[1, 7] == pytest.approx(1e-37, rel=0.13)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_change_no_other_row(name: str, bad: float) -> None:
    fmt = FORMATS[name]
    good, padding = inputs()[0], torch.full((3, 128), bad)
    codes, scales = quantize_activations(torch.cat([good, padding]), fmt)
    expected_codes, expected_scales = quantize_activations(good, fmt)
    assert torch.equal(bits(codes[:3]), bits(expected_codes))
    if fmt.granularity == "tensor":
        assert torch.equal(scales, expected_scales)
        return
    assert torch.equal(scales[:3], expected_scales)
    assert scales[3:].isnan().all()
    assert dequantize_activations(codes, scales, fmt.group_size)[3:].isnan().all()


def test_static_scales_are_used_as_they_are() -> None:
    fmt = ActivationFormat("e4m3", "tensor", dynamic=False)
    x = torch.tensor([[0.02, 10.0, -10.0]])
    codes, scales = quantize_activations(x, fmt, torch.tensor([0.02]))
    assert scales.tolist() == pytest.approx([0.02])
    assert codes.float().tolist() == [[1.0, 448.0, -448.0]]
    with pytest.raises(HalfbyteError, match="input scale"):
        quantize_activations(x, fmt)


@ALL
def test_no_tokens(name: str) -> None:
    codes, scales = quantize_activations(torch.empty(0, 128), FORMATS[name])
    assert codes.shape == (0, 128)
    assert dequantize_activations(codes, scales, FORMATS[name].group_size).shape == (0, 128)


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpus_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    want, found = (quantize_activations(tensor, FORMATS[name]) for tensor in (x, x.cuda()))
    for one, other in zip(found, want, strict=True):
        assert torch.equal(bits(one.cpu()), bits(other))


def test_bad_formats_are_one_line() -> None:
    with pytest.raises(HalfbyteError, match="e2m1"):
        quantize_activations(inputs(), ActivationFormat("e2m1", "token"))
    with pytest.raises(HalfbyteError, match="does not divide"):
        quantize_activations(torch.ones(2, 100), FORMATS["fp8-group"])
