from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from halfbyte.formats.columns import ColumnRounding, take_columns
from halfbyte.formats.grid import Grid
from halfbyte.formats.quantize import dequantize, encode, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from tests.formats.hostile import FORMATS, bits, weights

ALL = pytest.mark.parametrize("name", FORMATS)


def some_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02


def rounding_of(q: QuantizedTensor) -> ColumnRounding:
    return ColumnRounding.of(q.format, Grid(q.scales, q.zero_points, q.outer_scales), q.shape)


def shuffled(columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(seed))


@ALL
@settings(max_examples=15, deadline=None)
@given(weight=weights())
def test_any_columns_round_as_the_whole_weight_does(name: str, weight: torch.Tensor) -> None:
    q = quantize(weight, FORMATS[name])
    whole, rounding = dequantize(q), rounding_of(q)
    for columns in shuffled(weight.shape[-1]).split(37):
        codes, decoded = rounding.round(weight[:, columns], columns)
        assert torch.equal(bits(codes), bits(q.codes)[:, columns])
        assert torch.equal(bits(decoded), bits(whole[:, columns]))


@ALL
def test_values_far_from_the_weight_saturate_as_they_do_in_it(name: str) -> None:
    """What algorithms round is not the weight that the grid came from."""
    q, moved = quantize(some_weight(7, 256), FORMATS[name]), some_weight(7, 256) * 3 + 0.05
    rounding = rounding_of(q)
    wanted = encode(moved, q.format, rounding.grid)
    codes, decoded = rounding.round(moved[:, 40:90], slice(40, 90))
    assert torch.equal(bits(codes), bits(wanted.codes[:, 40:90]))
    assert torch.equal(decoded, dequantize(wanted)[:, 40:90])


@ALL
def test_single_columns_equal_several(name: str) -> None:
    weight = some_weight(5, 256)
    rounding, columns = rounding_of(quantize(weight, FORMATS[name])), shuffled(256)[:50]
    values = take_columns(weight, columns)
    together, decoded = rounding.round(values, columns)
    singles = [single.round(values[:, i : i + 1]) for i, single in enumerate(rounding.at(columns).each())]
    assert torch.equal(torch.cat([bits(codes) for codes, _ in singles], -1), bits(together))
    assert torch.equal(torch.cat([value for _, value in singles], -1), decoded)


@ALL
def test_members_of_a_stack_may_have_columns_of_their_own(name: str) -> None:
    weight = some_weight(2, 3, 256)
    q, columns = quantize(weight, FORMATS[name]), torch.stack([shuffled(256, 1)[:9], shuffled(256, 2)[:9]])
    codes, decoded = rounding_of(q).round(take_columns(weight, columns), columns)
    for member in range(2):
        assert torch.equal(bits(codes[member]), bits(q.codes[member])[:, columns[member]])
        assert torch.equal(decoded[member], dequantize(q)[member][:, columns[member]])


def test_values_are_left_alone() -> None:
    weight = some_weight(3, 128)
    values = weight[:, :4].clone()
    rounding_of(quantize(weight, FORMATS["w4a8-int8"])).round(values, slice(0, 4))
    assert torch.equal(values, weight[:, :4])
