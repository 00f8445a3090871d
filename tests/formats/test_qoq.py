from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from halfbyte.errors import HalfbyteError
from halfbyte.formats.qoq import channel_scales, group_grid
from halfbyte.formats.quantize import dequantize, quantize
from tests.formats.hostile import FORMATS, weights

# In level-one integers, by the paper's rounding of scales and zero points.
WORST_OF_LEVEL_TWO = 14


@pytest.mark.parametrize("ratio", [1.0, 0.5, 1.1])
def test_level_two_never_leaves_int8(ratio: float) -> None:
    """Every pair of a smallest and a largest level-one integer, one-sided groups included, with all between them."""
    integers = torch.arange(-119, 120, dtype=torch.float32)
    smallest, largest = (bound.reshape(-1) for bound in torch.meshgrid(integers, integers, indexing="ij"))
    possible = smallest <= largest
    smallest, largest = smallest[possible], largest[possible]
    scales, zero_points = group_grid(smallest.clamp(max=0) * ratio, largest.clamp(min=0) * ratio)
    assert scales.dtype == zero_points.dtype == torch.int8
    assert scales.min() >= 1
    assert scales.max() <= 18
    assert zero_points.min() >= -8
    assert zero_points.max() <= 7
    step, zero = scales.int(), zero_points.int() + 8
    for value in range(-119, 120):
        inside = (smallest <= value) & (value <= largest)
        s, z = step[inside], zero[inside]
        code = (torch.round(value / s).int() + z).clamp(0, 15)
        back = (code - z) * s
        assert back.min() >= -128
        assert back.max() <= 127
        assert (code * s).max() <= 255  # what QServe's kernel multiplies before it subtracts


def test_both_levels_follow_their_definition() -> None:
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    q = quantize(weight, FORMATS["w4a8-int8"])
    assert q.outer_scales is not None
    assert q.zero_points is not None
    outer = weight.abs().amax(-1, keepdim=True) / 119
    assert torch.equal(q.outer_scales, outer)
    level_one = torch.round(weight / outer).reshape(5, 2, 128)
    assert level_one.abs().max() == 119
    low, high = level_one.amin(-1).clamp(max=0), level_one.amax(-1).clamp(min=0)
    scale = torch.round((high - low) / 15).clamp(min=1)
    zero = torch.round(-low / scale).clamp(0, 15)
    assert torch.equal(q.scales.float(), scale)
    assert torch.equal(q.zero_points.float(), zero - 8)
    codes = (torch.round(level_one / scale.unsqueeze(-1)) + zero.unsqueeze(-1)).clamp(0, 15)
    assert torch.equal(q.codes.float(), codes.reshape(5, 256) - 8)
    integers = (codes - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    assert torch.equal(dequantize(q), integers.reshape(5, 256) * outer)


@settings(max_examples=50, deadline=None)
@given(weight=weights())
def test_group_integers_stay_in_int8_for_hostile_weights(weight: torch.Tensor) -> None:
    q = quantize(weight, FORMATS["w4a8-int8"])
    assert q.outer_scales is not None
    assert q.zero_points is not None
    integers = (q.codes.int() - q.zero_points.int()) * q.scales.int()
    assert integers.min() >= -128
    assert integers.max() <= 127
    # What level two is off at most, and half of level one's scale.
    assert (dequantize(q) - weight).abs().le(q.outer_scales * (WORST_OF_LEVEL_TWO + 0.51)).all()


def test_what_level_two_is_off_at_most() -> None:
    """Where scale and zero point are both rounded so that an end of the range has no code, more than half a scale."""
    low = -torch.arange(120.0).view(-1, 1).expand(120, 120)
    high = torch.arange(120.0).expand(120, 120)
    scales, zeros = group_grid(low, high)
    off = torch.stack(
        [v - ((v / scales).round() + zeros).clamp(-8, 7).sub(zeros) * scales for v in (low, high)]
    )
    assert off.abs().max() == WORST_OF_LEVEL_TWO
    assert off[1, 113, 119] == WORST_OF_LEVEL_TWO


def test_a_dormant_channel_has_a_normal_scale() -> None:
    assert channel_scales(torch.tensor([0.0, 1e-41])).tolist() == [2.0**-126, 2.0**-126]


def test_channel_scales_in_fp16_are_what_codes_are_chosen_for() -> None:
    fmt = replace(FORMATS["w4a8-int8"], outer_dtype="f16")
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[5] = 0
    q = quantize(weight, fmt)
    assert q.outer_scales is not None
    assert q.outer_scales.dtype is torch.float32
    absmax = weight.abs().amax(1, keepdim=True)
    assert torch.equal(q.outer_scales, (absmax / 119).clamp(min=2.0**-24).half().float())
    level_one = (weight / q.outer_scales).round().clamp(-119, 119).unflatten(1, (-1, 128))
    assert q.zero_points is not None
    scales, zeros = q.scales.float()[..., None], q.zero_points.float()[..., None]
    codes = ((level_one / scales).round() + zeros).clamp(-8, 7).flatten(1)
    assert torch.equal(q.codes.float(), codes)


def test_channel_scales_beyond_fp16() -> None:
    with pytest.raises(HalfbyteError, match="beyond the largest fp16, 65504"):
        channel_scales(torch.tensor([1.0, 119 * 65520.0]), "f16")
    assert channel_scales(torch.tensor([119 * 65504.0]), "f16").tolist() == [65504.0]


@pytest.mark.parametrize("options", [{"scale": "bf16"}, {"outer_dtype": "bf16"}])
def test_a_dtype_that_no_file_stores(options: dict[str, str]) -> None:
    with pytest.raises(HalfbyteError, match="dtype of outer scales"):
        replace(FORMATS["w4a8-int8"], **{"outer_dtype": "f16", **options})
