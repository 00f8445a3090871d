"""Weights of a block that are quantized as one tensor, because they are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from halfbyte.algorithms.targets import Target
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method

T = TypeVar("T")
# Elements of weights, and of their inputs' moments, that are worked on as one.
_WEIGHTS_TOGETHER = 1 << 26
_MOMENTS_TOGETHER = 1 << 27


@dataclass(frozen=True)
class Stack:
    """Weights ``[members, out, in]`` of one format, method and target.

    members: modules of each one below the other, which read the same input. heights: their output features.
    """

    members: tuple[tuple[str, ...], ...]
    heights: tuple[int, ...]
    fmt: TensorFormat
    method: Method
    target: Target

    @property
    def names(self) -> list[str]:
        return [name for names in self.members for name in names]

    @property
    def by_rows(self) -> bool:
        """Whether rows do not know of each other."""
        return _by_rows(self.fmt)

    def weight(self, load: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The stack, from a module's weight ``[out, in]`` by its name."""
        if len(self.members) == 1:
            return torch.cat([load(name) for name in self.members[0]])[None]
        return torch.stack([torch.cat([load(name) for name in names]) for names in self.members])

    def moment(self, statistics: Mapping[str, InputStatistics]) -> torch.Tensor | None:
        """fp32 ``[members, in, in]``, from statistics by module; none where nothing is known of the inputs."""
        if self.members[0][0] not in statistics:
            return None
        moments = [statistics[names[0]].moment for names in self.members]
        return moments[0][None] if len(moments) == 1 else torch.stack(moments)

    def parts(self) -> Iterator[tuple[str, int, slice]]:
        """Each module with its member and its rows there."""
        for member, names in enumerate(self.members):
            start = 0
            for name, height in zip(names, self.heights, strict=True):
                yield name, member, slice(start, start + height)
                start += height

    def part(self, stack: QuantizedTensor, member: int, rows: slice) -> QuantizedTensor:
        """A module's share of the quantized stack."""

        def taken(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            # What is not per row is shared by all rows, which then are one module's.
            return tensor[member, rows] if self.by_rows else tensor[member]

        scales = taken(stack.scales)
        assert scales is not None
        return QuantizedTensor(
            self.fmt, stack.codes[member, rows], scales, taken(stack.zero_points), taken(stack.outer_scales)
        )


def stack_up(
    formats: Mapping[str, TensorFormat],
    shapes: Mapping[str, tuple[int, int]],
    methods: Mapping[str, Method],
    targets: Mapping[str, Target],
    statistics: Mapping[str, InputStatistics],
) -> list[Stack]:
    """All modules of ``formats``, each in one stack; those with the most inputs, whose moments are large, first.

    Modules with the same statistics object read the same input: one decomposition of its moment serves them all.
    Modules whose rows share scales stay alone.
    """
    together: dict[Hashable, list[list[str]]] = {}
    for name, fmt in formats.items():
        seen = statistics.get(name)
        shared = id(seen) if seen is not None and _by_rows(fmt) else name
        reading = (shared, fmt, methods[name], targets[name])
        _append(
            together.setdefault(reading, []), name, lambda n: shapes[n][0] * shapes[n][1], _WEIGHTS_TOGETHER
        )

    alike: dict[Hashable, list[list[list[str]]]] = {}
    for names in (names for batches in together.values() for names in batches):
        first = names[0]
        fmt, size = formats[first], shapes[first][1]
        heights = tuple(shapes[name][0] for name in names)
        alone = None if _by_rows(fmt) else first
        key = (heights, size, fmt, methods[first], targets[first], first in statistics, alone)
        largest = min(_WEIGHTS_TOGETHER // (sum(heights) * size), _MOMENTS_TOGETHER // size**2)
        _append(alike.setdefault(key, []), names, lambda _: 1, max(1, largest))

    return [
        Stack(
            tuple(tuple(names) for names in members),
            tuple(shapes[name][0] for name in members[0]),
            formats[members[0][0]],
            methods[members[0][0]],
            targets[members[0][0]],
        )
        for batches in sorted(alike.values(), key=lambda some: -shapes[some[0][0][0]][1])
        for members in batches
    ]


def _append(batches: list[list[T]], item: T, size: Callable[[T], int], most: int) -> None:
    """Adds to the last batch if that stays within ``most``, otherwise begins another."""
    if batches and sum(map(size, batches[-1])) + size(item) <= most:
        batches[-1].append(item)
    else:
        batches.append([item])


def _by_rows(fmt: TensorFormat) -> bool:
    return fmt.granularity in ("group", "channel") and fmt.outer != "tensor"
