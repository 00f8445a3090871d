"""Where synthetic checkpoints of ``halfbyte bench`` are made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path | None, typer.Option(help="Keep the synthetic checkpoints here; a temporary folder otherwise.")
]


@contextmanager
def working_folder(folder: Path | None) -> Iterator[Path]:
    """The folder asked for, made if need be, or a temporary one that is removed."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="halfbyte-bench-") as temporary:
        yield Path(temporary)
