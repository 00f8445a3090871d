"""What comes before a layer, in one piece with the quantization of the layer's inputs: on the GPU one kernel each.

Off the GPU it is said in torch, which is also the definition: norms and gates round to the inputs' dtype after each
step, as transformers' modules do (but for a norm with quantization, which does not round before that), and codes and
scales are those of :mod:`halfbyte.formats.activations`. All inputs are rows ``[M, K]``.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from halfbyte.formats.activations import quantize_activations
from halfbyte.kernels.problem import Prepared
from halfbyte.kernels.quantized_inputs import (
    FP8_TOKEN,
    INT8_TOKEN,
    QuantizedInputs,
    sum_group,
    sums_pitch,
)
from halfbyte.kernels.routes import Routes

# Names of activations in transformers' configs that the kernels have, by what the kernels call them.
GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What the kernels take.
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def ops_for(*inputs: torch.Tensor) -> Any:
    """``torch.ops.halfbyte`` if they are on a GPU and of one dtype that the kernels take; none otherwise."""
    first = inputs[0]
    if not first.is_cuda or first.dtype not in DTYPES or any(x.dtype != first.dtype for x in inputs):
        return None
    return triton_ops()


@cache
def triton_ops() -> Any:
    """``torch.ops.halfbyte`` with the portable kernels in it; none where there is no Triton."""
    try:
        for module in ("activations", "decode_attention", "experts", "feedback", "norms", "rotary"):
            importlib.import_module(f"halfbyte.kernels.triton.{module}")
    except ImportError:
        return None
    return torch.ops.halfbyte


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight * n(s)`` and ``s = x + residual`` (``x`` itself without one): n divides a row by its RMS, in fp32."""
    if ops := ops_for(x, weight):
        if residual is None:
            return ops.rms_norm(x, weight, eps), x
        return ops.add_rms_norm(x, residual, weight, eps)
    total = x if residual is None else x + residual
    values = total.float()
    return weight * (values * _inverse_rms(values, eps)).to(total.dtype), total


def rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, group: int | None
) -> tuple[QuantizedInputs, torch.Tensor]:
    """RMSNorm of ``x + residual``, quantized, and the sum. group: see :func:`quantize`.

    Unlike :func:`rms_norm`, values are not rounded in between: the RMS, by which a row is divided, goes into its scale.
    """
    if ops := ops_for(x, weight):
        kind, groups = _kind(group)
        if residual is None:
            return QuantizedInputs(*getattr(ops, f"rms_norm_quantize_{kind}")(x, weight, eps, *groups)), x
        op = getattr(ops, f"add_rms_norm_quantize_{kind}")
        *quantized, total = op(x, residual, weight, eps, *groups)
        return QuantizedInputs(*quantized), total
    total = x if residual is None else x + residual
    values = total.float()
    inputs = quantize(values * weight.float(), group)
    return inputs._replace(scales=inputs.scales * _inverse_rms(values, eps)), total


def _inverse_rms(values: torch.Tensor, eps: float) -> torch.Tensor:
    """``[M, 1]``, by which rows ``[M, K]`` in fp32 are multiplied."""
    return torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(gate) * up``; a value of ``GATES``."""
    if ops := ops_for(gate, up):
        return getattr(ops, f"{activation}_and_mul")(gate, up)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def gated_quantize(
    gate: torch.Tensor, up: torch.Tensor, activation: str, group: int | None
) -> QuantizedInputs:
    """:func:`gated`, quantized. group: see :func:`quantize`."""
    if ops := ops_for(gate, up):
        kind, groups = _kind(group)
        return QuantizedInputs(*getattr(ops, f"{activation}_and_mul_quantize_{kind}")(gate, up, *groups))
    return quantize(gated(gate, up, activation), group)


def routed_rows(x: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Tokens ``[M, K]`` as the rows ``[R, K]`` of ``routes``. What rows of nobody hold is not said."""
    if ops := ops_for(x):
        return ops.route_rows(x, routes.place)
    return x[routes.origin.clamp(min=0) // routes.place.shape[1]]


def routed_inputs(x: torch.Tensor, routes: Routes, group: int | None) -> QuantizedInputs:
    """:func:`routed_rows`, quantized. group: see :func:`quantize`."""
    if ops := ops_for(x):
        kind, groups = _kind(group)
        return QuantizedInputs(*getattr(ops, f"route_quantize_{kind}")(x, routes.place, *groups))
    return quantize(routed_rows(x, routes), group)


def combined(rows: torch.Tensor, routes: Routes, shares: torch.Tensor) -> torch.Tensor:
    """``[M, K]``: each token's rows of ``[R, K]`` times its ``shares [M, top_k]``, added up in fp32."""
    if ops := ops_for(rows):
        return ops.combine_experts(rows, routes.place, shares)
    there = routes.place.ge(0)[..., None]
    values = torch.where(there, rows[routes.place.clamp(min=0)].float(), 0)
    return (values * shares.float()[..., None]).sum(1).to(rows.dtype)


def quantize(x: torch.Tensor, group: int | None) -> QuantizedInputs:
    """Rows in E4M3 with a scale each, and their sums over groups of ``group``; with none, in INT8 and over all."""
    if ops := ops_for(x):
        kind, sizes = _kind(group)
        return QuantizedInputs(*getattr(ops, f"quantize_{kind}_per_token")(x, *sizes))
    if group is None:
        codes, scales = quantize_activations(x, INT8_TOKEN)
        return QuantizedInputs(codes, scales, codes.sum(-1, keepdim=True, dtype=torch.int32))
    codes, scales = quantize_activations(x, FP8_TOKEN)
    groups = -(-codes.shape[1] // group)
    values = functional.pad(codes.float(), (0, sums_pitch(groups) * group - codes.shape[1]))
    return QuantizedInputs(codes, scales, values.unflatten(-1, (-1, group)).sum(-1)[:, :groups])


def _kind(group: int | None) -> tuple[str, tuple[int, ...]]:
    """What ops for such sums end with, and what they are told of the group."""
    return ("int8", ()) if group is None else ("fp8", (group,))


class QuantizesTokens:
    """A kernel's ``quantize``, where a token has one scale."""

    def quantize(self, x: torch.Tensor, prepared: Prepared) -> QuantizedInputs:
        """``[M, in]`` with the sums that this weight's groups need."""
        return quantize(x, sum_group(prepared.problem.scheme))
