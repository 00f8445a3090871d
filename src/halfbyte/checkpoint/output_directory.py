"""The directory that becomes the checkpoint: filled beside its place, swapped in whole at the end."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.durable import link_or_copy, remove, sync_directory, write_synced
from halfbyte.checkpoint.manifest import MANIFEST, MANIFEST_IN_WRITING, NOTES_SUFFIX, Manifest
from halfbyte.checkpoint.model_config import CONFIG_FILE
from halfbyte.checkpoint.redo import Redo
from halfbyte.checkpoint.shard_plan import Shard
from halfbyte.errors import HalfbyteError


class OutputDirectory:
    """``OUT.partial`` while it is being written, ``OUT`` after :meth:`publish`.

    A manifest in it names the run; only the same run resumes it. Finished shards with notes are of a run with data and
    dear, so that no other run discards them. A lock keeps a second process out.
    """

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        """Errors: ``out`` exists and ``overwrite`` is not given, or it is no checkpoint."""
        if not out.name:
            raise HalfbyteError(
                f"{str(out)!r} names no directory that could be written; accepted: a path with a name"
            )
        self.out = out
        self._overwrite = overwrite
        self.partial = out.with_name(out.name + ".partial")
        self.replaced = out.with_name(f".{out.name}.halfbyte-replaced")
        self.notes: list[str] = []
        self._lock: int | None = None
        self._owned = False
        if self.replaced.exists() and not out.exists():
            # Killed between the two renames of publish(): the old state comes back.
            self.replaced.rename(out)
            self.notes.append(f"{out} restored from {self.replaced.name}, which an interrupted run had left")
        if (out / MANIFEST).is_file() and (out / CONFIG_FILE).is_file():
            self._clear_up()
        self._refuse_to_replace()

    def _refuse_to_replace(self) -> None:
        out = self.out
        if out.exists() and not self._overwrite:
            raise HalfbyteError(f"{out}: exists; choose another output or pass --overwrite")
        if out.exists() and not (out / CONFIG_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise HalfbyteError(
                f"{out}: is no checkpoint (it has no {CONFIG_FILE}), so it is not overwritten"
            )

    def prepare(self, manifest: Manifest, shards: Sequence[Shard], redo: Redo | None = None) -> set[str]:
        """Create or take over the partial directory; names of the shards in it that are finished.

        redo: all shards but its own are kept from an unfinished run with finished notes or, if there is none, from OUT,
        whatever their recipe was, as long as their origin is the manifest's and they hold the tensors that are planned.
        Errors: another process writes it; it holds files that halfbyte did not write, or finished shards with notes
        of another run; shards of another origin would be kept.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        found = Manifest.read(self.partial)
        if found is None:
            self._refuse_foreign_files()
            self._owned = True
        if found is not None and found.plan == manifest.plan:
            finished = {shard.file for shard in shards if _is_finished(self.partial / shard.file, shard)}
            if finished:
                self.notes.append(
                    f"resuming {self.partial}: {len(finished)} of {len(shards)} shards are finished"
                )
        elif found is not None and (noted := self._noted()):
            finished = self._kept_from_partial(noted, found, manifest, shards, redo)
        else:
            finished = self._begun_anew(found, manifest, shards, redo)
        self._remove_all_but(finished)
        manifest.write(self.partial)
        self._owned = True
        return finished

    def _refuse_foreign_files(self) -> None:
        if any(file.name != MANIFEST_IN_WRITING for file in self.partial.iterdir()):
            raise HalfbyteError(f"{self.partial}: exists and is no partial output of halfbyte; remove it")

    def _noted(self) -> set[str]:
        """File names of finished shards that have notes."""
        names = {file.name.removesuffix(NOTES_SUFFIX) for file in self.partial.glob(f"*{NOTES_SUFFIX}")}
        return {name for name in names if (self.partial / name).exists()}

    def _kept_from_partial(
        self,
        noted: set[str],
        found: Manifest,
        manifest: Manifest,
        shards: Sequence[Shard],
        redo: Redo | None,
    ) -> set[str]:
        """Shards that another run finished and that are not to be redone."""
        kept = {shard.file for shard in _others(redo, shards, self.partial)} if redo else set()
        if redo is None or noted - kept - redo.files(shards):
            raise HalfbyteError(
                f"{self.partial}: holds finished work of another source, recipe, data or options; accepted: the same "
                "command as before, another output, or that directory removed"
            )
        _require_origin(self.partial, found.origin, manifest.origin)
        _require_planned(self.partial, redo, shards)
        self._say_redoing(kept, shards)
        return kept

    def _begun_anew(
        self, found: Manifest | None, manifest: Manifest, shards: Sequence[Shard], redo: Redo | None
    ) -> set[str]:
        """Nothing of the partial directory is kept; of OUT, as hard links or copies, what is not to be redone."""
        kept = _others(redo, shards, self.out) if redo else []
        if redo:
            if not self.out.exists():
                raise HalfbyteError(
                    f"{self.out}: is not there, so nothing of it can be redone; accepted: an output, finished or not"
                )
            if kept:
                _require_origin(self.out, redo.origin_of(self.out), manifest.origin)
            _require_planned(self.out, redo, shards)
        if found is not None and found.plan is not None:
            self.notes.append(
                f"discarded {self.partial}: it was written for another source, recipe or options"
            )
        # Killed while shards are taken over, the next run finds a directory of halfbyte and begins anew.
        Manifest().write(self.partial)
        self._owned = True
        self._remove_all_but(())
        for shard in kept:
            link_or_copy(self.out / shard.file, self.partial / shard.file)
        if redo:
            self._say_redoing(kept, shards)
        return {shard.file for shard in kept}

    def _say_redoing(self, kept: Collection[object], shards: Sequence[Shard]) -> None:
        self.notes.append(f"redoing {len(shards) - len(kept)} of {len(shards)} shards, the others are kept")

    def _remove_all_but(self, finished: Collection[str]) -> None:
        for file in self.partial.iterdir():
            if file.name != MANIFEST and file.name.removesuffix(NOTES_SUFFIX) not in finished:
                remove(file)

    def write_notes(self, shard: str, content: Mapping[str, Any]) -> None:
        """Keep something about a shard that is about to be finished, until the checkpoint is in its place."""
        write_synced(self.partial / (shard + NOTES_SUFFIX), json.dumps(content).encode())

    def read_notes(self, shard: str) -> dict[str, Any]:
        """What :meth:`write_notes` kept; empty if that is nothing. Errors: a damaged file."""
        file = self.partial / (shard + NOTES_SUFFIX)
        if not file.exists():
            return {}
        try:
            return dict(json.loads(file.read_text()))
        except ValueError as error:
            raise HalfbyteError(f"{file}: is damaged ({error}); remove it and {shard} beside it") from None

    def publish(self) -> None:
        """Put the directory in its place; until then the old OUT is whole.

        A kill between the two renames is undone by the next run, which also clears up after one that comes later.
        """
        self._refuse_to_replace()
        sync_directory(self.partial)
        remove(self.replaced)
        if self.out.exists():
            self.out.rename(self.replaced)
        self.partial.rename(self.out)
        sync_directory(self.out.absolute().parent)
        self._owned = False
        self.release()
        self._clear_up()

    def _clear_up(self) -> None:
        """Remove what a complete checkpoint no longer needs; the manifest goes last, as the sign of work left."""
        try:
            for file in (*self.out.glob(f"*{NOTES_SUFFIX}"), self.replaced, self.out / MANIFEST):
                remove(file)
        except OSError as error:
            self.notes.append(
                f"{self.out} is complete, but {error.filename} could not be removed ({error.strerror})"
            )

    def discard(self) -> None:
        """Remove the partial directory, if it is this run's."""
        if self._owned:
            remove(self.partial)
            self._owned = False

    def release(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise HalfbyteError(f"{self.partial}: another process is writing it") from None


def refuse_to_replace_source(out: Path, source: Path) -> None:
    """An output that is its own source, or holds it, would delete it at the end.

    source: a checkpoint directory or a file. Errors: ``out`` is the source or a directory above it.
    """
    resolved = source.resolve()
    if out.resolve() in (resolved, *resolved.parents):
        raise HalfbyteError(f"{out}: is or holds the source {source}; accepted: another directory")


def _require_origin(folder: Path, found: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None) -> None:
    if found is None and wanted is not None:
        raise HalfbyteError(
            f"{folder}: does not say what it was made of, so nothing of it can be kept; accepted: a checkpoint with a "
            "report of its origin, which runs with calibration data write"
        )
    if found != wanted:
        raise HalfbyteError(
            f"{folder}: was made of {_said(found)}, and this run is of {_said(wanted)}; accepted: the same as before, "
            "or another output"
        )


def _said(origin: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in (origin or {}).items()) or "nothing known"


def _others(redo: Redo, shards: Sequence[Shard], folder: Path) -> list[Shard]:
    """The shards that are finished in ``folder`` and not to be redone."""
    again = redo.files(shards)
    return [s for s in shards if s.file not in again and _is_finished(folder / s.file, s)]


def _is_finished(file: Path, shard: Shard) -> bool:
    return file.is_file() and file.stat().st_size == shard.size and _has_header(file, shard)


def _has_header(file: Path, shard: Shard) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(shard.header)) == shard.header


def _require_planned(folder: Path, redo: Redo, shards: Sequence[Shard]) -> None:
    """Errors: shards in ``folder`` that are not to be redone and hold other tensors than are planned."""
    asked = redo.files(shards)
    there = [shard for shard in shards if shard.file not in asked and (folder / shard.file).is_file()]
    # One that is damaged or lost is written again.
    other = [shard for shard in there if not _has_header(folder / shard.file, shard)]
    if other:
        raise HalfbyteError(
            f"{folder}: {len(other)} shards that are not to be redone hold other tensors than this recipe plans "
            f"({other[0].entries[0].name}, ...); accepted: the schemes that it has for all that is kept"
        )
