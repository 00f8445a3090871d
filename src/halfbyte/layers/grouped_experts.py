"""All experts of a mixture at once, on a GPU whose kernels take several weights in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from halfbyte.kernels.fused import combined
from halfbyte.kernels.hopper_experts import HopperExperts, PreparedExperts, experts_of
from halfbyte.kernels.routes import Routes, tile_heights
from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, cannot_merge


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
        self._gate = gate
        merged = [MergedLinear(parts, _name(parts)) if len(parts) > 1 else parts[0] for parts in firsts]
        # Here they are only kept for what they lend; a single projection is a module of its expert already.
        self._merged = nn.ModuleList(layer for layer in merged if isinstance(layer, MergedLinear))
        self._first_kernel, self._first = _stack(merged)
        self._last_kernel, self._last = _stack(lasts)
        self._first_bias, self._last_bias = self._biases()

    @property
    def device(self) -> torch.device:
        return self._first.problem.device

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens and results."""
        return self._first.problem.dtype

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` through the experts ``ids [T, k]``, whose outputs times ``shares [T, k]`` are summed in fp32.

        A number that is no expert adds nothing, nor does an expert that a token has had before. No synchronisation, the
        same bits every time.
        """
        tokens, top_k = ids.shape
        heights = tile_heights(tokens, top_k, len(self._first.experts))
        routes = self._routes(ids, heights)
        rows = self._first_kernel.route(x, self._first, routes)
        inner = self._first_kernel.run(rows, self._first, routes, heights, self._first_bias)
        rows = self._gated(inner)
        outer = self._last_kernel.run(rows, self._last, routes, heights, self._last_bias)
        return combined(outer, routes, shares)

    def _routes(self, ids: torch.Tensor, heights: Sequence[int]) -> Routes:
        from halfbyte.kernels.hopper.routes import expert_routes

        return expert_routes(ids.contiguous(), len(self._first.experts), heights)

    def _gated(self, inner: torch.Tensor) -> Sequence[torch.Tensor]:
        gate, kernel = self._gate, self._last_kernel
        if gate.activation is not None:
            of_gate, up = inner.chunk(2, -1)
            return kernel.gated_rows(of_gate, up, gate.activation, self._last)
        if gate.interleaved:
            inner = torch.stack(inner.chunk(2, -1), -1).flatten(-2)
        return kernel.rows(gate.combine(inner), self._last)

    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """In the order of the kernels' output features: all of the gate, all of what it gates."""
        up, down = (
            None if bias is None else bias.detach().to(self.device, self.dtype).contiguous()
            for bias in (self._gate.up_bias, self._gate.down_bias)
        )
        if up is not None and self._gate.interleaved:
            up = torch.cat([up[:, ::2], up[:, 1::2]], 1)
        return up, down

    def _save_to_state_dict(self, *args: Any) -> None:
        """Nothing: the experts save themselves."""


def cannot_group(firsts: Sequence[Sequence[QuantLinear]], lasts: Sequence[QuantLinear]) -> str:
    """Why experts cannot run at once (empty if they can): kernels that take one weight, or differ."""
    for parts in firsts:
        if len(parts) > 1 and (reason := cannot_merge(parts)):
            return reason
    for layers in ([part for parts in firsts for part in parts], lasts):
        kernels = {layer.kernel for layer in layers}
        if len(kernels) > 1:
            return f"they run on {', '.join(sorted(map(str, kernels)))}"
        if experts_of(str(layers[0].kernel)) is None:
            return f"{layers[0].kernel} takes one weight"
        if any(layer.problem != layers[0].problem for layer in layers):
            return "their schemes or shapes differ"
    return ""


def _stack(layers: Sequence[QuantLinear]) -> tuple[HopperExperts, PreparedExperts]:
    kernel = experts_of(str(layers[0].kernel))
    assert kernel is not None
    with torch.inference_mode(False), torch.no_grad():
        stacked = kernel.stack([layer.prepared for layer in layers])
    for layer, prepared in zip(layers, stacked.experts, strict=True):
        layer.adopt(prepared)
    return kernel, stacked


def _name(parts: Sequence[QuantLinear]) -> str:
    return f"{parts[0].name} and its partners"
