"""What a partial output says of the run that writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.durable import sync_directory, write_synced

MANIFEST = "halfbyte-partial.json"
MANIFEST_IN_WRITING = MANIFEST + ".tmp"
NOTES_SUFFIX = ".notes.json"
"""Of the file beside a finished shard that only the run which wrote it can fill."""


@dataclass(frozen=True)
class Manifest:
    """plan: digest of all that decides the bytes; none while it is not settled yet which shards are taken over.

    origin: what shards must have in common to be of one model, whatever their recipe was, as plain data.
    """

    plan: str | None = None
    origin: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in ``folder``, if there is one; an empty one if it is damaged."""
        try:
            plain = json.loads((folder / MANIFEST).read_text())
            return cls(plain["plan"], plain.get("origin"))
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Put it into ``folder`` in the place of an older one, of which nothing is lost before."""
        write_synced(folder / MANIFEST_IN_WRITING, json.dumps(asdict(self)).encode())
        (folder / MANIFEST_IN_WRITING).rename(folder / MANIFEST)
        sync_directory(folder)
