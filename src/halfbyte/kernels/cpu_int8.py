"""INT8 inputs on the CPU: exact integer sums by ``torch._int_mm``, scales afterwards.

Takes INT8 weights with a scale per channel (or tensor), and QoQ's two levels: their groups become INT8 again
by integer arithmetic, a strip of rows at a time, so the weight stays at half a byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import scale_values
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.inputs import finish
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.storage import compact, expand, strips

# 128 * 127 * this many products is the most that an int32 sum is sure to hold.
_LARGEST_K = (2**31 - 1) // (128 * 127)


class CpuInt8:
    """W8A8 and W4A8 in INT8, any shape and dtype: sums are exact integers, rounded to fp32 once."""

    name = "cpu-int8"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        weights, activations = problem.scheme.weights, problem.scheme.activations
        return first_refusal(
            (
                (problem.device.type == "cpu", f"runs on the CPU, not on {problem.device.type}"),
                (_is_int8(activations), "inputs must be INT8 with a scale per token or tensor"),
                (
                    _is_two_level(weights) or _is_plain(weights),
                    "weights must be symmetric INT8 per channel or tensor, or INT4 with integer scales",
                ),
                (problem.in_features <= _LARGEST_K, f"in_features must be at most {_LARGEST_K}: int32 sums"),
            )
        )

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        """Errors: two-level groups that leave INT8, which no writer that follows QoQ makes."""
        prepared = Prepared(problem, compact(q), input_scale)
        if not _is_plain(q.format):
            for rows, groups in _level_one(prepared, torch.int16):
                if bool(((groups < -128) | (groups > 127)).any()):
                    raise HalfbyteError(
                        f"rows {rows.start} to {rows.stop - 1} of two-level INT4 weights hold values outside "
                        "of [-128, 127]; the file is damaged or was written by other rules"
                    )
        return prepared

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        problem = prepared.problem
        return expand(prepared.tensors, problem.scheme.weights, problem.in_features)

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        problem, tensors = prepared.problem, prepared.tensors
        assert problem.scheme.activations is not None
        codes, scales = quantize_activations(x, problem.scheme.activations, prepared.input_scale)
        sums = torch.empty(x.shape[0], problem.out_features, device=x.device)
        if x.shape[0]:
            for rows, strip in _int8_strips(prepared):
                sums[:, rows] = torch._int_mm(codes, strip.T)
        if "outer" in tensors:
            sums.mul_(tensors["outer"].T)
        else:
            sums.mul_(scale_values(tensors["scales"]).T)
        return finish(sums, scales, bias, x.dtype)


def _int8_strips(prepared: Prepared) -> Iterator[tuple[slice, torch.Tensor]]:
    problem = prepared.problem
    if _is_plain(problem.scheme.weights):
        yield slice(0, problem.out_features), prepared.tensors["codes"]
        return
    yield from _level_one(prepared, torch.int8)


def _level_one(prepared: Prepared, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """``(code - zero) * scale`` of two-level weights, strip by strip, computed in ``dtype``."""
    problem = prepared.problem
    fmt, inputs = problem.scheme.weights, problem.in_features
    for rows, tensors in strips(prepared.tensors, fmt, inputs):
        strip = expand(tensors, fmt, inputs)
        assert strip.zero_points is not None
        groups = strip.codes.to(dtype).unflatten(-1, (strip.scales.shape[-1], -1))
        centred = groups - strip.zero_points.unsqueeze(-1)
        yield rows, centred.mul_(strip.scales.unsqueeze(-1)).flatten(-2)


def _is_int8(activations: ActivationFormat | None) -> bool:
    return (
        activations is not None
        and activations.element == "int8"
        and activations.granularity in ("token", "tensor")
    )


def _is_plain(weights: TensorFormat) -> bool:
    return (
        weights.element == "int8"
        and weights.granularity in ("channel", "tensor")
        and weights.symmetric
        and weights.outer is None
    )


def _is_two_level(weights: TensorFormat) -> bool:
    return weights.element == "int4" and weights.scale == "int8" and weights.outer == "channel"
