"""Moments of the inputs of many layers, one set for all layers that read the same tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from halfbyte.calibration.statistics import InputMoments, InputStatistics
from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class Group:
    """Modules that read the same tensor, and what is known of it."""

    names: tuple[str, ...]
    statistics: InputStatistics


@dataclass
class _Accumulator:
    moments: InputMoments
    names: list[str] = field(default_factory=list)


class GroupedMoments:
    """Adds up inputs sample by sample. A layer stays in the group that its first input puts it in."""

    def __init__(self, in_features: Mapping[str, int]) -> None:
        """in_features: of every layer that is to be seen."""
        self._in_features = in_features
        self._accumulators: dict[str, _Accumulator] = {}
        self._stacks: dict[tuple[str, ...], InputMoments] = {}
        self.next_sample()

    def next_sample(self) -> None:
        """Forgets which tensors the last sample had."""
        # Inputs are held for a sample: a freed tensor's address would be another's identity.
        self._inputs: dict[tuple[int, ...], torch.Tensor] = {}
        self._by_input: dict[tuple[int, ...], _Accumulator] = {}
        self._added: set[tuple[int, tuple[int, ...]]] = set()

    def add_shared(self, names: Sequence[str], inputs: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows`` ``[tokens, in]`` are what counts of the ``inputs`` of layers ``names``, which others may read too.

        The names are the same at every call with the first of them.
        """
        identity = identity_of(inputs)
        self._inputs[identity] = inputs
        accumulator = self._accumulator(names, inputs, self._by_input.get(identity))
        self._by_input[identity] = accumulator
        if (id(accumulator), identity) not in self._added:
            self._added.add((id(accumulator), identity))
            accumulator.moments.add(rows[None])

    def add_alone(self, name: str, rows: torch.Tensor) -> None:
        """``rows`` ``[tokens, in]`` are what layer ``name`` reads and no other does."""
        self._accumulator([name], rows, None).moments.add(rows[None])

    def add_stack(self, names: Sequence[str], rows: torch.Tensor, first: int) -> None:
        """``rows`` ``[n, tokens, in]`` are what n of the layers ``names`` read, from the one numbered ``first`` on.

        Each layer of the stack has inputs of its own; the names are the same at every call.
        """
        stack = tuple(names)
        if stack not in self._stacks:
            features = self._checked(stack[0], rows)
            self._stacks[stack] = InputMoments(features, rows.device, len(stack))
        self._stacks[stack].add(rows, first)

    def groups(self) -> list[Group]:
        """What all samples, of all ranks, add up to; the sums are given up. Errors: a layer that was never seen."""
        stacked = {name for names in self._stacks for name in names}
        for name in self._in_features:
            if name not in self._accumulators and name not in stacked:
                raise HalfbyteError(f"{name}: its block ran without calling it, so its inputs are unknown")
        groups = []
        accumulators = [*{id(entry): entry for entry in self._accumulators.values()}.values()]
        self._accumulators.clear()
        self.next_sample()
        while accumulators:
            accumulator = accumulators.pop(0)
            accumulator.moments.reduce()
            groups.append(Group(tuple(accumulator.names), *accumulator.moments.finish()))
        for names in [*self._stacks]:
            moments = self._stacks.pop(names)
            moments.reduce()
            groups += [Group((name,), seen) for name, seen in zip(names, moments.finish(), strict=True)]
        return groups

    def _accumulator(
        self, names: Sequence[str], inputs: torch.Tensor, shared: _Accumulator | None
    ) -> _Accumulator:
        if names[0] not in self._accumulators:
            features = [self._checked(name, inputs) for name in names]
            accumulator = shared or _Accumulator(InputMoments(features[0], inputs.device))
            accumulator.names += names
            self._accumulators |= dict.fromkeys(names, accumulator)
        return self._accumulators[names[0]]

    def _checked(self, name: str, inputs: torch.Tensor) -> int:
        """Input features of a layer, which are those of its inputs."""
        features = self._in_features[name]
        if inputs.shape[-1] != features:
            raise HalfbyteError(f"{name}: got {inputs.shape[-1]} input features, its weight has {features}")
        return features


def identity_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The same for a tensor and its reshaped views, different for other tensors and after a change in place."""
    return tensor.data_ptr(), tensor.numel(), tensor.shape[-1], tensor.stride(-1), tensor._version
