"""One thing that preflight has to say, and the collection that says it once for all layers alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfbyte.models.names import template

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """level: an ``error`` must stop the work; a ``warning`` is likely a mistake; a ``note`` is good to know.

    where: a module with ``*`` for layer and expert numbers, a tensor, or the rule of the recipe.
    """

    level: Level
    where: str
    message: str


class Findings:
    """Gathers findings; what several layers have in common is reported once, with their number."""

    def __init__(self) -> None:
        self._modules: dict[Finding, int] = {}

    def add(self, level: Level, where: str, message: str) -> None:
        """One finding about something that exists once."""
        self._modules[Finding(level, where, message)] = 1

    def add_module(self, level: Level, name: str, message: str) -> None:
        """One finding about the module ``name`` that others may share."""
        finding = Finding(level, template(name), message)
        self._modules[finding] = self._modules.get(finding, 0) + 1

    def collected(self) -> list[Finding]:
        """All of them, errors first."""
        order = ("error", "warning", "note")
        counted = [
            Finding(
                found.level, found.where, f"{found.message} ({count} modules)" if count > 1 else found.message
            )
            for found, count in self._modules.items()
        ]
        return sorted(counted, key=lambda found: order.index(found.level))
