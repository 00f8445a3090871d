"""All experts of a mixture at once, on a GPU whose kernels take several weights in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.kernels.fused import combined
from halfbyte.kernels.hopper_experts import HopperExperts, PreparedExperts, experts_of
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.routes import MOST_EXPERTS, tile_heights
from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, cannot_merge


@dataclass(frozen=True)
class Products:
    """Both products of all experts, and what lies between them. kernels: the grouped form of each. biases: ``[experts,
    out]`` in the order of the kernels' output features: all of the gate, all of what it gates.
    """

    first_kernel: HopperExperts
    first: PreparedExperts
    last_kernel: HopperExperts
    last: PreparedExperts
    gate: ExpertGate
    first_bias: torch.Tensor | None = None
    last_bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` through the experts ``ids [T, k]``, whose outputs times ``shares [T, k]`` are summed in fp32.

        A number that is no expert adds nothing, nor does an expert that a token has had before. No synchronisation, the
        same bits every time.
        """
        from halfbyte.kernels.hopper.routes import expert_routes

        (tokens, top_k), experts = ids.shape, len(self.first.experts)
        heights = tile_heights(tokens, top_k, experts)
        routes = expert_routes(ids.contiguous(), experts, heights)
        rows = self.first_kernel.route(x, self.first, routes)
        inner = self.first_kernel.run(rows, self.first, routes, heights, self.first_bias)
        outer = self.last_kernel.run(self._gated(inner), self.last, routes, heights, self.last_bias)
        return combined(outer, routes, shares)

    def _gated(self, inner: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.gate.activation is not None:
            of_gate, up = inner.chunk(2, -1)
            return self.last_kernel.gated_rows(of_gate, up, self.gate.activation, self.last)
        if self.gate.interleaved:
            inner = torch.stack(inner.chunk(2, -1), -1).flatten(-2)
        return self.last_kernel.rows(self.gate.combine(inner), self.last)


class GroupedExperts(nn.Module):
    """What an expert does with one token, done for all experts and tokens by two matrix products.

    The experts' layers keep their names and go on running by themselves. Their weights are the ones in the form of
    which this module is made, not copies: ``state_dict`` reads them back from it.
    """

    def __init__(
        self, firsts: Sequence[Sequence[QuantLinear]], lasts: Sequence[QuantLinear], gate: ExpertGate
    ) -> None:
        """firsts: each expert's gate and up projection, or up alone. lasts: its down projections. All are placed on one
        device for one dtype, and :func:`cannot_group` has nothing against them.
        """
        super().__init__()
        merged = [MergedLinear(parts, _name(parts)) if len(parts) > 1 else parts[0] for parts in firsts]
        # Here they are only kept for what they lend; a single projection is a module of its expert already.
        self._merged = nn.ModuleList(layer for layer in merged if isinstance(layer, MergedLinear))
        first, last = _stack(merged), _stack(lasts)
        self.products = Products(*first, *last, gate, *_biases(gate, first[1].problem))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See :class:`Products`."""
        return self.products(x, ids, shares)

    def _save_to_state_dict(self, *args: Any) -> None:
        """Nothing: the experts save themselves."""


def cannot_group(firsts: Sequence[Sequence[QuantLinear]], lasts: Sequence[QuantLinear]) -> str:
    """Why experts cannot run at once (empty if they can): kernels that take one weight, or differ; too many."""
    if len(lasts) > MOST_EXPERTS:
        return f"there are {len(lasts)}; at most {MOST_EXPERTS} run at once"
    for parts in firsts:
        if len(parts) > 1 and (reason := cannot_merge(parts)):
            return reason
    for layers in ([part for parts in firsts for part in parts], lasts):
        kernels = {layer.kernel for layer in layers}
        if len(kernels) > 1:
            return f"they run on {', '.join(sorted(map(str, kernels)))}"
        if any(layer.problem != layers[0].problem for layer in layers):
            return "their schemes or shapes differ"
        if experts_of(str(layers[0].kernel)) is None:
            return f"{layers[0].kernel} takes one weight"
    return ""


def _stack(layers: Sequence[QuantLinear]) -> tuple[HopperExperts, PreparedExperts]:
    kernel = experts_of(str(layers[0].kernel))
    assert kernel is not None
    with torch.inference_mode(False), torch.no_grad():
        stacked = kernel.stack([layer.prepared for layer in layers])
    for layer, prepared in zip(layers, stacked.experts, strict=True):
        layer.adopt(prepared)
    return kernel, stacked


def _biases(gate: ExpertGate, problem: LinearProblem) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    up, down = (
        None if bias is None else bias.detach().to(problem.device, problem.dtype).contiguous()
        for bias in (gate.up_bias, gate.down_bias)
    )
    if up is not None and gate.interleaved:
        up = torch.cat([up[:, ::2], up[:, 1::2]], 1)
    return up, down


def _name(parts: Sequence[QuantLinear]) -> str:
    return f"{parts[0].name} and its partners"
