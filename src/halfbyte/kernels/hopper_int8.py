"""INT4 weights, in two levels or per channel, x INT8 inputs on Hopper GPUs: exact integer sums over all of K."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.hopper import w4a8_int8_codes as layout
from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat, pack_blocks, unpack_blocks
from halfbyte.kernels.hopper.workspace import reserve
from halfbyte.kernels.hopper_int4 import has_bindings
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import INT8_TOKEN, QuantizedInputs
from halfbyte.kernels.triton.linear_conditions import (
    HALVES,
    LARGEST_INT8_K,
    gpu_conditions,
    has_known_groups,
    is_hopper,
    is_int4,
    is_two_level,
    name_of,
)
from halfbyte.kernels.triton_linear import refuse_beyond_int8


class HopperW4A8Int8(QuantizesTokens):
    """INT8 inputs with a dynamic scale per token, by ``hopper/sources/w4a8_int8.cu``."""

    name = "hopper-w4a8-int8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield (
            is_two_level(weights) or (is_int4(weights) and weights.granularity == "channel"),
            "weights must be INT4 with integer scales per group and one per channel, or per channel alone",
        )
        yield has_known_groups(weights), "groups must be of 32, 64 or a multiple of 128 inputs"
        yield problem.scheme.activations == INT8_TOKEN, "inputs must be INT8 with a dynamic scale per token"
        yield problem.dtype in HALVES, f"inputs must be bfloat16 or float16, not {name_of(problem.dtype)}"
        yield (
            problem.out_features % 16 == 0 and problem.in_features % 64 == 0,
            f"the weight must be a multiple of 16 x 64, not {problem.out_features} x {problem.in_features}",
        )
        yield (
            problem.in_features <= LARGEST_INT8_K,
            f"in_features must be at most {LARGEST_INT8_K}: int32 sums",
        )
        yield from gpu_conditions(problem, (9, 0))
        yield is_hopper(problem), "is made of Hopper's own instructions (compute capability 9.0)"
        yield has_bindings(), "needs the package cuda-bindings, which torch for CUDA brings"

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        """Errors: groups that leave INT8, which no writer that follows QoQ makes."""
        fmt = self.block_format_of(problem)
        levels, zeros, channels = None, None, q.scales
        if is_two_level(q.format):
            refuse_beyond_int8(q)
            assert q.zero_points is not None
            assert q.outer_scales is not None
            channels = q.outer_scales
            levels = layout.pack_levels(q.scales, q.zero_points).repeat_interleave(_repeats(problem), 1)
            levels = levels[:, : -(-problem.in_features // fmt.group_size)]
        else:
            zeros = _zero_points(q).flatten().to(torch.int32) + 8
        weight = pack_blocks(fmt, q.codes, layout.pack_codes, levels, None)
        # The first blocks are read before the kernel ahead has ended, and that one may be the packing.
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()
            reserve(weight.device.index)
        tensors = {"weight": weight, "channels": channels.float().reshape(-1).contiguous()}
        return Prepared(problem, tensors if zeros is None else {**tensors, "zeros": zeros}, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, tensors = prepared.problem, prepared.tensors
        fmt, shape = problem.scheme.weights, (problem.out_features, problem.in_features)
        codes, levels, _ = unpack_blocks(
            self.block_format(prepared), tensors["weight"], layout.unpack_codes, shape
        )
        channels = tensors["channels"][:, None]
        if levels is not None:
            scales, zeros = layout.unpack_levels(levels[:, :: _repeats(problem)].contiguous())
            return QuantizedTensor(fmt, codes, scales, zeros, channels)
        zero_points = None if fmt.symmetric else (tensors["zeros"][:, None] - 8).to(torch.int8)
        return QuantizedTensor(fmt, codes, channels.to(FLOAT_SCALE_DTYPES[fmt.scale]), zero_points)

    def block_format(self, prepared: Prepared) -> BlockFormat:
        """What the prepared weight's blocks hold."""
        return self.block_format_of(prepared.problem)

    def block_format_of(self, problem: LinearProblem) -> BlockFormat:
        """The same, before it is prepared."""
        size = problem.scheme.weights.group_size
        return layout.block_format(min(size, INPUTS) if size else None)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.run_quantized(self.quantize(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        from halfbyte.kernels.hopper.w4a8_int8 import w4a8_int8_linear

        problem, tensors = prepared.problem, prepared.tensors
        if bias is not None:
            bias = bias.to(problem.dtype)
        fmt = self.block_format(prepared)
        return w4a8_int8_linear(
            *inputs,
            tensors["weight"],
            tensors["channels"],
            tensors.get("zeros"),
            bias,
            fmt.group_size if fmt.scale else None,
            problem.dtype,
        )


def _zero_points(q: QuantizedTensor) -> torch.Tensor:
    return torch.zeros_like(q.scales, dtype=torch.int8) if q.zero_points is None else q.zero_points


def _repeats(problem: LinearProblem) -> int:
    """For how many of the kernel's groups one of the weight's scales counts."""
    return max((problem.scheme.weights.group_size or INPUTS) // INPUTS, 1)
