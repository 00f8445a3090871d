"""Short lists of patterns for long lists of module names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfbyte.matching import REGEX_PREFIX
from halfbyte.models.names import layer_index, template


def covering_patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names and ``re:`` patterns, pinned at the end, that mean all of ``names`` and none of ``others``.

    Modules that differ in numbers only become one pattern: what follows the last number, if that is enough to
    tell them from ``others`` (it holds whatever an engine puts in front), else the whole name, else the whole name
    with its layers listed. Names that no pattern tells apart, and single ones, stand as they are.
    """
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(template(name), []).append(name)
    foreign: dict[str, set[int | None]] = {}
    for name in others:
        foreign.setdefault(template(name), set()).add(layer_index(name))
    patterns: dict[str, None] = {}
    for family, members in families.items():
        for pattern in _cover(family, members, foreign):
            patterns[pattern] = None
    return list(patterns)


def _cover(family: str, members: list[str], foreign: dict[str, set[int | None]]) -> list[str]:
    if len(members) == 1:
        return members
    tail = family.rpartition("*")[2]
    if tail and not any(other.endswith(tail) for other in foreign):
        return [f"{REGEX_PREFIX}.*{re.escape(tail)}$"]
    if family not in foreign:
        return [_whole(family)]
    layers = {layer_index(name) for name in members} - foreign[family]
    own_layers = sorted(layer for layer in layers if layer is not None)
    shared = [name for name in members if layer_index(name) not in layers]
    if len(members) - len(shared) < 2:
        return members
    return [*shared, _whole(family, own_layers)]


def _whole(family: str, layers: Iterable[int] = ()) -> str:
    """The family's pattern, its first number one of ``layers`` if there are any."""
    pattern = re.escape(family)
    if numbers := "|".join(map(str, layers)):
        pattern = pattern.replace(r"\*", f"({numbers})", 1)
    return REGEX_PREFIX + pattern.replace(r"\*", r"\d+") + "$"
