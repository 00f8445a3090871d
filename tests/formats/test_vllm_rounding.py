from __future__ import annotations

import torch

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.vllm_rounding import VllmRounding
from halfbyte.formats.vllm_scales import VLLM_W4A8, rounded_weight, settle, vllm_dequantize


def scales_and_values(rows: int = 40, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Settled scales ``[rows, 3]`` of different sizes, and values that reach a little beyond their codes."""
    seed = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 384, generator=seed) * torch.exp2(
        -8 * torch.rand(rows, 3, generator=seed)
    ).repeat_interleave(128, -1)
    return settle(quantize(weight * size, VLLM_W4A8).scales), weight * size * 1.1


def all_numbers(scales: torch.Tensor) -> torch.Tensor:
    """float64 ``[16, rows, in]``: what each code stands for in each column."""
    codes = torch.arange(-8, 8, dtype=torch.int8)[:, None, None].expand(
        16, len(scales), 128 * scales.shape[-1]
    )
    return torch.stack([rounded_weight(code, scales) for code in codes]).double()


def test_every_value_gets_the_nearest_number() -> None:
    scales, values = scales_and_values()
    codes, decoded = VllmRounding.of(scales).round(values, slice(None))
    distances = (all_numbers(scales) - values.double()).abs()
    assert torch.equal((decoded.double() - values.double()).abs(), distances.amin(0))
    assert torch.equal(decoded, vllm_dequantize(QuantizedTensor(VLLM_W4A8, codes, scales)))


def test_rows_under_the_floor_get_the_nearest_number() -> None:
    """Their numbers are rounded to fp32, and so is the middle between two."""
    scales, values = scales_and_values(size=1e-3)
    _, decoded = VllmRounding.of(scales).round(values, slice(None))
    nearest = (all_numbers(scales) - values.double()).abs().amin(0)
    assert ((decoded.double() - values.double()).abs() <= nearest * (1 + 1e-5)).all()


def test_ties_go_to_the_even_code() -> None:
    scales, _ = scales_and_values(4)
    numbers = all_numbers(scales)
    middles = (numbers[:-1] + numbers[1:]) / 2
    rounding = VllmRounding.of(scales)
    for lower, values in enumerate(middles, start=-8):
        assert torch.equal(values.float().double(), values)
        codes, _ = rounding.round(values.float(), slice(None))
        assert (codes == (lower if lower % 2 == 0 else lower + 1)).all()


def test_columns_in_any_order_and_one_by_one() -> None:
    scales, values = scales_and_values()
    rounding, order = VllmRounding.of(scales), torch.randperm(384, generator=torch.Generator().manual_seed(0))
    whole, decoded = rounding.round(values, slice(None))
    assert torch.equal(rounding.round(values[:, order], order)[0], whole[:, order])
    for i, column in zip(order[:20].tolist(), rounding.at(order[:20]).each(), strict=True):
        codes, numbers = column.round(values[:, i : i + 1])
        assert torch.equal(codes, whole[:, i : i + 1])
        assert torch.equal(numbers, decoded[:, i : i + 1])


def test_members_of_a_stack_may_have_columns_of_their_own() -> None:
    scales, values = scales_and_values()
    stacked, columns = (
        VllmRounding.of(torch.stack([scales, scales.flip(0)])),
        torch.tensor([[5, 300], [200, 7]]),
    )
    codes, _ = stacked.round(torch.stack([values[:, columns[0]], values.flip(0)[:, columns[1]]]), columns)
    whole, _ = VllmRounding.of(scales).round(values, slice(None))
    assert torch.equal(codes[0], whole[:, columns[0]])
    assert torch.equal(codes[1], whole.flip(0)[:, columns[1]])
