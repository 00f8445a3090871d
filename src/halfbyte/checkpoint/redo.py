"""Shards that are written again, while all others are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.shard_plan import Shard


@dataclass(frozen=True)
class Redo:
    """entries: names of tensors whose shards are written again.

    origin_of: what a complete checkpoint directory says of its origin, in the form of
        :attr:`halfbyte.checkpoint.manifest.Manifest.origin`; none if it says nothing.
    """

    entries: Collection[str]
    origin_of: Callable[[Path], Mapping[str, Any] | None]

    def files(self, shards: Iterable[Shard]) -> frozenset[str]:
        """File names of those of ``shards`` that are written again."""
        return frozenset(
            shard.file for shard in shards if any(entry.name in self.entries for entry in shard.entries)
        )
