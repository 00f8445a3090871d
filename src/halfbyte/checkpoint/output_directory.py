"""The directory that becomes the checkpoint: filled beside its place, swapped in whole at the end."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.model_config import CONFIG_FILE
from halfbyte.checkpoint.shard_plan import Shard
from halfbyte.errors import HalfbyteError

MANIFEST = "halfbyte-partial.json"
_WEIGHT_SUFFIXES = {
    *(
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".npz",
    ),
    *(".index.json", ".tflite", ".mlmodel", ".nemo"),
}
# They describe the source's own weights, not ours.
_ABOUT_THE_SOURCE = {
    CONFIG_FILE,
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "params.json",
}
_NOTES = ".notes.json"
_COPIED_FOLDERS = ("additional_chat_templates",)


class OutputDirectory:
    """``OUT.partial`` while it is being written, ``OUT`` after :meth:`publish`.

    A manifest in it names the run; only the same run resumes it. A lock keeps a second process out.
    """

    def __init__(self, out: Path, *, overwrite: bool, keep_others: bool = False) -> None:
        """keep_others: finished shards of another run are an error instead of being discarded.

        Errors: ``out`` exists and ``overwrite`` is not given, or it is no checkpoint.
        """
        if not out.name:
            raise HalfbyteError(
                f"{str(out)!r} names no directory that could be written; accepted: a path with a name"
            )
        self.out = out
        self._overwrite = overwrite
        self._keep_others = keep_others
        self.partial = out.with_name(out.name + ".partial")
        self.replaced = out.with_name(f".{out.name}.halfbyte-replaced")
        self.notes: list[str] = []
        self._lock: int | None = None
        self._owned = False
        if self.replaced.exists() and not out.exists():
            # Killed between the two renames of publish(): the old state comes back.
            self.replaced.rename(out)
            self.notes.append(f"{out} restored from {self.replaced.name}, which an interrupted run had left")
        self._refuse_to_replace()

    def _refuse_to_replace(self) -> None:
        out = self.out
        if out.exists() and not self._overwrite:
            raise HalfbyteError(f"{out}: exists; choose another output or pass --overwrite")
        if out.exists() and not (out / CONFIG_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise HalfbyteError(
                f"{out}: is no checkpoint (it has no {CONFIG_FILE}), so it is not overwritten"
            )

    def prepare(self, digest: str, shards: Sequence[Shard], redo: Collection[str] | None = None) -> set[str]:
        """Create or take over the partial directory; names of the shards in it that are finished.

        redo: names of shards that are to be written again; all others are kept from an unfinished run or, if there is
        none, from OUT, whatever their run was, as long as they hold the tensors that are planned.
        Errors: another process writes it; it holds files that halfbyte did not write; finished shards of another
        run that are to be kept.
        """
        finished: set[str] = set()
        self.partial.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        manifest = self.partial / MANIFEST
        if redo is not None:
            finished = self._keep(shards, redo, manifest)
        elif manifest.exists() and _digest_in(manifest) == digest:
            finished = {shard.file for shard in shards if _is_finished(self.partial / shard.file, shard)}
            if finished:
                self.notes.append(
                    f"resuming {self.partial}: {len(finished)} of {len(shards)} shards are finished"
                )
        elif manifest.exists() and self._keep_others and any(self.partial.glob("*.safetensors")):
            raise HalfbyteError(
                f"{self.partial}: holds finished work of another source, recipe, data or options; accepted: the same "
                "command as before, another output, or that directory removed"
            )
        elif manifest.exists():
            self.notes.append(
                f"discarded {self.partial}: it was written for another source, recipe or options"
            )
        elif any(self.partial.iterdir()):
            raise HalfbyteError(f"{self.partial}: exists and is no partial output of halfbyte; remove it")
        for file in self.partial.iterdir():
            if file.name.removesuffix(_NOTES) not in finished:
                _remove(file)
        write_synced(manifest, json.dumps({"plan": digest}).encode())
        sync_directory(self.partial)
        self._owned = True
        return finished

    def _keep(self, shards: Sequence[Shard], redo: Collection[str], manifest: Path) -> set[str]:
        """Finished shards that are not to be redone, those of OUT as hard links or copies."""
        if not manifest.exists():
            if any(self.partial.iterdir()):
                raise HalfbyteError(f"{self.partial}: exists and is no partial output of halfbyte; remove it")
            for shard in shards:
                if shard.file not in redo and _is_finished(self.out / shard.file, shard):
                    _link_or_copy(self.out / shard.file, self.partial / shard.file)
        kept = {s.file for s in shards if s.file not in redo and _is_finished(self.partial / s.file, s)}
        self.notes.append(f"redoing {len(shards) - len(kept)} of {len(shards)} shards, the others are kept")
        return kept

    def write_notes(self, shard: str, content: Mapping[str, Any]) -> None:
        """Keep something about a shard that is about to be finished, until :meth:`remove_notes`."""
        write_synced(self.partial / (shard + _NOTES), json.dumps(content).encode())

    def read_notes(self, shard: str) -> dict[str, Any]:
        """What :meth:`write_notes` kept; empty if that is nothing. Errors: a damaged file."""
        file = self.partial / (shard + _NOTES)
        if not file.exists():
            return {}
        try:
            return dict(json.loads(file.read_text()))
        except ValueError as error:
            raise HalfbyteError(f"{file}: is damaged ({error}); remove it and {shard} beside it") from None

    def remove_notes(self) -> None:
        """Before the directory becomes a checkpoint."""
        for file in self.partial.glob("*" + _NOTES):
            file.unlink()

    def copy_side_files(self, source: Path) -> None:
        """Copy what belongs to the model but is neither weights nor about the source's quantization.

        Tokenizer, chat templates, generation config, code and licence come along; READMEs and hidden files
        do not.
        """
        for file in sorted(source.iterdir()):
            if file.is_file() and is_side_file(file.name):
                write_synced(self.partial / file.name, file.read_bytes())
            elif file.is_dir() and file.name in _COPIED_FOLDERS:
                shutil.copytree(file, self.partial / file.name, dirs_exist_ok=True)

    def publish(self) -> None:
        """Put the directory in its place; until then the old OUT is whole.

        A kill between the two renames is undone by the next run.
        """
        self._refuse_to_replace()
        sync_directory(self.partial)
        if self.replaced.exists():
            _remove(self.replaced)
        if self.out.exists():
            self.out.rename(self.replaced)
        self.partial.rename(self.out)
        sync_directory(self.out.absolute().parent)
        self._owned = False
        self.release()
        try:
            (self.out / MANIFEST).unlink()
            if self.replaced.exists():
                _remove(self.replaced)
        except OSError as error:
            self.notes.append(
                f"{self.out} is complete, but {error.filename} could not be removed ({error.strerror})"
            )

    def discard(self) -> None:
        """Remove the partial directory, if it is this run's."""
        if self._owned:
            _remove(self.partial)
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


def is_side_file(name: str) -> bool:
    """Whether a file of a checkpoint directory is worth copying beside new weights."""
    if (
        name.startswith(".")
        or name.lower().startswith("readme")
        or name in _ABOUT_THE_SOURCE
        or name == MANIFEST
    ):
        return False
    return not any(name.endswith(suffix) for suffix in _WEIGHT_SUFFIXES)


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


def _digest_in(manifest: Path) -> str | None:
    try:
        return json.loads(manifest.read_text())["plan"]
    except (ValueError, KeyError, TypeError):
        return None


def _is_finished(file: Path, shard: Shard) -> bool:
    if not file.is_file() or file.stat().st_size != shard.size:
        return False
    with file.open("rb") as opened:
        return opened.read(len(shard.header)) == shard.header


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
