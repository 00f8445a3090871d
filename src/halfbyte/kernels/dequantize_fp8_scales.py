"""W4A8 in the numbers of vLLM's kernel where Hopper's own kernel for them cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.formats.vllm_scales import VLLM_W4A8, rounded_weight
from halfbyte.kernels.dequantize import Dequantize
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import FP8_TOKEN
from halfbyte.kernels.storage import strips, unpack_codes


class DequantizeFp8Scales(Dequantize):
    """Group scales in FP8, code times scale rounded to FP8, sums in fp32; any shape, dtype and device."""

    name = "dequantize-fp8-scales"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        scheme = problem.scheme
        return first_refusal(
            (
                (scheme.target == "vllm", "weights must be rounded for vLLM's kernel"),
                (scheme.activations == FP8_TOKEN, "inputs must be E4M3 with a dynamic scale per token"),
                (
                    scheme.weights.with_scale("bf16") == VLLM_W4A8,
                    "weights must be symmetric INT4 in groups of 128 with bf16 scales",
                ),
            )
        )

    def _strips(self, prepared: Prepared) -> Iterator[tuple[slice, torch.Tensor]]:
        fmt, in_features = prepared.problem.scheme.weights, prepared.problem.in_features
        for rows, strip in strips(prepared.tensors, fmt, in_features):
            yield rows, rounded_weight(unpack_codes(strip["codes"], fmt, in_features), strip["scales"])
