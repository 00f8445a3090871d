"""A mixture's experts on every token, whatever the router says: what their projections would read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import WeightSource

_DOWN = "down_proj"
_FIRST = ("gate_up_proj", "up_proj")
# Elements between the projections of experts that are worked on at a time.
_TOGETHER = 1 << 26


@dataclass
class FusedExperts:
    """The experts of one ``module`` of transformers, which keeps them in 3-D parameters.

    parent: what the checkpoint calls it. outer: reading the hidden state, inner: reading what is between an
    expert's projections, by name with the expert's index. transposed: parameters are ``[experts, in, out]``.
    """

    parent: str
    module: nn.Module
    mixture: nn.Module
    transposed: bool
    outer: list[str] = field(default_factory=list)
    inner: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The projections' names."""
        return [*self.outer, *self.inner]

    @property
    def count(self) -> int:
        """How many experts there are."""
        return getattr(self.module, _DOWN).shape[0]

    def inner_inputs(self, inputs: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """What the down projections in :attr:`inner` read for their experts' ``inputs`` ``[tokens, hidden]``.

        Yields some of them at a time, in order: the place of the first in :attr:`inner`, and ``[n, tokens, inner]``.
        """
        first = next(name for name in _FIRST if hasattr(self.module, name))
        weights, biases = getattr(self.module, first), getattr(self.module, f"{first}_bias", None)
        experts = [*self.inner.values()]
        width = weights.shape[-1 if self.transposed else -2]
        together = max(1, _TOGETHER // max(1, len(inputs) * width))
        for start in range(0, len(experts), together):
            some = _consecutive(experts[start : start + together])
            outputs = inputs @ (weights[some] if self.transposed else weights[some].mT)
            if biases is not None:
                outputs += biases[some].unsqueeze(1)
            yield start, self._gate(first)(outputs)

    def _gate(self, first: str) -> Callable[[torch.Tensor], torch.Tensor]:
        module: Any = self.module
        if first == "up_proj":
            return module.act_fn
        return getattr(module, "_apply_gate", self._act_on_first_half)

    def _act_on_first_half(self, outputs: torch.Tensor) -> torch.Tensor:
        module: Any = self.module
        gate, up = outputs.chunk(2, dim=-1)
        return module.act_fn(gate) * up


def fused_experts(
    model: nn.Module, names: Iterable[str], places: Mapping[str, WeightSource]
) -> list[FusedExperts]:
    """The modules of experts that hold the projections ``names``; others among these are left out.

    Errors: experts whose parameters are not known here.
    """
    found: dict[str, FusedExperts] = {}
    for name in names:
        place = places[name]
        if place.expert is None:
            continue
        owner, _, leaf = place.tensor.rpartition(".")
        if owner not in found:
            found[owner] = _open(model, owner, name, place)
        if leaf == _DOWN:
            found[owner].inner[name] = place.expert
        else:
            found[owner].outer.append(name)
    return list(found.values())


def _open(model: nn.Module, owner: str, name: str, place: WeightSource) -> FusedExperts:
    module = model.get_submodule(owner)
    parameters = {leaf for leaf, _ in module.named_parameters(recurse=False)}
    known = {_DOWN, f"{_DOWN}_bias", *_FIRST, *(f"{first}_bias" for first in _FIRST)}
    gated = hasattr(module, "act_fn") or hasattr(module, "_apply_gate")
    if parameters - known or _DOWN not in parameters or not parameters & {*_FIRST} or not gated:
        raise HalfbyteError(
            f"{owner}: experts of {type(module).__name__} with {', '.join(sorted(parameters))} cannot be observed; "
            f"accepted: {' or '.join(_FIRST)} with {_DOWN}, and an activation called act_fn or _apply_gate"
        )
    parent = name.rpartition(f".{place.expert}.")[0]
    return FusedExperts(parent, module, model.get_submodule(owner.rpartition(".")[0]), place.transposed)


def _consecutive(experts: list[int]) -> slice | list[int]:
    """As a slice where that says the same, which spares a copy of what it is taken from."""
    first, stop = experts[0], experts[0] + len(experts)
    return slice(first, stop) if experts == [*range(first, stop)] else experts


def routes_among(arguments: Sequence[Any]) -> torch.Tensor | None:
    """The experts ``[T, k]`` of each token among the arguments of fused experts; none if they are not told."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and not argument.is_floating_point():
            return argument.reshape(-1, argument.shape[-1])
    return None
