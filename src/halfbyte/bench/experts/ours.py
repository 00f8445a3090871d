"""halfbyte's grouped kernels, and torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from halfbyte.bench.experts.contender import Contender, Loaded
from halfbyte.bench.experts.operands import Routing, Stack
from halfbyte.bench.kernels.contender import MissingError
from halfbyte.bench.kernels.operands import second_level_cache
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.hopper_experts import HopperExperts, PreparedExperts, experts_of
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.registry import kernel_named
from halfbyte.kernels.routes import tile_heights
from halfbyte.schemes import PRESETS

_FP8 = ActivationFormat("e4m3", "token")
# Few tokens touch few experts, which are others each time: so many caches' worth of all experts is never seen twice.
_CACHES = 12
_MOST_COPIES = 4


OURS = {
    "hopper-w4a8": "w4a8",
    "hopper-w4a8-fp8-scales": "w4a8",
    "hopper-w4a8-int8": "w4a8-int8",
    "hopper-w4a16": "w4a16",
    "hopper-fp8": "fp8",
}
"""Kernels and the presets that they are timed with."""


def contenders() -> list[Contender]:
    return [
        *(Contender(name, scheme, partial(_product, name, scheme)) for name, scheme in OURS.items()),
        Contender("torch-fp8-rowwise", "fp8", _torch_fp8),
        Contender("torch-bf16", "bf16", _torch_bf16),
    ]


def copies_of(tensors: Sequence[torch.Tensor | None], cache: int) -> list[tuple[torch.Tensor | None, ...]]:
    """All experts' tensors, and copies of them to take turns with a cache of that many bytes."""
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    count = max(2, min(_MOST_COPIES, -(-_CACHES * cache // nbytes)))
    first = tuple(tensors)
    return [first, *(tuple(None if t is None else t.clone() for t in first) for _ in range(count - 1))]


def _product(name: str, scheme: str, stack: Stack) -> Loaded:
    return hopper(name, scheme, stack)[0]


@dataclass(frozen=True)
class Grouped:
    """All experts' weights in the form of a grouped kernel. names: of the tensors that it reads."""

    kernel: HopperExperts
    prepared: PreparedExperts
    names: tuple[str, ...]


def hopper(name: str, scheme_name: str, stack: Stack) -> tuple[Loaded, Grouped]:
    """halfbyte's kernel of that name, for experts of a preset. Errors: MissingError."""
    from halfbyte.kernels.hopper.routes import expert_routes

    kernel, linear, preset = experts_of(name), kernel_named(name), PRESETS[scheme_name]
    assert kernel is not None
    fmt = preset.weights if preset.weights.scale == "int8" else preset.weights.with_scale("bf16")
    scheme = replace(preset, weights=fmt)
    problem = LinearProblem(scheme, *stack.shape, stack.device, torch.bfloat16)
    able, reason = linear.can_implement(problem)
    if not able:
        raise MissingError(reason)
    experts = stack.quantized(fmt)
    prepared = kernel.stack([linear.prepare(q, problem) for q in experts])
    names = tuple(prepared.stacked)
    copies = copies_of(tuple(prepared.stacked.values()), second_level_cache(stack.device))

    def feed(routing: Routing) -> Any:
        tokens, top_k = routing.ids.shape
        heights = tile_heights(tokens, top_k, routing.experts)
        rows = kernel.rows(routing.rows, prepared)
        return rows, expert_routes(routing.ids, routing.experts, heights), heights

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        rows, routes, heights = fed
        of_copy = replace(prepared, stacked=dict(zip(names, copy, strict=True)))
        return kernel.run(rows, of_copy, routes, heights)

    nbytes = sum(tensor.nbytes for tensor in prepared.stacked.values())
    loaded = Loaded(experts, scheme.activations, copies, nbytes, feed, call)
    return loaded, Grouped(kernel, prepared, names)


def _torch_fp8(stack: Stack) -> Loaded:
    experts = stack.quantized(TensorFormat("e4m3", "channel", scale="f32"))
    codes = torch.stack([q.codes for q in experts])
    scales = torch.stack([q.scales.flatten() for q in experts])

    def feed(routing: Routing) -> Any:
        inputs, of_tokens = quantize_activations(routing.rows, _FP8)
        return inputs, of_tokens.flatten(), routing.counts.cumsum(0).to(torch.int32)

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        inputs, of_tokens, ends = fed
        return torch._scaled_grouped_mm(
            inputs, copy[0].transpose(-2, -1), of_tokens, scales, offs=ends, out_dtype=torch.bfloat16
        )

    return Loaded(
        experts, _FP8, copies_of((codes,), second_level_cache(stack.device)), codes.nbytes, feed, call
    )


def _torch_bf16(stack: Stack) -> Loaded:
    experts = stack.plain()
    weights = torch.stack(experts)

    def feed(routing: Routing) -> Any:
        return routing.rows, routing.counts.cumsum(0).to(torch.int32)

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        rows, ends = fed
        return torch._grouped_mm(rows, copy[0].transpose(-2, -1), offs=ends)

    return Loaded(
        experts, None, copies_of((weights,), second_level_cache(stack.device)), weights.nbytes, feed, call
    )
