"""Files that are on the disk when the call returns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_synced(file: Path, content: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    with file.open("wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())


def sync_directory(path: Path) -> None:
    """Wait until renames in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """``source`` under a second name, or a copy of it where the file system has no hard links; ``target`` is whole
    as soon as it exists."""
    try:
        os.link(source, target)
    except OSError:
        copy = target.with_name(target.name + ".tmp")
        with source.open("rb") as content, copy.open("wb") as copied:
            shutil.copyfileobj(content, copied)
            copied.flush()
            os.fsync(copied.fileno())
        copy.rename(target)


def remove(path: Path) -> None:
    """Delete a file, a link or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
