"""What a rank that writes nothing knows of the output that the first rank writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.checkpoint.writer import CheckpointWriter


@dataclass(frozen=True)
class Follower:
    """As much of a :class:`CheckpointWriter` as a walk through the blocks needs that does not write.

    The ranks share a file system, where finished blocks are read from ``folder``.
    """

    folder: Path
    entries: Sequence[Entry]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, writer: CheckpointWriter) -> Follower:
        """The state of ``writer`` before the first block."""
        return cls(writer.folder, writer.missing(), writer.finished())

    def missing(self) -> list[Entry]:
        """Entries that are not written yet."""
        return list(self.entries)

    def finished(self) -> dict[str, TensorInfo]:
        """The tensors of finished shards."""
        return dict(self.tensors)

    def kept_notes(self, name: str) -> dict[str, Any]:
        """The first rank has them."""
        return {}
