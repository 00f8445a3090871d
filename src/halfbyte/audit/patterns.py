"""Names that differ in layer and expert numbers only, told as one."""

from __future__ import annotations

from collections.abc import Iterable

Pattern = tuple[str | None, ...]
"""The parts of a name between its dots; none stands for a number."""


def split_numbers(name: str) -> tuple[Pattern, list[int]]:
    """The pattern of a name, and the numbers that stood in it."""
    parts: list[str | None] = list(name.split("."))
    numbers: list[int] = []
    for at, part in enumerate(parts):
        if part and part.isdecimal():
            numbers.append(int(part))
            parts[at] = None
    return tuple(parts), numbers


class MergedNames:
    """Names of one pattern; as text, the pattern with ranges: ``model.layers.0-31.mlp.up_proj``."""

    def __init__(self, pattern: Pattern) -> None:
        self.count = 0
        self._pattern = pattern
        self._numbers: list[set[int]] = [set() for part in pattern if part is None]

    def add(self, numbers: list[int]) -> None:
        """One more name, by its numbers."""
        self.count += 1
        for seen, number in zip(self._numbers, numbers, strict=True):
            seen.add(number)

    def __str__(self) -> str:
        ranges = map(compact, self._numbers)
        return ".".join(next(ranges) if part is None else part for part in self._pattern)


def compact(numbers: Iterable[int]) -> str:
    """Numbers as ranges: {0, 1, 2, 5} -> ``0-2,5``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
