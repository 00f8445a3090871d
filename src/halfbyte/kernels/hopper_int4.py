"""INT4 weights on Hopper GPUs: exact group scales, symmetric or with zero points, any number of tokens."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.hopper import w4a8_codes, w4a16_codes
from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat, pack_blocks, unpack_blocks
from halfbyte.kernels.hopper.w4a8_scales import dead_groups, normalized
from halfbyte.kernels.hopper.workspace import reserve
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, QuantizedInputs, e4m3_sum_group
from halfbyte.kernels.triton.linear_conditions import (
    HALVES,
    gpu_conditions,
    has_known_groups,
    is_hopper,
    is_int4,
    name_of,
)

logger = logging.getLogger(__name__)


class _HopperInt4(ABC):
    """What the kernels share. A scale for a whole channel, or for more than 128 inputs, is repeated for every 128."""

    name: str

    @abstractmethod
    def _takes_activations(self, problem: LinearProblem) -> tuple[bool, str]:
        """Whether the scheme's activations are the kernel's, and what those are."""

    @abstractmethod
    def _format(self, problem: LinearProblem, is_normalized: bool, zero_points: bool) -> BlockFormat:
        """What blocks hold."""

    @abstractmethod
    def _pack(self, problem: LinearProblem, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """The blocks, "weight", and what goes with them. q: a scale and zero point for each of the kernel's groups."""

    @abstractmethod
    def _unpack(
        self, prepared: Prepared, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scales and zero points."""

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield is_int4(weights), "weights must be INT4 with one level of floating-point scales"
        yield has_known_groups(weights), "groups must be of 32, 64 or a multiple of 128 inputs"
        yield self._takes_activations(problem)
        yield problem.dtype in HALVES, f"inputs must be bfloat16 or float16, not {name_of(problem.dtype)}"
        yield (
            problem.out_features % 16 == 0 and problem.in_features % 64 == 0,
            f"the weight must be a multiple of 16 x 64, not {problem.out_features} x {problem.in_features}",
        )
        yield from gpu_conditions(problem, (9, 0))
        yield (
            is_hopper(problem),
            "is made of Hopper's own instructions (compute capability 9.0)",
        )
        yield has_bindings(), "needs the package cuda-bindings, which torch for CUDA brings"

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        repeats, groups = _repeats(problem), -(-problem.in_features // e4m3_sum_group(problem.scheme))

        def repeated(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(repeats, 1)[:, :groups]

        zeros = None if q.zero_points is None else repeated(q.zero_points)
        tensors = self._pack(problem, QuantizedTensor(q.format, q.codes, repeated(q.scales), zeros))
        device = tensors["weight"].device
        # A layer's first blocks are read before the kernel ahead of it has ended, and that one may be the packing.
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
            reserve(device.index)
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, repeats = prepared.problem, _repeats(prepared.problem)
        shape = (problem.out_features, problem.in_features)
        codes, scales, zeros = self._unpack(prepared, shape)
        return QuantizedTensor(
            problem.scheme.weights,
            codes,
            scales[:, ::repeats].contiguous(),
            None if zeros is None else zeros[:, ::repeats].contiguous(),
        )

    def block_format(self, prepared: Prepared) -> BlockFormat:
        """What the prepared weight's blocks hold."""
        is_normalized = "row_factors" in prepared.tensors
        with_zeros = self._format(prepared.problem, is_normalized, True)
        if prepared.tensors["weight"].shape[2] == with_zeros.nbytes:
            return with_zeros
        return self._format(prepared.problem, is_normalized, False)


class HopperW4A8(QuantizesTokens, _HopperInt4):
    """E4M3 inputs with a dynamic scale per token, by ``hopper/sources/w4a8.cu``. Sums of many tokens are kept in fp16
    where results are bf16 and scales allow it, in fp32 elsewhere.
    """

    name = "hopper-w4a8"
    fp16_sums = True

    def _normalized(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """In fp16 with factors, or none where they are kept in fp32."""
        return normalized(scales)

    def _takes_activations(self, problem: LinearProblem) -> tuple[bool, str]:
        return problem.scheme.activations == FP8_TOKEN, "inputs must be E4M3 with a dynamic scale per token"

    def _format(self, problem: LinearProblem, is_normalized: bool, zero_points: bool) -> BlockFormat:
        return w4a8_codes.block_format(e4m3_sum_group(problem.scheme), is_normalized, zero_points)

    def _pack(self, problem: LinearProblem, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        tensors, held = {}, self._normalized(q.scales)
        if held is None:
            dead = dead_groups(q.codes, e4m3_sum_group(problem.scheme), q.zero_points)
            held = self._normalized(q.scales.flatten().index_fill(0, dead, 0).view(q.scales.shape))
            if held is not None:
                tensors = {"dead_groups": dead, "dead_scales": q.scales.flatten()[dead]}
        if held is not None:
            tensors["row_factors"] = held[1]
        elif self.fp16_sums and q.zero_points is None:
            logger.info(
                "%s: a weight %d x %d keeps fp32 sums: fp16 does not hold its scales",
                self.name,
                *q.codes.shape,
            )
        scales = q.scales.float() if held is None else held[0]
        zeros = None if q.zero_points is None else w4a8_codes.pack_zeros(q.zero_points)
        fmt = self._format(problem, held is not None, zeros is not None)
        return {"weight": pack_blocks(fmt, q.codes, w4a8_codes.pack_codes, scales, zeros), **tensors}

    def _unpack(
        self, prepared: Prepared, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        fmt, tensors = self.block_format(prepared), prepared.tensors
        codes, scales, zeros = unpack_blocks(fmt, tensors["weight"], w4a8_codes.unpack_codes, shape)
        assert scales is not None
        if "row_factors" in tensors:
            scales = scales.float() * tensors["row_factors"][:, None]
        scales = scales.to(FLOAT_SCALE_DTYPES[prepared.problem.scheme.weights.scale])
        if "dead_groups" in tensors:
            scales.view(-1)[tensors["dead_groups"]] = tensors["dead_scales"]
        return codes, scales, None if zeros is None else w4a8_codes.unpack_zeros(zeros)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.run_quantized(self.quantize(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        from halfbyte.kernels.hopper.w4a8 import w4a8_linear

        problem, fmt = prepared.problem, self.block_format(prepared)
        return w4a8_linear(
            *inputs,
            prepared.tensors["weight"],
            prepared.tensors.get("row_factors"),
            None if bias is None else bias.to(problem.dtype),
            problem.out_features,
            fmt.group_size,
            fmt.zeros is not None,
            self.fp16_sums,
            problem.dtype,
        )


class HopperW4A8Fp32Sums(HopperW4A8):
    """The same with all sums in fp32. Listed behind it: it runs only by name."""

    name = "hopper-w4a8-fp32-sums"
    fp16_sums = False


class HopperW4A8Fp32Scales(HopperW4A8Fp32Sums):
    """The same with all scales in fp32, as experts have them of which one needs it."""

    def _normalized(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None


class HopperW4A16(_HopperInt4):
    """BF16 or FP16 inputs, by ``hopper/sources/w4a16.cu``."""

    name = "hopper-w4a16"

    def _takes_activations(self, problem: LinearProblem) -> tuple[bool, str]:
        return problem.scheme.activations is None, "inputs must be plain"

    def _format(self, problem: LinearProblem, is_normalized: bool, zero_points: bool) -> BlockFormat:
        scale = FLOAT_SCALE_DTYPES[problem.scheme.weights.scale]
        return BlockFormat(e4m3_sum_group(problem.scheme), scale, problem.dtype if zero_points else None)

    def _pack(self, problem: LinearProblem, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        fmt, zeros = self._format(problem, False, q.zero_points is not None), None
        if q.zero_points is not None and fmt.zeros is not None:
            zeros = w4a16_codes.pack_zeros(q.zero_points, fmt.zeros)
        return {"weight": pack_blocks(fmt, q.codes, w4a16_codes.pack_codes, q.scales, zeros)}

    def _unpack(
        self, prepared: Prepared, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        fmt, weight = self.block_format(prepared), prepared.tensors["weight"]
        codes, scales, zeros = unpack_blocks(fmt, weight, w4a16_codes.unpack_codes, shape)
        assert scales is not None
        return codes, scales, None if zeros is None else w4a16_codes.unpack_zeros(zeros)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        from halfbyte.kernels.hopper.w4a16 import w4a16_linear

        fmt = self.block_format(prepared)
        return w4a16_linear(
            x.contiguous(),
            prepared.tensors["weight"],
            None if bias is None else bias.to(x.dtype),
            prepared.problem.out_features,
            fmt.group_size,
            fmt.scale,
            fmt.zeros is not None,
        )


def _repeats(problem: LinearProblem) -> int:
    """For how many of the kernel's groups one of the weight's scales counts."""
    size = problem.scheme.weights.group_size or -(-problem.in_features // INPUTS) * INPUTS
    return max(size // INPUTS, 1)


def has_bindings() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
