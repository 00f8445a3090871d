"""A mixture's experts on quantized weights: all at once on a GPU that can, else one by one those that have tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.grouped_experts import GroupedExperts, cannot_group
from halfbyte.layers.linear import QuantLinear

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls an expert's projections; experts without a gate have no ``gate``."""

    gate: str | None
    up: str
    down: str

    @classmethod
    def among(cls, names: Sequence[str]) -> ExpertNames | None:
        """The convention that ``names`` follow; none if they follow none."""
        return next((known for known in _CONVENTIONS if set(names) == known.all), None)

    @property
    def all(self) -> set[str]:
        return {name for name in (self.gate, self.up, self.down) if name is not None}


_GROUPED = "halfbyte_grouped"
_CONVENTIONS = (
    ExpertNames("gate_proj", "up_proj", "down_proj"),
    ExpertNames("w1", "w3", "w2"),
    ExpertNames(None, "up_proj", "down_proj"),
)


class QuantExperts(nn.Module):
    """Experts ``"0"``, ``"1"``, ... with their projections as children, called as fused experts are."""

    def __init__(
        self, experts: Sequence[Mapping[str, nn.Module]], names: ExpertNames, gate: ExpertGate
    ) -> None:
        """experts: per expert, the linear layers by projection name."""
        super().__init__()
        self.num_experts = len(experts)
        self._names = names
        self._gate = gate
        self._grouped_for: tuple[torch.device, torch.dtype] | None = None
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        # These two keep the names that fused experts give them.
        self.register_parameter("gate_up_proj_bias", gate.up_bias)
        self.register_parameter("down_proj_bias", gate.down_bias)
        for index, projections in enumerate(experts):
            self.add_module(str(index), nn.ModuleDict(dict(projections)))

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that runs the first expert's last projection; none before it is repacked, or if plain."""
        last = self._projection(0, self._names.down)
        return last.kernel if isinstance(last, QuantLinear) else None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[T, hidden]`` through the experts ``[T, k]``, their outputs weighted by ``[T, k]`` and summed.

        Experts without tokens cost nothing. A number that is no expert (of another machine, or -1) adds nothing, nor
        does an expert that a token has had before.
        """
        grouped = self._grouped(hidden_states) if hidden_states.is_cuda else None
        if grouped is not None:
            return grouped(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        repeated = (top_k_index[:, :, None] == top_k_index[:, None, :]).tril(-1).any(-1)
        for index in top_k_index.unique().tolist():
            if not 0 <= index < self.num_experts:
                continue
            tokens, slots = torch.where((top_k_index == index) & ~repeated)
            outputs = self._expert(index, hidden_states[tokens]) * top_k_weights[tokens, slots, None]
            result.index_add_(0, tokens, outputs.to(result.dtype))
        return result

    def _grouped(self, x: torch.Tensor) -> GroupedExperts | None:
        """The experts at once, made for inputs like ``x`` when the first come; none if that cannot be."""
        if self._grouped_for != (x.device, x.dtype):
            self._grouped_for = (x.device, x.dtype)
            self._modules.pop(_GROUPED, None)
            # The layers outlive the mode in which somebody first runs them.
            with torch.inference_mode(False), torch.no_grad():
                reason = self._group(x)
            if reason:
                logger.info("Experts run one by one: %s", reason)
        grouped = self._modules.get(_GROUPED)
        return grouped if isinstance(grouped, GroupedExperts) else None

    def _group(self, x: torch.Tensor) -> str:
        """Why it cannot be done; empty once it is."""
        names, indices = self._names, range(self.num_experts)
        first_names = [name for name in (names.gate, names.up) if name is not None]
        firsts = [[self._projection(index, name) for name in first_names] for index in indices]
        lasts = [self._projection(index, names.down) for index in indices]
        layers = [layer for layer in (*chain.from_iterable(firsts), *lasts) if isinstance(layer, QuantLinear)]
        if len(layers) < (len(first_names) + 1) * self.num_experts:
            return "some of them are not quantized"
        for layer in layers:
            layer.place(x.device, x.dtype)
        if reason := cannot_group(firsts, lasts):  # type: ignore[arg-type]  # QuantLinear all, as was just counted
            return reason
        # The biases as they are now: loading has put others in the place of those that the gate came with.
        gate = replace(self._gate, up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias)
        self.add_module(_GROUPED, GroupedExperts(firsts, lasts, gate))  # type: ignore[arg-type]
        return ""

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        inner = self._projection(index, self._names.up)(x)
        if self._names.gate is not None:
            gate = self._projection(index, self._names.gate)(x)
            inner = (
                torch.stack([gate, inner], -1).flatten(-2)
                if self._gate.interleaved
                else torch.cat([gate, inner], -1)
            )
        if self.gate_up_proj_bias is not None:
            inner = inner + self.gate_up_proj_bias[index]
        outputs = self._projection(index, self._names.down)(self._gate.combine(inner))
        return outputs if self.down_proj_bias is None else outputs + self.down_proj_bias[index]

    def _projection(self, index: int, name: str) -> nn.Module:
        return self.get_submodule(f"{index}.{name}")
