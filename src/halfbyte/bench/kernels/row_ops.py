"""Norms, gated activations and quantization of rows: alone, and fused as they stand between two linear layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from halfbyte.bench.kernels.accuracy import NAN_BYTE, exact_inputs, poison, require_finite
from halfbyte.bench.kernels.contender import Contender, MissingError, Task
from halfbyte.bench.kernels.operands import Inputs
from halfbyte.bench.kernels.peers import Peers
from halfbyte.bench.kernels.timing import rotation
from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, INT8_TOKEN
from halfbyte.kernels.roofline import Work

_EPSILON = 1e-6
_SUMS_GROUP = 128
# Copies of a few rows would have to be tens of thousands to exceed the cache, and then only launches are timed.
_MOST_COPIES = 64

_Parts = Sequence[torch.Tensor]
"""Inputs ``[M, K]``: x; x and a residual; gate and up."""
_Exact = Callable[[_Parts, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _RowOp:
    """inputs: how many ``[M, K]``. quantizes: to what in the end, if at all. sums: whether the sum of x and a residual
    is a result too.

    exact: the result in float64, not quantized, from inputs and the norm's weight in float64. What is rounded to BF16
    on the way to codes is rounded here too; else many codes would differ by one.
    """

    inputs: int
    quantizes: ActivationFormat | None
    exact: _Exact
    sums: bool = False


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().double()


def _unchanged(parts: _Parts, weight: torch.Tensor) -> torch.Tensor:
    return parts[0]


def _over_rms(values: torch.Tensor) -> torch.Tensor:
    return values * (values.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()


def _normed(parts: _Parts, weight: torch.Tensor) -> torch.Tensor:
    return _bf16(_over_rms(parts[0])) * weight


def _normed_at_once(parts: _Parts, weight: torch.Tensor) -> torch.Tensor:
    return _over_rms(parts[0]) * weight


def _of_sum(normed: _Exact) -> _Exact:
    return lambda parts, weight: normed([_bf16(parts[0] + parts[1])], weight)


def _rounded(exact: _Exact) -> _Exact:
    return lambda parts, weight: _bf16(exact(parts, weight))


def _swiglu(parts: _Parts, weight: torch.Tensor) -> torch.Tensor:
    return _bf16(functional.silu(parts[0])) * parts[1]


def _geglu(parts: _Parts, weight: torch.Tensor) -> torch.Tensor:
    return _bf16(functional.gelu(parts[0], approximate="tanh")) * parts[1]


OPS = {
    "quantize_fp8_per_token": _RowOp(1, FP8_TOKEN, _unchanged),
    "quantize_int8_per_token": _RowOp(1, INT8_TOKEN, _unchanged),
    "rms_norm": _RowOp(1, None, _normed),
    "rms_norm_quantize_fp8": _RowOp(1, FP8_TOKEN, _normed_at_once),
    "rms_norm_quantize_int8": _RowOp(1, INT8_TOKEN, _normed_at_once),
    "add_rms_norm": _RowOp(2, None, _of_sum(_normed), sums=True),
    "add_rms_norm_quantize_fp8": _RowOp(2, FP8_TOKEN, _of_sum(_normed_at_once), sums=True),
    "add_rms_norm_quantize_int8": _RowOp(2, INT8_TOKEN, _of_sum(_normed_at_once), sums=True),
    "silu_and_mul": _RowOp(2, None, _swiglu),
    "silu_and_mul_quantize_fp8": _RowOp(2, FP8_TOKEN, _rounded(_swiglu)),
    "silu_and_mul_quantize_int8": _RowOp(2, INT8_TOKEN, _rounded(_swiglu)),
    "gelu_tanh_and_mul_quantize_fp8": _RowOp(2, FP8_TOKEN, _rounded(_geglu)),
    "gelu_tanh_and_mul_quantize_int8": _RowOp(2, INT8_TOKEN, _rounded(_geglu)),
}
_STORED = {FP8_TOKEN: torch.float8_e4m3fn, INT8_TOKEN: torch.int8, None: None}
_SCHEMES = {FP8_TOKEN: "fp8", INT8_TOKEN: "int8", None: "bf16"}

_Call = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""Of the inputs side by side, the norm's weight and room: the result, or codes and scales, and what comes with it."""


def contenders(peers: Peers) -> list[Contender]:
    """halfbyte's own, torch's one by one, and vLLM's."""
    found = []
    for name, (module, call) in _OURS.items():
        found.append(_contender("halfbyte", name, partial(_import, module), call))
    for name, call in _TORCH.items():
        found.append(_contender("torch-eager", name, lambda: None, call))
    for name, call in _VLLM.items():
        found.append(_contender("vllm-fused", name, peers.load_vllm, call))
    return found


def _contender(kernel: str, name: str, require: Callable[[], None], call: _Call) -> Contender:
    def load(inputs: Inputs) -> Callable[[int], Task]:
        require()
        return _tasks(inputs, OPS[name], call)

    return Contender(kernel, name, _SCHEMES[OPS[name].quantizes], None, "bf16", load)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingError(f"cannot be imported: {error}") from error


def _tasks(inputs: Inputs, op: _RowOp, call: _Call) -> Callable[[int], Task]:
    width = inputs.x.shape[1]
    beside = [inputs.random(*inputs.x.shape) for _ in range(op.inputs - 1)]
    weight = inputs.random(width)

    def task(rows: int) -> Task:
        first = torch.cat([inputs.x[:rows], *(each[:rows] for each in beside)], 1)
        more = min(_MOST_COPIES, rotation(first.nbytes, inputs.cache)) - 1
        copies = [first, *(first.clone() for _ in range(more))]
        values = torch.empty_like(inputs.x[:rows], dtype=_STORED[op.quantizes])
        room = (values, values.new_empty(rows, 1, dtype=torch.float32)) if op.quantizes else values
        calls = [partial(call, copy, weight, room) for copy in copies]

        def check() -> float:
            values.view(torch.uint8).fill_(NAN_BYTE)
            poison(values.nbytes, inputs.device)
            got = _values(calls[0](), op.quantizes is not None)
            require_finite(got, (rows, width))
            exact = op.exact([part.double() for part in first.chunk(op.inputs, 1)], weight.double())
            if op.quantizes:
                exact = exact_inputs(exact.float(), op.quantizes)
            return float((got - exact).norm() / exact.norm())

        return Task(calls, check, _work(op, rows, width))

    return task


def _values(result: Any, quantized: bool) -> torch.Tensor:
    """What a result means, float64."""
    if quantized:
        return result[0].double() * result[1].double()
    return (result[0] if isinstance(result, tuple) else result).double()


def _work(op: _RowOp, rows: int, width: int) -> Work:
    """16-bit inputs; 16-bit results, or codes of a byte with an fp32 scale. Sums over groups are left out."""
    output = width + 4 if op.quantizes else 2 * width
    wide = op.inputs + (1 if op.sums else 0)
    return Work(nbytes=rows * (2 * width * wide + output), operations=0)


_ACTIVATIONS, _NORMS = "halfbyte.kernels.triton.activations", "halfbyte.kernels.triton.norms"
_OURS: dict[str, tuple[str, _Call]] = {
    "quantize_fp8_per_token": (
        _ACTIVATIONS,
        lambda x, weight, room: torch.ops.halfbyte.quantize_fp8_per_token(x, _SUMS_GROUP),
    ),
    "quantize_int8_per_token": (
        _ACTIVATIONS,
        lambda x, weight, room: torch.ops.halfbyte.quantize_int8_per_token(x),
    ),
    "rms_norm": (_NORMS, lambda x, weight, room: torch.ops.halfbyte.rms_norm(x, weight, _EPSILON)),
    "rms_norm_quantize_int8": (
        _NORMS,
        lambda x, weight, room: torch.ops.halfbyte.rms_norm_quantize_int8(x, weight, _EPSILON),
    ),
    "add_rms_norm_quantize_int8": (
        _NORMS,
        lambda x, weight, room: torch.ops.halfbyte.add_rms_norm_quantize_int8(*_halves(x), weight, _EPSILON),
    ),
    "silu_and_mul_quantize_int8": (
        _ACTIVATIONS,
        lambda x, weight, room: torch.ops.halfbyte.silu_and_mul_quantize_int8(*_halves(x)),
    ),
    "gelu_tanh_and_mul_quantize_int8": (
        _ACTIVATIONS,
        lambda x, weight, room: torch.ops.halfbyte.gelu_tanh_and_mul_quantize_int8(*_halves(x)),
    ),
    "rms_norm_quantize_fp8": (
        _NORMS,
        lambda x, weight, room: torch.ops.halfbyte.rms_norm_quantize_fp8(x, weight, _EPSILON, _SUMS_GROUP),
    ),
    "add_rms_norm": (
        _NORMS,
        lambda x, weight, room: torch.ops.halfbyte.add_rms_norm(*_halves(x), weight, _EPSILON),
    ),
    "add_rms_norm_quantize_fp8": (
        _NORMS,
        lambda x, weight, room: torch.ops.halfbyte.add_rms_norm_quantize_fp8(
            *_halves(x), weight, _EPSILON, _SUMS_GROUP
        ),
    ),
    "silu_and_mul_quantize_fp8": (
        _ACTIVATIONS,
        lambda x, weight, room: torch.ops.halfbyte.silu_and_mul_quantize_fp8(*_halves(x), _SUMS_GROUP),
    ),
    "gelu_tanh_and_mul_quantize_fp8": (
        _ACTIVATIONS,
        lambda x, weight, room: torch.ops.halfbyte.gelu_tanh_and_mul_quantize_fp8(*_halves(x), _SUMS_GROUP),
    ),
}


def _halves(x: torch.Tensor) -> _Parts:
    return x.chunk(2, 1)


def _torch_norm(x: torch.Tensor, weight: torch.Tensor, room: Any) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, _EPSILON)


def _torch_sum_norm(x: torch.Tensor, weight: torch.Tensor, room: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, residual = _halves(x)
    total = values + residual
    return _torch_norm(total, weight, room), total


def _torch_swiglu(x: torch.Tensor, weight: torch.Tensor, room: Any) -> torch.Tensor:
    gate, up = _halves(x)
    return functional.silu(gate) * up


_TORCH: dict[str, _Call] = {
    "rms_norm": _torch_norm,
    "add_rms_norm": _torch_sum_norm,
    "silu_and_mul": _torch_swiglu,
}


def _vllm_quantize(x: torch.Tensor, weight: torch.Tensor, room: Any) -> Any:
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(room[0], x, room[1], None)
    return room


def _vllm_quantize_int8(x: torch.Tensor, weight: torch.Tensor, room: Any) -> Any:
    torch.ops._C.dynamic_scaled_int8_quant(room[0], x, room[1], None)
    return room


def _vllm_rms_norm(x: torch.Tensor, weight: torch.Tensor, room: Any) -> Any:
    torch.ops._C.rms_norm(room, x, weight, _EPSILON)
    return room


def _vllm_rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, room: Any) -> Any:
    torch.ops._C.rms_norm_dynamic_per_token_quant(room[0], x, weight, room[1], _EPSILON, None, None)
    return room


def _vllm_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, room: Any) -> Any:
    torch.ops._C.silu_and_mul(room, x)
    return room


_VLLM: dict[str, _Call] = {
    "quantize_fp8_per_token": _vllm_quantize,
    "quantize_int8_per_token": _vllm_quantize_int8,
    "rms_norm": _vllm_rms_norm,
    "rms_norm_quantize_fp8": _vllm_rms_norm_quantize,
    "rms_norm_quantize_int8": _vllm_rms_norm_quantize,
    "silu_and_mul": _vllm_silu_and_mul,
}
