"""Weights that read one input: together as alone."""

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
from halfbyte.quantization import rounding_step
from halfbyte.quantization.rounding_step import round_weights
from halfbyte.schemes import PRESETS

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(rows, 128, generator=GENERATOR) for rows in (32, 16, 48)]
INPUTS = torch.randn(300, 128, generator=GENERATOR) @ torch.randn(128, 128, generator=GENERATOR)
MOMENT = INPUTS.T @ INPUTS / len(INPUTS)


def assert_same(one: QuantizedTensor, other: QuantizedTensor) -> None:
    for name in ("codes", "scales", "zero_points", "outer_scales"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name


def formats() -> dict[str, TensorFormat]:
    return {name: scheme.weights.with_scale("bf16") for name, scheme in PRESETS.items()}


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_together_as_alone(scheme: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, method = formats()[scheme], Method.parse(algorithm, "output")
    elsewhere = [3.0, 3.0, 5.0] if fmt.outer == "tensor" else [0.0] * 3
    together = round_weights(WEIGHTS, fmt, method, MOMENT, elsewhere, ExactScales())
    for weight, absmax, found in zip(WEIGHTS, elsewhere, together, strict=True):
        (alone,) = round_weights([weight], fmt, method, MOMENT, [absmax], ExactScales())
        assert_same(found.quantized, alone.quantized)
    monkeypatch.setattr(rounding_step, "_TOGETHER", 40 * 128)  # the first alone, the second alone, ...
    for found, batched in zip(
        together, round_weights(WEIGHTS, fmt, method, MOMENT, elsewhere, ExactScales()), strict=True
    ):
        assert_same(found.quantized, batched.quantized)


def test_steps_are_the_algorithms() -> None:
    fmt, weight = formats()["w4a8"], WEIGHTS[0]

    def rounded(algorithm: str, clip: str) -> QuantizedTensor:
        method = Method.parse(algorithm, clip)
        return round_weights([weight], fmt, method, MOMENT, [0.0], ExactScales())[0].quantized

    assert_same(rounded("rtn", "none"), quantize(weight, fmt))
    grid = clip_output_grid(weight, fmt, MOMENT)
    assert_same(rounded("rtn", "output"), encode(weight, fmt, grid))
    assert_same(rounded("gptq", "none"), gptq(weight, fmt, MOMENT).quantized)
    assert_same(rounded("gptq", "output"), gptq(weight, fmt, MOMENT, grid=grid).quantized)


def test_what_was_done_is_said() -> None:
    fmt = formats()["w4a8"]
    (plain,) = round_weights(WEIGHTS[:1], fmt, Method(), None, [0.0], ExactScales())
    assert (plain.narrowed, plain.damping, plain.fallback) == (None, None, None)
    (clipped,) = round_weights(WEIGHTS[:1], fmt, Method.parse("gptq"), MOMENT, [0.0], ExactScales())
    assert clipped.narrowed is not None
    assert 0 < clipped.narrowed <= 1
    assert (clipped.damping, clipped.fallback) == (0.01, None)
    (fallen,) = round_weights(
        WEIGHTS[:1],
        fmt,
        Method.parse("gptq", "none"),
        torch.full((128, 128), torch.nan),
        [0.0],
        ExactScales(),
    )
    assert fallen.fallback is not None
    assert_same(fallen.quantized, plain.quantized)
