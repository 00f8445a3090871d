"""Linear layers on any NVIDIA GPU with the tensor cores for them, by Triton.

Importing this needs no Triton: the kernels are imported when a layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import QuantizedInputs
from halfbyte.kernels.triton import linear_layout as layout
from halfbyte.kernels.triton.linear_conditions import (
    HALVES,
    LARGEST_INT8_K,
    gpu_conditions,
    has_known_groups,
    is_blocks,
    is_coarse,
    is_int4,
    is_simple,
    is_two_level,
    name_of,
)


class TritonW4A16:
    """INT4 weights and plain BF16 or FP16 inputs."""

    name = "triton-w4a16"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield is_int4(weights), "weights must be INT4 with one level of floating-point scales"
        yield has_known_groups(weights), "groups must be of 32, 64 or a multiple of 128 inputs"
        yield problem.scheme.activations is None, "inputs must be plain"
        yield problem.dtype in HALVES, f"inputs must be bfloat16 or float16, not {name_of(problem.dtype)}"
        yield from gpu_conditions(problem, (8, 0))

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        tensors = {
            "codes": layout.pack_spans(layout.encode_offset(q.codes), 128, parts=4, filler=8),
            "scales": q.scales.T.contiguous(),
        }
        if q.zero_points is not None:
            tensors["zeros"] = q.zero_points.T.to(torch.int16).contiguous()
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, tensors = prepared.problem, prepared.tensors
        nibbles = layout.unpack_spans(tensors["codes"], problem.in_features)
        zeros = tensors.get("zeros")
        return QuantizedTensor(
            problem.scheme.weights,
            layout.decode_offset(nibbles),
            tensors["scales"].T.contiguous(),
            None if zeros is None else zeros.T.to(torch.int8).contiguous(),
        )

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        from halfbyte.kernels.triton.linear_w4a16 import w4a16

        t = prepared.tensors
        return w4a16(x, t["codes"], t["scales"], t.get("zeros"), bias, _group_size(prepared.problem))


class TritonW4A8(QuantizesTokens):
    """INT4 weights and E4M3 or INT8 inputs; with INT8 also QoQ's two levels of scales."""

    name = "triton-w4a8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights, activations = problem.scheme.weights, problem.scheme.activations
        integers = is_two_level(weights)
        yield (
            is_int4(weights) or integers,
            "weights must be INT4 with floating-point scales, or integer scales and one per channel",
        )
        yield has_known_groups(weights), "groups must be of 32, 64 or a multiple of 128 inputs"
        yield (
            is_simple(activations, "int8") or (is_simple(activations, "e4m3") and not integers),
            f"inputs must be {'' if integers else 'E4M3 or '}INT8 with a scale per token or tensor",
        )
        assert activations is not None
        yield (
            not integers or problem.in_features <= LARGEST_INT8_K,
            f"in_features must be at most {LARGEST_INT8_K}: int32 sums",
        )
        yield from gpu_conditions(problem, (8, 0) if activations.element == "int8" else (8, 9))

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        """Errors: two-level weights outside of INT8, which no writer that follows QoQ makes."""
        if is_two_level(q.format):
            refuse_beyond_int8(q)
        span = layout.byte_span(_group_size(problem))
        if _by_magnitude(problem):
            codes = layout.pack_spans(layout.encode_magnitude(q.codes), span, parts=2, filler=0)
        else:
            codes = layout.pack_spans(layout.encode_offset(q.codes), span, parts=2, filler=8)
        tensors = {"codes": codes, "scales": q.scales.T.contiguous()}
        if q.zero_points is not None:
            tensors["zeros"] = q.zero_points.T.contiguous()
        if q.outer_scales is not None:
            tensors["outer"] = q.outer_scales.contiguous()
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, tensors = prepared.problem, prepared.tensors
        nibbles = layout.unpack_spans(tensors["codes"], problem.in_features)
        decode = layout.decode_magnitude if _by_magnitude(problem) else layout.decode_offset
        zeros = tensors.get("zeros")
        return QuantizedTensor(
            problem.scheme.weights,
            decode(nibbles),
            tensors["scales"].T.contiguous(),
            None if zeros is None else zeros.T.contiguous(),
            tensors.get("outer"),
        )

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(*_quantized(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(inputs.codes, inputs.scales, prepared, bias)

    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None
    ) -> torch.Tensor:
        from halfbyte.kernels.triton.linear_w4a8 import w4a8

        t, problem = prepared.tensors, prepared.problem
        return w4a8(
            codes,
            scale,
            t["codes"],
            t["scales"],
            t.get("zeros"),
            t.get("outer"),
            bias,
            _group_size(problem),
            problem.dtype,
        )


class _EightBits(QuantizesTokens):
    """Weights that stay as they are stored."""

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        # Rows are padded to a multiple of 16 bytes, so that all of them can be read 16 bytes at a time.
        codes = q.codes.contiguous()
        if spare := -codes.shape[1] % 16:
            padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, spare))
            codes = padded.view(codes.dtype)
        return Prepared(problem, {"codes": codes, "scales": q.scales.contiguous()}, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem, codes = prepared.problem, prepared.tensors["codes"]
        inside = codes.view(torch.uint8)[:, : problem.in_features].contiguous().view(codes.dtype)
        return QuantizedTensor(problem.scheme.weights, inside, prepared.tensors["scales"])

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        if prepared.problem.scheme.activations is None:
            return self._multiply(x, None, prepared, bias)
        return self._multiply(*_quantized(x, prepared), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(inputs.codes, inputs.scales, prepared, bias)

    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor | None, prepared: Prepared, bias: torch.Tensor | None
    ) -> torch.Tensor:
        from halfbyte.kernels.triton.linear_w8 import w8

        t, problem = prepared.tensors, prepared.problem
        blocks = is_blocks(problem.scheme.weights)
        return w8(codes, scale, t["codes"], t["scales"], bias, blocks, problem.dtype)


class TritonInt8(_EightBits):
    """Symmetric INT8 weights with a scale per channel or tensor; INT8 inputs, or plain BF16 or FP16."""

    name = "triton-int8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights, activations = problem.scheme.weights, problem.scheme.activations
        yield (
            weights.element == "int8" and weights.symmetric and is_coarse(weights),
            "weights must be symmetric INT8 with a scale per channel or tensor",
        )
        yield (
            activations is None or is_simple(activations, "int8"),
            "inputs must be plain, or INT8 with a scale per token or tensor",
        )
        yield (
            activations is not None or problem.dtype in HALVES,
            f"plain inputs must be bfloat16 or float16, not {name_of(problem.dtype)}",
        )
        yield (
            activations is None or problem.in_features <= LARGEST_INT8_K,
            f"in_features must be at most {LARGEST_INT8_K}: int32 sums",
        )
        yield from gpu_conditions(problem, (8, 0))


class TritonFp8(_EightBits):
    """E4M3 weights and inputs: one scale per channel or tensor, or per 128 x 128 weights and 128 inputs."""

    name = "triton-fp8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights, activations = problem.scheme.weights, problem.scheme.activations
        blocks = is_blocks(weights)
        yield (
            weights.element == "e4m3" and (is_coarse(weights) or blocks),
            "weights must be E4M3 with a scale per channel, tensor or block of 128 x 128",
        )
        if blocks:
            yield (
                activations is not None
                and (activations.element, activations.granularity) == ("e4m3", "group")
                and (activations.group_size, activations.scale) == (128, "f32"),
                "inputs must be E4M3 with a scale for 128 of them, as weights in blocks are",
            )
            yield problem.in_features % 128 == 0, "in_features must be a multiple of 128"
        else:
            yield is_simple(activations, "e4m3"), "inputs must be E4M3 with a scale per token or tensor"
        yield from gpu_conditions(problem, (8, 9))


def _quantized(x: torch.Tensor, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs' codes and scales, as the scheme wants them."""
    from halfbyte.kernels.triton.linear_inputs import quantized_inputs

    activations = prepared.problem.scheme.activations
    assert activations is not None
    return quantized_inputs(x, activations, prepared.input_scale)


def refuse_beyond_int8(q: QuantizedTensor) -> None:
    values = q.codes.to(torch.int16).unflatten(-1, (q.scales.shape[-1], -1))
    if q.zero_points is not None:
        values -= q.zero_points.unsqueeze(-1)
    values *= q.scales.unsqueeze(-1)
    low, high = (int(value) for value in values.aminmax())
    if low < -128 or high > 127:
        raise HalfbyteError(
            f"two-level INT4 weights hold values in [{low}, {high}], outside of [-128, 127]; the file is "
            "damaged or was written by other rules"
        )


def _group_size(problem: LinearProblem) -> int:
    """Inputs to a scale; a channel counts as one group that is filled up."""
    return problem.scheme.weights.group_size or -(-problem.in_features // 128) * 128


def _by_magnitude(problem: LinearProblem) -> bool:
    """Whether the codes lie in the form that becomes E4M3 with the fewest operations."""
    activations = problem.scheme.activations
    return problem.scheme.weights.symmetric and activations is not None and activations.element == "e4m3"
