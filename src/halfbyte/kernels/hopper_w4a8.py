"""W4A8 on Hopper GPUs: exact group scales, symmetric or with zero points, any number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.hopper.weight_layout import INPUTS, block_bytes, pack_weight, unpack_weight
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, QuantizedInputs, sum_group
from halfbyte.kernels.triton.linear_conditions import gpu_conditions, has_known_groups, is_int4, name_of

_OUTPUTS = (torch.bfloat16, torch.float16)


class HopperW4A8(QuantizesTokens):
    """INT4 weights and E4M3 inputs with a scale per token, by ``hopper/sources/w4a8.cu``.

    A scale for a whole channel, or for more than 128 inputs, is repeated for every 128.
    """

    name = "hopper-w4a8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield is_int4(weights), "weights must be INT4 with one level of floating-point scales"
        yield has_known_groups(weights), "groups must be of 32, 64 or a multiple of 128 inputs"
        yield problem.scheme.activations == FP8_TOKEN, "inputs must be E4M3 with a dynamic scale per token"
        yield (
            problem.dtype in _OUTPUTS,
            f"inputs must be bfloat16 or float16, not {name_of(problem.dtype)}",
        )
        yield (
            problem.out_features % 16 == 0 and problem.in_features % 64 == 0,
            f"the weight must be a multiple of 16 x 64, not {problem.out_features} x {problem.in_features}",
        )
        yield from gpu_conditions(problem, (9, 0))
        yield (
            torch.cuda.get_device_capability(problem.device) == (9, 0),
            "is made of Hopper's own instructions (compute capability 9.0)",
        )
        yield _has_bindings(), "needs the package cuda-bindings, which torch for CUDA brings"

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        repeats = _repeats(problem)

        def repeated(groups: torch.Tensor | None) -> torch.Tensor | None:
            if groups is None:
                return None
            return groups.repeat_interleave(repeats, 1)[
                :, : -(-problem.in_features // sum_group(problem.scheme))
            ]

        scales = repeated(q.scales)
        assert scales is not None
        weight = pack_weight(q.codes, scales, repeated(q.zero_points), sum_group(problem.scheme))
        # A layer's first blocks are read before the kernel ahead of it has ended, and that one may be the packing.
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()
        return Prepared(problem, {"weight": weight}, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem = prepared.problem
        weights, repeats = problem.scheme.weights, _repeats(problem)
        codes, scales, zeros = unpack_weight(
            prepared.tensors["weight"],
            (problem.out_features, problem.in_features),
            sum_group(problem.scheme),
            FLOAT_SCALE_DTYPES[weights.scale],
            _has_zeros(prepared),
        )
        return QuantizedTensor(
            weights,
            codes,
            scales[:, ::repeats].contiguous(),
            None if zeros is None else zeros[:, ::repeats].contiguous(),
        )

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.run_quantized(self.quantize(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        from halfbyte.kernels.hopper.w4a8 import w4a8_linear

        problem = prepared.problem
        weights = problem.scheme.weights
        return w4a8_linear(
            *inputs,
            prepared.tensors["weight"],
            None if bias is None else bias.to(problem.dtype),
            problem.out_features,
            sum_group(problem.scheme),
            FLOAT_SCALE_DTYPES[weights.scale],
            _has_zeros(prepared),
            problem.dtype,
        )


def _repeats(problem: LinearProblem) -> int:
    """For how many of the kernel's groups one of the weight's scales counts."""
    size = problem.scheme.weights.group_size or -(-problem.in_features // INPUTS) * INPUTS
    return max(size // INPUTS, 1)


def _has_zeros(prepared: Prepared) -> bool:
    scheme = prepared.problem.scheme
    with_zeros = block_bytes(sum_group(scheme), FLOAT_SCALE_DTYPES[scheme.weights.scale], True)
    return prepared.tensors["weight"].shape[2] == with_zeros


def _has_bindings() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
