"""Statistics of the inputs of a block's layers, taken while the block runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from halfbyte.calibration.fused_experts import FusedExperts, routes_among
from halfbyte.calibration.grouped_moments import Group, GroupedMoments, identity_of
from halfbyte.calibration.listed_experts import ListedExperts, row_keys
from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class Observation:
    """groups: every observed module is in one. routed_tokens: experts' parent -> counted tokens for each expert."""

    groups: list[Group]
    routed_tokens: dict[str, list[int]]


@dataclass(frozen=True)
class _Counts:
    """Which of a sample's ``tokens`` count. As indices, since masking by bools waits for the device each time."""

    tokens: int
    indices: torch.Tensor


class Observer:
    """Hooks on the layers of a block, which add up their inputs sample by sample.

    Layers that get the same tensor, found by its identity, share their moments. Experts see every counted token:
    the projections that read the hidden state share it, each down projection reads what its own expert makes of
    it. The block computes what it would without hooks.
    """

    def __init__(
        self,
        in_features: Mapping[str, int],
        linears: Mapping[str, nn.Module],
        fused: Sequence[FusedExperts],
        listed: Sequence[ListedExperts],
    ) -> None:
        """in_features: of every layer. linears: module that owns the weight of each layer outside of experts."""
        self._moments = GroupedMoments(in_features)
        self._linears = linears
        self._fused = fused
        self._listed = listed
        self._routed: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._counts: _Counts | None = None

    def __enter__(self) -> Observer:
        for name, module in self._linears.items():
            self._handles.append(_before(module, partial(self._add_first, name)))
        for fused in self._fused:
            self._hook_fused(fused)
        for listed in self._listed:
            self._hook_listed(listed)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._moments.next_sample()

    def expect(self, counts: torch.Tensor | None) -> None:
        """Before each sample. counts: bool ``[n * T]``, the tokens that enter statistics; none for all."""
        self._counts = None if counts is None else _Counts(len(counts), counts.nonzero().squeeze(1))
        self._moments.next_sample()

    def observation(self) -> Observation:
        """What all samples, of all ranks, add up to. Errors: a layer that never ran."""
        routed = {parent: _over_ranks(counts).tolist() for parent, counts in self._routed.items()}
        return Observation(self._moments.groups(), routed)

    def _add_first(self, name: str, arguments: Sequence[Any]) -> None:
        self._add(name, arguments[0])

    def _add(self, name: str, inputs: torch.Tensor) -> None:
        self._moments.add_shared([name], inputs, self._counted(name, inputs))

    def _counted(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self._counts is None:
            return rows
        if len(rows) != self._counts.tokens:
            raise HalfbyteError(
                f"{name}: reads {len(rows)} rows for {self._counts.tokens} tokens, so that none can be masked"
            )
        return rows[self._counts.indices]

    def _hook_fused(self, fused: FusedExperts) -> None:
        entering: list[torch.Tensor] = []

        def enter(inputs: Sequence[Any]) -> None:
            entering[:] = inputs[:1]

        self._handles.append(_before(fused.mixture, enter))
        self._handles.append(
            _before(fused.module, lambda inputs: self._run_fused(fused, inputs, entering[0]))
        )

    def _run_fused(self, fused: FusedExperts, arguments: Sequence[Any], entering: torch.Tensor) -> None:
        routes = routes_among(arguments)
        if routes is None:
            # Some experts get all tokens once for each expert, zeroed where they are not routed to it.
            inputs = entering
            self._count(fused.parent, self._nonzero_rows(fused, arguments[0]))
        else:
            inputs = arguments[0]
            self._count(fused.parent, self._routes_of_experts(fused, routes))
        rows = self._counted(fused.parent, inputs)
        if fused.outer:
            self._moments.add_shared(fused.outer, inputs, rows)
        for first, between in fused.inner_inputs(rows):
            self._moments.add_stack([*fused.inner], between, first)

    def _routes_of_experts(self, fused: FusedExperts, routes: torch.Tensor) -> torch.Tensor:
        counted = self._counted(fused.parent, routes).reshape(-1).long()
        # An index past the last expert stands for no expert.
        tally = torch.zeros(fused.count + 1, dtype=torch.long, device=counted.device)
        return tally.scatter_add_(0, counted.clamp(max=fused.count), torch.ones_like(counted))[: fused.count]

    def _nonzero_rows(self, fused: FusedExperts, inputs: torch.Tensor) -> torch.Tensor:
        used = inputs.reshape(fused.count, -1, inputs.shape[-1]).ne(0).any(-1)
        return (used if self._counts is None else used[:, self._counts.indices]).sum(-1)

    def _hook_listed(self, listed: ListedExperts) -> None:
        experts = list(listed.experts.children())
        entering: list[torch.Tensor] = []

        def show_all(inputs: Sequence[Any]) -> None:
            rows = self._counted(listed.parent, inputs[0])
            entering[:] = [row_keys(rows)]
            for index, linears in listed.linears.items():
                self._show(experts[index], linears, rows)

        def count(index: int, inputs: Sequence[Any]) -> None:
            routed = torch.zeros(len(experts), dtype=torch.long, device=inputs[0].device)
            # The list does not say which tokens it passes on; their hidden states do.
            routed[index] = torch.isin(row_keys(inputs[0]), entering[0]).sum()
            self._count(listed.parent, routed)

        self._handles.append(_before(listed.mixture, show_all))
        for index, expert in enumerate(experts):
            self._handles.append(_before(expert, partial(count, index)))

    def _show(self, expert: nn.Module, linears: Mapping[str, nn.Module], rows: torch.Tensor) -> None:
        """Runs an expert on rows that count, which go no further than its statistics."""

        def take(name: str, inputs: Sequence[Any]) -> None:
            if identity_of(inputs[0]) == identity_of(rows):
                self._moments.add_shared([name], rows, rows)
            else:
                self._moments.add_alone(name, inputs[0])

        handles = [_before(module, partial(take, name)) for name, module in linears.items()]
        expert.forward(rows)
        for handle in handles:
            handle.remove()

    def _count(self, parent: str, routed: torch.Tensor) -> None:
        self._routed[parent] = self._routed[parent] + routed if parent in self._routed else routed


def _before(module: nn.Module, take: Callable[[list[Any]], None]) -> RemovableHandle:
    """``take`` gets the arguments of every call of ``module``, named ones last."""
    return module.register_forward_pre_hook(
        lambda _, arguments, named: take([*arguments, *named.values()]), with_kwargs=True
    )


def _over_ranks(counts: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return counts
