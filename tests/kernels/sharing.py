"""The reference as a kernel whose inputs can come quantized: what the GPU's kernels offer, on the CPU."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels import registry
from halfbyte.kernels.fused import quantize
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, INT8_TOKEN, QuantizedInputs, sum_group
from halfbyte.kernels.reference import Reference, exact_weight


class SharingReference(Reference):
    """calls: numbers of tokens that came quantized, by in_features."""

    name = "sharing-reference"

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(
            [
                (
                    problem.scheme.activations in (FP8_TOKEN, INT8_TOKEN),
                    "inputs must be E4M3 or INT8 with a scale per token",
                ),
                (problem.dtype != torch.bfloat16, "not for bfloat16, which other kernels are for"),
            ]
        )

    def quantize(self, x: torch.Tensor, prepared: Prepared) -> QuantizedInputs:
        return quantize(x, sum_group(prepared.problem.scheme))

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.calls.append((inputs.codes.shape[0], inputs.codes.shape[1]))
        result = (inputs.codes.double() * inputs.scales.double()) @ exact_weight(self.restore(prepared)).T
        return (result if bias is None else result + bias.double()).to(prepared.problem.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> SharingReference:
    """Make it the best kernel until the test ends."""
    kernel = SharingReference()
    monkeypatch.setattr(registry, "KERNELS", (kernel, *registry.KERNELS))
    return kernel
