"""A mixture's experts on quantized weights: each expert that has tokens runs its own linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


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


_CONVENTIONS = (
    ExpertNames("gate_proj", "up_proj", "down_proj"),
    ExpertNames("w1", "w3", "w2"),
    ExpertNames(None, "up_proj", "down_proj"),
)


@dataclass(frozen=True)
class ExpertGate:
    """How the first projections' outputs become the last one's inputs.

    combine: ``[T, 2 * inner]`` (or ``[T, inner]`` without a gate) to ``[T, inner]``.
    interleaved: gate and up values alternate in what ``combine`` takes, instead of lying in halves.
    up_bias: ``[experts, 2 * inner]``, in that same order. down_bias: ``[experts, hidden]``.
    """

    combine: Callable[[torch.Tensor], torch.Tensor]
    interleaved: bool = False
    up_bias: nn.Parameter | None = None
    down_bias: nn.Parameter | None = None


class QuantExperts(nn.Module):
    """Experts ``"0"``, ``"1"``, ... with their projections as children, called as fused experts are."""

    def __init__(
        self, experts: Sequence[Mapping[str, nn.Module]], names: ExpertNames, gate: ExpertGate
    ) -> None:
        """experts: per expert, the linear layers by projection name."""
        super().__init__()
        self.num_experts = len(experts)
        self._names = names
        self._combine = gate.combine
        self._interleaved = gate.interleaved
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        # These two keep the names that fused experts give them.
        self.register_parameter("gate_up_proj_bias", gate.up_bias)
        self.register_parameter("down_proj_bias", gate.down_bias)
        for index, projections in enumerate(experts):
            self.add_module(str(index), nn.ModuleDict(dict(projections)))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[T, hidden]`` through the experts ``[T, k]``, their outputs weighted by ``[T, k]`` and summed.

        Experts without tokens cost nothing. Indices beyond the last expert stand for experts of other
        machines.
        """
        result = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            if index >= self.num_experts:
                continue
            tokens, slots = torch.where(top_k_index == index)
            outputs = self._expert(index, hidden_states[tokens]) * top_k_weights[tokens, slots, None]
            result.index_add_(0, tokens, outputs.to(result.dtype))
        return result

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        inner = self._projection(index, self._names.up)(x)
        if self._names.gate is not None:
            gate = self._projection(index, self._names.gate)(x)
            inner = (
                torch.stack([gate, inner], -1).flatten(-2)
                if self._interleaved
                else torch.cat([gate, inner], -1)
            )
        if self.gate_up_proj_bias is not None:
            inner = inner + self.gate_up_proj_bias[index]
        outputs = self._projection(index, self._names.down)(self._combine(inner))
        return outputs if self.down_proj_bias is None else outputs + self.down_proj_bias[index]

    def _projection(self, index: int, name: str) -> nn.Module:
        return self.get_submodule(f"{index}.{name}")
