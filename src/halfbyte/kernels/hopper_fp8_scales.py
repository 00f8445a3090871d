"""W4A8 on Hopper GPUs in the numbers of vLLM's kernel: for checkpoints calibrated on them, or by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.vllm_scales import split_scales
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.hopper import w4a8_fp8_scales_codes as layout
from halfbyte.kernels.hopper.blocks import BlockFormat, pack_blocks, unpack_blocks
from halfbyte.kernels.hopper_int4 import HopperW4A8
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import QuantizedInputs


class HopperW4A8Fp8Scales(QuantizesTokens):
    """Group scales in FP8, code times scale rounded to FP8, sums in the tensor cores over all of K.

    Listed behind the kernel with exact scales, which takes whatever this one takes: it runs what was rounded for vLLM's
    kernel, and the rest by name.
    """

    name = "hopper-w4a8-fp8-scales"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield HopperW4A8().can_implement(problem)
        yield weights.group_size == layout.FORMAT.group_size, "groups must be of 128 inputs"
        yield weights.symmetric and weights.scale == "bf16", "weights must be symmetric with bf16 scales"

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        groups, channels = split_scales(q.scales)
        weight = pack_blocks(layout.FORMAT, q.codes, layout.pack_codes, groups.view(torch.uint8), None)
        # The first blocks are read before the kernel ahead has ended, and that one may be the packing.
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()
        # The scales as they came cannot be had back from those in FP8.
        return Prepared(problem, {"weight": weight, "channels": channels, "scales": q.scales}, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, tensors = prepared.problem, prepared.tensors
        shape = (problem.out_features, problem.in_features)
        codes, _, _ = unpack_blocks(layout.FORMAT, tensors["weight"], layout.unpack_codes, shape)
        return QuantizedTensor(problem.scheme.weights, codes, tensors["scales"])

    def block_format(self, prepared: Prepared) -> BlockFormat:
        """What the prepared weight's blocks hold."""
        return layout.FORMAT

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.run_quantized(self.quantize(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        from halfbyte.kernels.hopper.w4a8_fp8_scales import w4a8_fp8_scales_linear

        tensors, dtype = prepared.tensors, prepared.problem.dtype
        if bias is not None:
            bias = bias.to(dtype)
        return w4a8_fp8_scales_linear(
            inputs.codes, inputs.scales, tensors["weight"], tensors["channels"], bias, dtype
        )
