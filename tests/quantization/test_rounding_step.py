"""Stacks of weights: members as they would be alone."""

from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.clip import clip_output_grid
from halfbyte.algorithms.gptq import gptq
from halfbyte.algorithms.targets import ExactScales
from halfbyte.formats.quantize import encode, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method
from halfbyte.quantization.rounding_step import round_stack
from halfbyte.schemes import PRESETS

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = torch.randn(3, 32, 128, generator=GENERATOR)
INPUTS = torch.randn(3, 300, 128, generator=GENERATOR) @ torch.randn(3, 128, 128, generator=GENERATOR)
MOMENTS = INPUTS.mT @ INPUTS / 300


def part(q: QuantizedTensor, member: int) -> QuantizedTensor:
    optional = (None if t is None else t[member] for t in (q.zero_points, q.outer_scales))
    return QuantizedTensor(q.format, q.codes[member], q.scales[member], *optional)


def assert_same(one: QuantizedTensor, other: QuantizedTensor) -> None:
    for name in ("codes", "scales", "zero_points", "outer_scales"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name


def formats() -> dict[str, TensorFormat]:
    return {name: scheme.weights.with_scale("bf16") for name, scheme in PRESETS.items()}


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_members_as_alone(scheme: str, algorithm: str) -> None:
    fmt, method = formats()[scheme], Method.parse(algorithm, "output")
    together = round_stack(WEIGHTS, fmt, method, MOMENTS, ExactScales(), elsewhere=3.0)
    for member in range(3):
        some = slice(member, member + 1)
        alone = round_stack(WEIGHTS[some], fmt, method, MOMENTS[some], ExactScales(), elsewhere=3.0)
        assert_same(part(together.quantized, member), part(alone.quantized, 0))
        for said in ("narrowed", "damping", "fallback"):
            assert getattr(together, said)[some] == getattr(alone, said)


def test_steps_are_the_algorithms() -> None:
    fmt, weight, moment = formats()["w4a8"], WEIGHTS[0], MOMENTS[0]

    def rounded(algorithm: str, clip: str) -> QuantizedTensor:
        method = Method.parse(algorithm, clip)
        return part(round_stack(WEIGHTS[:1], fmt, method, MOMENTS[:1], ExactScales()).quantized, 0)

    assert_same(rounded("rtn", "none"), quantize(weight, fmt))
    grid = clip_output_grid(weight, fmt, moment)
    assert_same(rounded("rtn", "output"), encode(weight, fmt, grid))
    assert_same(rounded("gptq", "none"), gptq(weight, fmt, moment).quantized)
    assert_same(rounded("gptq", "output"), gptq(weight, fmt, moment, grid=grid).quantized)


def test_what_was_done_is_said() -> None:
    fmt = formats()["w4a8"]
    plain = round_stack(WEIGHTS, fmt, Method(), None, ExactScales())
    assert plain.narrowed == plain.damping == plain.fallback == (None,) * 3
    clipped = round_stack(WEIGHTS, fmt, Method.parse("gptq"), MOMENTS, ExactScales())
    assert all(share is not None and 0 < share <= 1 for share in clipped.narrowed)
    assert (clipped.damping, clipped.fallback) == ((0.01,) * 3, (None,) * 3)
    useless = MOMENTS.clone()
    useless[1] = torch.nan
    fallen = round_stack(WEIGHTS, fmt, Method.parse("gptq", "none"), useless, ExactScales())
    assert fallen.damping == (0.01, None, 0.01)
    assert fallen.fallback[1] is not None
    assert_same(part(fallen.quantized, 1), part(plain.quantized, 1))
