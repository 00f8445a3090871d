"""Steps of a block, on weights alone."""

from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.output_error import output_error
from halfbyte.algorithms.targets import ExactScales
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method
from halfbyte.quantization import block_step
from halfbyte.quantization.scaling_step import BlockTensors
from halfbyte.quantization.stacks import stack_up

FORMAT = TensorFormat("int4", "group", 32, scale="bf16")
GENERATOR = torch.Generator().manual_seed(0)


def statistics() -> InputStatistics:
    inputs = torch.randn(300, 64, generator=GENERATOR) @ torch.randn(64, 64, generator=GENERATOR)
    return InputStatistics(300, inputs.T @ inputs / 300, inputs.abs().mean(0), inputs.abs().amax(0))


@pytest.mark.parametrize("rows", [torch.ones(16), torch.exp(2 * torch.randn(16, generator=GENERATOR))])
def test_errors_are_those_of_the_weights_as_they_are(rows: torch.Tensor) -> None:
    """A producer's rows were divided by scales before it is quantized: its output is no longer the model's."""
    weights = {name: torch.randn(16, 64, generator=GENERATOR) for name in ("up", "gate", "down")}
    seen = statistics()
    known = {"up": seen, "gate": seen, "down": statistics()}
    tensors = BlockTensors(weights.__getitem__, {}, weights, lambda _: torch.empty(0))
    tensors.scaled["up"] = weights["up"] / rows[:, None]
    formats = dict.fromkeys(weights, FORMAT)
    methods = dict.fromkeys(weights, Method.parse("gptq"))
    targets = dict.fromkeys(weights, ExactScales())
    found = {
        part.name: part
        for stack in stack_up(formats, dict.fromkeys(weights, (16, 64)), methods, targets, known)
        for part in block_step._quantized(stack, tensors, known, 0.0)
    }
    assert found.keys() == weights.keys()
    for name, part in found.items():
        weight = tensors.weight(name)
        assert torch.equal(part.decoded, dequantize(part.quantized))
        assert part.error == pytest.approx(output_error(weight, part.decoded, known[name].moment), rel=1e-4)
        assert part.scales == (part.quantized.scales.min(), part.quantized.scales.max())
