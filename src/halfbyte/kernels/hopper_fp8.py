"""FP8 weights with a scale per channel on Hopper GPUs: by name, and the form that experts have."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.hopper import w8a8_codes as layout
from halfbyte.kernels.hopper.blocks import pack_blocks, unpack_blocks
from halfbyte.kernels.hopper_int4 import has_bindings
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, QuantizedInputs
from halfbyte.kernels.triton.linear_conditions import HALVES, gpu_conditions, is_coarse, is_hopper, name_of


class HopperFp8(QuantizesTokens):
    """E4M3 inputs with a dynamic scale per token, by ``hopper/sources/w8a8.cu``. Listed behind
    Triton's, which takes whatever this one takes: it runs only by name."""

    name = "hopper-fp8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield (
            weights.element == "e4m3" and is_coarse(weights) and weights.granularity == "channel",
            "weights must be E4M3 with a scale per channel",
        )
        yield problem.scheme.activations == FP8_TOKEN, "inputs must be E4M3 with a dynamic scale per token"
        yield problem.dtype in HALVES, f"inputs must be bfloat16 or float16, not {name_of(problem.dtype)}"
        yield (
            problem.out_features % 16 == 0 and problem.in_features % 64 == 0,
            f"the weight must be a multiple of 16 x 64, not {problem.out_features} x {problem.in_features}",
        )
        yield from gpu_conditions(problem, (9, 0))
        yield is_hopper(problem), "is made of Hopper's own instructions (compute capability 9.0)"
        yield has_bindings(), "needs the package cuda-bindings, which torch for CUDA brings"

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        weight = pack_blocks(layout.FORMAT, q.codes.view(torch.uint8), layout.pack_codes, None, None)
        # The first blocks are read before the kernel ahead has ended, and that one may be the packing.
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()
        tensors = {"weight": weight, "channels": q.scales.float().reshape(-1).contiguous()}
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, tensors = prepared.problem, prepared.tensors
        fmt, shape = problem.scheme.weights, (problem.out_features, problem.in_features)
        codes, _, _ = unpack_blocks(layout.FORMAT, tensors["weight"], layout.unpack_codes, shape)
        scales = tensors["channels"][:, None].to(FLOAT_SCALE_DTYPES[fmt.scale])
        return QuantizedTensor(fmt, codes.view(torch.float8_e4m3fn), scales)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.run_quantized(self.quantize(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        from halfbyte.kernels.hopper.w8a8 import w8a8_linear

        tensors, dtype = prepared.tensors, prepared.problem.dtype
        of_dtype = None if bias is None else bias.to(dtype)
        return w8a8_linear(
            inputs.codes, inputs.scales, tensors["weight"], tensors["channels"], of_dtype, dtype
        )
