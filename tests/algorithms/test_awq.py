from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.algorithms.awq import STEPS, AwqResult, awq_scales
from halfbyte.algorithms.fold import folded_statistics
from halfbyte.algorithms.shared_columns import SharedColumns
from halfbyte.errors import NonFiniteError
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.spec import TensorFormat
from tests.algorithms.inputs import outlier_inputs, statistics_of
from tests.formats.hostile import FORMATS, VALUES

GROUPS = TensorFormat("int4", "group", 32, scale="bf16")
CHANNELS = TensorFormat("int8", "channel", scale="f32")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def error_of(
    weights: list[torch.Tensor], formats: list[TensorFormat], inputs: torch.Tensor, scales: torch.Tensor
) -> float:
    """Mean squared change of the outputs over the tokens, summed over features: from the tokens themselves."""
    total = 0.0
    for weight, fmt in zip(weights, formats, strict=True):
        decoded = dequantize(quantize(weight * scales, fmt)).double()
        changed = (inputs / scales).double() @ decoded.t() - inputs.double() @ weight.double().t()
        total += float(changed.square().sum(1).mean())
    return total


def slow_candidates(weights: list[torch.Tensor], inputs: torch.Tensor) -> list[torch.Tensor]:
    """AWQ's grid as its paper and code define it, in groups of 32, for channels that are all alive."""
    x = inputs.abs().mean(0)
    rows = [row for weight in weights for row in weight.abs()]
    w = torch.stack([(row.view(-1, 32) / row.view(-1, 32).amax(1, keepdim=True)).flatten() for row in rows])
    found = []
    for a in torch.arange(STEPS + 1) / STEPS:
        for b in (1 - a, torch.zeros(())):
            s = x**a / w.mean(0) ** b
            found.append(s / (s.max() * s.min()).sqrt())
    return found


def test_the_search_finds_the_best_of_all_candidates() -> None:
    inputs = outlier_inputs(64, 128)
    weights, formats = [normal(16, 128), normal(8, 128, seed=1) * 3], [GROUPS, GROUPS]
    result = awq_scales(weights, formats, statistics_of(inputs))
    errors = [error_of(weights, formats, inputs, scales) for scales in slow_candidates(weights, inputs)]
    assert result.error_after == pytest.approx(min(errors), rel=1e-3)
    best = slow_candidates(weights, inputs)[errors.index(min(errors))]
    torch.testing.assert_close(result.scales, best, rtol=1e-4, atol=0)


def test_errors_are_those_of_the_tokens() -> None:
    inputs, weights, formats = outlier_inputs(64, 128), [normal(16, 128), normal(24, 128)], [GROUPS, CHANNELS]
    result = awq_scales(weights, formats, statistics_of(inputs))
    assert result.error_before == pytest.approx(error_of(weights, formats, inputs, torch.ones(128)), rel=1e-3)
    assert result.error_after == pytest.approx(error_of(weights, formats, inputs, result.scales), rel=1e-3)
    assert result.error_after < 0.7 * result.error_before


@pytest.mark.parametrize("a", [0.0, 0.5, 1.0])
def test_both_ends_of_the_exponents_are_tried(a: float) -> None:
    """A weight of ones that nothing rounds shows the scales that it was multiplied by."""
    tried: list[torch.Tensor] = []

    def remember(weight: torch.Tensor) -> torch.Tensor:
        tried.append(weight[0].clone())
        return weight

    inputs = outlier_inputs(32, 64)
    awq_scales([torch.ones(2, 64)], [GROUPS], statistics_of(inputs), round_trips=[remember])
    size = inputs.abs().mean(0) ** a
    assert any(torch.allclose(scales, size / (size.max() * size.min()).sqrt()) for scales in tried)


def test_the_identity_keeps_a_tie() -> None:
    """A weight that its grid holds exactly under any scale has no error to make smaller."""
    weight = torch.eye(32)[:4].repeat(1, 2)
    result = awq_scales([torch.zeros(4, 64)], [GROUPS], statistics_of(outlier_inputs(8, 64)))
    assert result == AwqResult(result.scales, None, False, 0.0, 0.0)
    assert result.scales.eq(1).all()
    fp32 = TensorFormat("int8", "channel", scale="f32")
    silent = awq_scales([weight], [fp32], statistics_of(torch.zeros(8, 64)))
    assert silent.exponent is None


def test_scales_are_shared_by_columns_that_read_one_channel() -> None:
    inputs, weight = outlier_inputs(64, 96), normal(16, 96)
    shared = SharedColumns(width=16, repeats=3)
    result = awq_scales([weight], [GROUPS], statistics_of(inputs), shared=shared)
    assert result.scales.shape == (32,)
    columns = torch.cat([result.scales[:16].repeat(3), result.scales[16:].repeat(3)])
    assert result.error_after == pytest.approx(error_of([weight], [GROUPS], inputs, columns), rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from(VALUES[:9]), min_size=64, max_size=64),
    weight_sizes=st.lists(st.sampled_from(VALUES[:9]), min_size=64, max_size=64),
    name=st.sampled_from(["w4a8-f16", "w8a16", "w4a16-asym-f32", "fp8", "mxfp4"]),
)
def test_hostile_inputs_end_no_worse_than_without_scales(
    sizes: list[float], weight_sizes: list[float], name: str
) -> None:
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(sizes)
    weight = normal(8, 64) * torch.tensor(weight_sizes)
    result = awq_scales([weight], [FORMATS[name]], statistics_of(inputs))
    assert (result.scales.isfinite() & (result.scales >= 1e-4) & (result.scales <= 1e4)).all()
    assert result.error_after <= result.error_before
    dead = (inputs == 0).all(0) | (weight == 0).all(0)
    assert result.scales[dead].eq(1).all()


def test_statistics_that_are_no_numbers_leave_their_channel_alone() -> None:
    statistics = statistics_of(outlier_inputs(64, 64))
    absmean = statistics.absmean.clone()
    absmean[[3, 5]] = torch.tensor([torch.inf, torch.nan])
    result = awq_scales([normal(8, 64)], [GROUPS], replace(statistics, absmean=absmean))
    assert result.scales[[3, 5]].eq(1).all()
    assert result.exponent is not None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_moment_that_is_no_number_is_an_error_and_no_identity(value: float) -> None:
    statistics = statistics_of(outlier_inputs(8, 64))
    statistics.moment[4, 4] = value
    with pytest.raises(NonFiniteError, match="output error"):
        awq_scales([normal(8, 64)], [GROUPS], statistics)


def test_the_search_sees_the_rounding_that_it_is_given() -> None:
    def coarse(weight: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(weight, GROUPS)) * 0.9

    inputs, weight = outlier_inputs(16, 64), normal(8, 64)
    result = awq_scales([weight], [GROUPS], statistics_of(inputs), round_trips=[coarse])
    changed = inputs.double() @ (coarse(weight) - weight).double().t()
    assert result.error_before == pytest.approx(float(changed.square().sum(1).mean()), rel=1e-3)


def test_the_error_is_that_of_scaled_weights_on_divided_inputs() -> None:
    inputs, weight = outlier_inputs(64, 128), normal(16, 128)
    result = awq_scales([weight], [GROUPS], statistics_of(inputs))
    moment = folded_statistics(statistics_of(inputs), result.scales).moment.double()
    scaled = weight * result.scales
    error = (dequantize(quantize(scaled, GROUPS)) - scaled).double()
    assert float(((error @ moment) * error).sum()) == pytest.approx(result.error_after, rel=1e-3)


def test_weights_are_left_as_they_are() -> None:
    weight = normal(8, 64)
    before = weight.clone()
    awq_scales([weight], [GROUPS], statistics_of(outlier_inputs(8, 64)))
    assert torch.equal(weight, before)
