"""What weights are rounded onto for each kernel."""

from __future__ import annotations

import torch

from halfbyte.algorithms.targets import ExactScales, VllmScales
from halfbyte.formats.floats import encode_float8
from halfbyte.formats.grid import Ranges, choose_grid
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.vllm_scales import VLLM_W4A8, settle, split_scales

WEIGHT = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) * 0.05
GRID = choose_grid(Ranges.of(WEIGHT, VLLM_W4A8), VLLM_W4A8)


def test_exact_scales_are_the_format_itself() -> None:
    target = ExactScales()
    q = target.round(WEIGHT, VLLM_W4A8, GRID)
    expected = quantize(WEIGHT, VLLM_W4A8)
    assert torch.equal(q.codes, expected.codes)
    assert torch.equal(q.scales, expected.scales)
    assert torch.equal(target.decode(q), dequantize(expected))
    assert torch.equal(target.nearest(WEIGHT, VLLM_W4A8), dequantize(expected))


def test_vllm_gets_the_nearest_number_that_its_kernel_can_make() -> None:
    target = VllmScales()
    q = target.round(WEIGHT, VLLM_W4A8, GRID)
    assert torch.equal(q.scales, settle(GRID.scales))
    groups, channels = split_scales(q.scales)
    numbers = encode_float8(torch.arange(-8, 8).float() * groups.float().unsqueeze(-1), "e4m3").float()
    numbers = (numbers * channels[:, None, None]).repeat_interleave(128, 1)  # [out, in, 16]
    decoded = target.decode(q)
    assert torch.equal(decoded, numbers.gather(-1, (q.codes.long() + 8).unsqueeze(-1)).squeeze(-1))
    nearest = (numbers - WEIGHT.unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close((decoded - WEIGHT).abs(), nearest, rtol=0, atol=1e-9)
    assert torch.equal(target.nearest(WEIGHT, VLLM_W4A8), decoded)


def test_vllm_rounds_by_groups_as_by_columns() -> None:
    target = VllmScales()
    rounding = target.rounding(GRID, VLLM_W4A8, tuple(WEIGHT.shape))
    codes, _ = rounding.at(slice(0, 256)).round(WEIGHT)
    assert torch.equal(target.round(WEIGHT, VLLM_W4A8, GRID).codes, codes)
