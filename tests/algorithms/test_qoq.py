"""QoQ: the proof that nothing leaves INT8, over all ranges, and that searching only gains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from halfbyte.algorithms.qoq import channel_order, group_candidates, qoq, qoq_grid
from halfbyte.algorithms.rtn import rtn
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.qoq import PROTECTED_RANGE, group_grid
from halfbyte.formats.quantize import dequantize, encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from tests.algorithms.inputs import outlier_inputs, statistics_of
from tests.formats.hostile import bits, weights

G128 = TensorFormat("int4", "group", 128, symmetric=False, scale="int8", outer="channel")
PER_CHANNEL = TensorFormat("int4", "channel", symmetric=False, scale="f16")
INTEGERS = torch.arange(-PROTECTED_RANGE, PROTECTED_RANGE + 1.0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def all_ranges() -> tuple[torch.Tensor, torch.Tensor]:
    """Every (low, high) with -119 <= low <= 0 <= high <= 119: two-sided, one-sided and empty groups."""
    ends = torch.arange(PROTECTED_RANGE + 1.0)
    low, high = torch.meshgrid(-ends, ends, indexing="ij")
    return low.flatten(), high.flatten()


def number_of_candidates() -> int:
    return len(group_candidates(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize("index", range(number_of_candidates()))
def test_every_code_of_every_range_decodes_within_int8(index: int) -> None:
    low, high = all_ranges()
    scales, zero_points = (part.float()[:, None] for part in group_candidates(low, high)[index])
    assert scales.min() >= 1
    assert scales.max() <= 16
    unsigned_zeros = zero_points + 8
    assert unsigned_zeros.min() >= 0
    assert unsigned_zeros.max() <= 15
    # Beyond the range too: an algorithm that moves errors may round what lies outside it, within level one.
    codes = ((INTEGERS / scales).round() + unsigned_zeros).clamp(0, 15)
    decoded = (codes - unsigned_zeros) * scales
    assert decoded.min() >= -128
    assert decoded.max() <= 127


def test_round_to_nearest_is_the_first_candidate() -> None:
    low, high = all_ranges()
    for mine, nearest in zip(group_candidates(low, high)[0], group_grid(low, high), strict=True):
        assert torch.equal(mine, nearest)


def test_the_worst_range_of_round_to_nearest_gets_both_its_ends() -> None:
    """[-113, 119]: scale 15 and zero point 8 leave 119 with 105 as the nearest code."""
    low, high = torch.tensor([-113.0]), torch.tensor([119.0])

    def farthest(candidate: tuple[torch.Tensor, torch.Tensor]) -> float:
        scales, zeros = candidate[0].float(), candidate[1].float()
        off = [v - (((v / scales).round() + zeros).clamp(-8, 7) - zeros) * scales for v in (low, high)]
        return float(torch.stack(off).abs().amax())

    candidates = group_candidates(low, high)
    assert farthest(candidates[0]) == 14.0
    assert min(farthest(candidate) for candidate in candidates) <= 8.0


def squared_errors(weight: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    error = (dequantize(q).double() - weight.double()).square()
    return error.unflatten(-1, (q.scales.shape[-1], -1)).sum(-1)


@pytest.mark.parametrize("fmt", [G128, PER_CHANNEL])
def test_no_group_ends_worse_than_rounded_to_nearest_and_most_better(fmt: TensorFormat) -> None:
    weight = normal(32, 512)
    after, before = squared_errors(weight, qoq(weight, fmt)), squared_errors(weight, rtn(weight, fmt))
    assert (after <= before * (1 + 1e-6)).all()
    assert (after < before).float().mean() > 0.5


@pytest.mark.parametrize("fmt", [G128, PER_CHANNEL])
def test_with_a_moment_outputs_are_what_counts(fmt: TensorFormat) -> None:
    inputs, weight = outlier_inputs(64, 256), normal(32, 256)
    moment = statistics_of(inputs).moment

    def of_groups(q: QuantizedTensor) -> torch.Tensor:
        groups = q.scales.shape[-1]
        error = (dequantize(q) - weight).double().unflatten(-1, (groups, -1))
        return (
            torch.einsum("ogc,tgc->ogt", error, inputs.double().unflatten(-1, (groups, -1))).square().mean(-1)
        )

    by_output, by_weight, plain = (
        of_groups(q) for q in (qoq(weight, fmt, moment), qoq(weight, fmt), rtn(weight, fmt))
    )
    assert (by_output <= plain * (1 + 1e-3)).all()
    assert by_output.sum() < by_weight.sum()


def test_members_of_a_stack_have_their_own_moments() -> None:
    stack = normal(2, 8, 256)
    moments = torch.stack(
        [statistics_of(outlier_inputs(64, 256, seed)).moment.roll(seed, 0) for seed in range(2)]
    )
    q = qoq(stack, G128, moments)
    for index, moment in enumerate(moments):
        alone = qoq(stack[index], G128, moment)
        assert torch.equal(q.codes[index], alone.codes)
        assert torch.equal(q.scales[index], alone.scales)


@settings(max_examples=30, deadline=None)
@given(weight=weights())
def test_hostile_weights_stay_in_int8_and_end_no_worse(weight: torch.Tensor) -> None:
    q = qoq(weight, G128)
    assert q.zero_points is not None
    integers = (q.codes.int() - q.zero_points.int()) * q.scales.int()
    assert integers.min() >= -128
    assert integers.max() <= 127
    assert (squared_errors(weight, q) <= squared_errors(weight, rtn(weight, G128)) * (1 + 1e-4) + 1e-37).all()


def test_the_grid_is_the_one_that_was_rounded_onto() -> None:
    weight = normal(8, 256)
    assert torch.equal(
        bits(encode(weight, G128, qoq_grid(weight, G128)).codes), bits(qoq(weight, G128).codes)
    )


def test_other_formats_are_refused() -> None:
    with pytest.raises(HalfbyteError, match="int8 scales"):
        qoq(normal(4, 128), TensorFormat("int4", "group", 128, scale="bf16"))


def test_channels_are_ordered_by_salience() -> None:
    assert channel_order(torch.tensor([1.0, 5.0, 0.0, 5.0, 2.0])).tolist() == [1, 3, 4, 0, 2]


def test_ordered_channels_round_better() -> None:
    """Large and small channels that took turns share no group any more."""
    weight = normal(16, 256)
    weight[:, ::2] *= 10.0
    order = channel_order(weight.abs().amax(0))
    apart, mixed = (float(squared_errors(w, qoq(w, G128)).sum()) for w in (weight[:, order], weight))
    assert apart < 0.7 * mixed


def test_magnitudes_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="magnitudes"):
        channel_order(torch.tensor([1.0, torch.nan]))
