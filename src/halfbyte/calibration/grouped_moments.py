"""Moments of the inputs of many layers, one set for all layers that read the same tensor."""

from __future__ import annotations

from collections.abc import Mapping
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
        self.next_sample()

    def next_sample(self) -> None:
        """Forgets which tensors the last sample had."""
        # Inputs are held for a sample: a freed tensor's address would be another's identity.
        self._inputs: dict[tuple[int, ...], torch.Tensor] = {}
        self._by_input: dict[tuple[int, ...], _Accumulator] = {}
        self._added: set[tuple[int, tuple[int, ...]]] = set()

    def add_shared(self, name: str, inputs: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows`` ``[tokens, in]`` are what counts of the ``inputs`` of layer ``name``, which others may read too."""
        identity = identity_of(inputs)
        self._inputs[identity] = inputs
        accumulator = self._accumulator(name, inputs, self._by_input.get(identity))
        self._by_input[identity] = accumulator
        if (id(accumulator), identity) not in self._added:
            self._added.add((id(accumulator), identity))
            accumulator.moments.add(rows)

    def add_alone(self, name: str, rows: torch.Tensor) -> None:
        """``rows`` ``[tokens, in]`` are what layer ``name`` reads and no other does."""
        self._accumulator(name, rows, None).moments.add(rows)

    def groups(self) -> list[Group]:
        """What all samples, of all ranks, add up to. Errors: a layer that was never seen."""
        for name in self._in_features:
            if name not in self._accumulators:
                raise HalfbyteError(f"{name}: its block ran without calling it, so its inputs are unknown")
        groups = []
        for accumulator in {id(entry): entry for entry in self._accumulators.values()}.values():
            accumulator.moments.reduce()
            groups.append(Group(tuple(accumulator.names), accumulator.moments.statistics()))
        return groups

    def _accumulator(self, name: str, inputs: torch.Tensor, shared: _Accumulator | None) -> _Accumulator:
        if name not in self._accumulators:
            features = self._in_features[name]
            if inputs.shape[-1] != features:
                raise HalfbyteError(
                    f"{name}: got {inputs.shape[-1]} input features, its weight has {features}"
                )
            self._accumulators[name] = shared or _Accumulator(InputMoments(features, inputs.device))
            self._accumulators[name].names.append(name)
        return self._accumulators[name]


def identity_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The same for a tensor and its reshaped views, different for other tensors and after a change in place."""
    return tensor.data_ptr(), tensor.numel(), tensor.shape[-1], tensor.stride(-1), tensor._version
