from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from halfbyte.algorithms.clip import (
    POWER_OF_TWO_RATIOS,
    RATIOS,
    clip_mse,
    clip_mse_grid,
    clip_output,
    clip_output_grid,
)
from halfbyte.algorithms.rtn import rtn
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats import tiles
from halfbyte.formats.grid import Grid
from halfbyte.formats.quantize import dequantize, encode, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from tests.algorithms.inputs import outlier_inputs, statistics_of
from tests.formats.hostile import FORMATS, bits, weights

ALL = pytest.mark.parametrize("name", FORMATS)
PER_SCALE = [n for n, f in FORMATS.items() if f.granularity in ("channel", "group")]


def heavy_tailed(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(shape, generator=generator) * 0.02
    return torch.where(torch.rand(shape, generator=generator) < 0.003, normal * 12, normal)


def squared_errors(weight: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """Per scale of a format with groups or channels, float64."""
    error = (dequantize(q).double() - weight.double()).square()
    return error.unflatten(-1, (q.scales.shape[-1], -1)).sum(-1)


@pytest.mark.parametrize("name", PER_SCALE)
def test_each_scale_has_the_least_error_of_all_ratios(name: str) -> None:
    weight, fmt = heavy_tailed(4, 256), FORMATS[name]
    ratios = POWER_OF_TWO_RATIOS if fmt.scale == "e8m0" else RATIOS
    best = torch.stack([squared_errors(weight, quantize(weight, fmt, ratio=r)) for r in ratios]).amin(0)
    clipped = squared_errors(weight, clip_mse(weight, fmt))
    torch.testing.assert_close(clipped, best, rtol=1e-5, atol=0)


@ALL
def test_clipping_gains_where_outliers_stretch_the_range(name: str) -> None:
    weight, fmt = heavy_tailed(16, 256), FORMATS[name]
    plain, clipped = (float((dequantize(f(weight, fmt)) - weight).square().sum()) for f in (rtn, clip_mse))
    assert clipped <= plain * (1 + 1e-6)
    if fmt.bits <= 4 and fmt.scale != "int8":
        assert clipped < plain


@pytest.mark.parametrize("name", PER_SCALE)
@settings(max_examples=10, deadline=None)
@given(weight=weights())
def test_hostile_weights_end_no_worse_than_rtn(name: str, weight: torch.Tensor) -> None:
    fmt = FORMATS[name]
    clipped, plain = clip_mse(weight, fmt), rtn(weight, fmt)
    assert dequantize(clipped).isfinite().all()
    assert (squared_errors(weight, clipped) <= squared_errors(weight, plain) * (1 + 1e-4) + 1e-37).all()


@ALL
def test_stacks_equal_their_members(name: str) -> None:
    stack, fmt = torch.stack([heavy_tailed(6, 256), heavy_tailed(6, 256) * 3]), FORMATS[name]
    q = clip_mse(stack, fmt)
    for i in range(2):
        alone = clip_mse(stack[i], fmt)
        assert torch.equal(bits(q.codes[i]), bits(alone.codes))
        assert torch.equal(bits(q.scales[i]), bits(alone.scales))


@ALL
def test_the_weight_is_left_alone_and_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = heavy_tailed(6, 256)
    before = weight.clone()
    whole = clip_mse(weight, FORMATS[name])
    assert torch.equal(weight, before)
    if FORMATS[name].granularity in ("channel", "group"):
        monkeypatch.setattr(tiles, "CPU_CHUNK", 256)
        assert torch.equal(bits(clip_mse(weight, FORMATS[name]).codes), bits(whole.codes))


def test_codes_and_scales_come_from_the_same_weight() -> None:
    """The smallest input of a known fault: scales of the weight as it was, codes of the clipped one."""
    weight, fmt = heavy_tailed(4, 256), FORMATS["w4a8"]
    q = clip_mse(weight, fmt)
    step = q.scales.float().repeat_interleave(128, -1)
    codes = torch.round(weight / step).clamp(-8, 7)
    assert torch.equal(q.codes.float(), codes)


def test_bad_weights_are_refused() -> None:
    with pytest.raises(NonFiniteError):
        clip_mse(torch.full((2, 128), torch.nan), FORMATS["w4a8"])


def test_a_lone_outlier_is_worth_saturating() -> None:
    weight = torch.full((1, 128), 0.4)
    weight[0, 0] = 8.0
    fmt = TensorFormat("int4", "channel", scale="f32")
    assert clip_mse(weight, fmt).scales.item() < rtn(weight, fmt).scales.item()


def moment_of(features: int) -> torch.Tensor:
    return statistics_of(outlier_inputs(64, features)).moment


def output_errors(weight: torch.Tensor, q: QuantizedTensor, inputs: torch.Tensor) -> torch.Tensor:
    """Mean squared output error that the weights of each scale cause alone, float64: from the tokens themselves."""
    groups = q.scales.shape[-1]
    error = (dequantize(q).double() - weight.double()).unflatten(-1, (groups, -1))
    caused = torch.einsum("...gc,tgc->...gt", error, inputs.double().unflatten(-1, (groups, -1)))
    return caused.square().mean(-1)


@pytest.mark.parametrize("name", PER_SCALE)
def test_each_scale_has_the_least_output_error_of_all_ratios(name: str) -> None:
    weight, fmt, inputs = heavy_tailed(4, 256), FORMATS[name], outlier_inputs(64, 256)
    ratios = POWER_OF_TWO_RATIOS if fmt.scale == "e8m0" else RATIOS
    tried = [output_errors(weight, quantize(weight, fmt, ratio=ratio), inputs) for ratio in ratios]
    clipped = output_errors(weight, clip_output(weight, fmt, moment_of(256)), inputs)
    torch.testing.assert_close(clipped, torch.stack(tried).amin(0), rtol=1e-3, atol=1e-12)


@ALL
def test_output_clipping_is_mse_clipping_where_inputs_are_white(name: str) -> None:
    weight, fmt = heavy_tailed(6, 250 if FORMATS[name].block_shape else 256), FORMATS[name]
    white, plain = clip_output(weight, fmt, torch.eye(weight.shape[1])), clip_mse(weight, fmt)
    assert torch.equal(bits(white.codes), bits(plain.codes))
    assert torch.equal(bits(white.scales), bits(plain.scales))


@pytest.mark.parametrize("name", PER_SCALE)
@settings(max_examples=10, deadline=None)
@given(weight=weights())
def test_hostile_weights_end_with_no_larger_output_error_than_rtn(name: str, weight: torch.Tensor) -> None:
    fmt, inputs = FORMATS[name], outlier_inputs(64, 128)
    clipped, plain = clip_output(weight, fmt, moment_of(128)), rtn(weight, fmt)
    assert dequantize(clipped).isfinite().all()
    after, before = (output_errors(weight, q, inputs) for q in (clipped, plain))
    assert (after <= before * (1 + 1e-3) + 1e-34).all()


@ALL
@pytest.mark.parametrize("by_output", [False, True])
def test_the_grid_is_the_one_that_was_rounded_onto(name: str, by_output: bool) -> None:
    weight, fmt, moment = heavy_tailed(4, 256), FORMATS[name], moment_of(256)
    grid = clip_output_grid(weight, fmt, moment) if by_output else clip_mse_grid(weight, fmt)
    q = clip_output(weight, fmt, moment) if by_output else clip_mse(weight, fmt)
    assert isinstance(grid, Grid)
    assert torch.equal(bits(encode(weight, fmt, grid).codes), bits(q.codes))


@ALL
@pytest.mark.parametrize("own", [False, True])
def test_a_stack_shares_the_moment_or_has_one_for_each_member(name: str, own: bool) -> None:
    stack, fmt = torch.stack([heavy_tailed(6, 256), heavy_tailed(6, 256) * 3]), FORMATS[name]
    moments = torch.stack([moment_of(256), moment_of(256).flip(0, 1) if own else moment_of(256)])
    q = clip_output(stack, fmt, moments if own else moments[0])
    for index, moment in enumerate(moments):
        alone = clip_output(stack[index], fmt, moment)
        assert torch.equal(bits(q.codes[index]), bits(alone.codes))
        assert torch.equal(bits(q.scales[index]), bits(alone.scales))


def test_moments_of_another_shape_are_refused() -> None:
    with pytest.raises(HalfbyteError, match="does not fit"):
        clip_output(heavy_tailed(4, 256), FORMATS["w4a8"], torch.eye(128))
