"""Writing a checkpoint: tensors stream into shards, a finished shard is final, the whole appears at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from halfbyte.checkpoint.discover import INDEX_FILE, listed
from halfbyte.checkpoint.durable import sync_directory, write_synced
from halfbyte.checkpoint.headers import TensorInfo, read_header
from halfbyte.checkpoint.manifest import Manifest
from halfbyte.checkpoint.model_config import CONFIG_FILE
from halfbyte.checkpoint.output_directory import OutputDirectory, refuse_to_replace_source
from halfbyte.checkpoint.reader import write_all
from halfbyte.checkpoint.redo import Redo
from halfbyte.checkpoint.shard_plan import Entry, Shard, plan_digest, plan_shards
from halfbyte.checkpoint.side_files import copy_side_files
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 5_000_000_000


class CheckpointWriter:
    """Writes the tensors of ``entries``, each exactly once and in any order, then :meth:`finish`.

    Use it as a context manager: leaving it before :meth:`finish` keeps finished shards for a later run with
    the same ``fingerprint`` (what source, recipe and options amount to) and leaves nothing else.
    ``notes`` says what was resumed or discarded, one line each.
    """

    def __init__(
        self,
        out: Path | str,
        entries: Sequence[Entry],
        *,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
        starts: Collection[str] = frozenset(),
        redo: Redo | None = None,
        origin: Mapping[str, Any] | None = None,
        fingerprint: str,
    ) -> None:
        """Plans the shards and creates or resumes ``OUT.partial``.

        starts: entries that begin a new shard (see :func:`plan_shards`). redo: what is written again, while all other
        shards are kept from an unfinished run or OUT. origin: plain data that shards must share to be of one model.
        Errors: OUT exists without ``overwrite`` or ``redo``; finished shards with notes of another run, or of another
        origin where they are to be kept; the disk has less room than the plan needs; a tensor twice.
        """
        self._shards = plan_shards(entries, shard_bytes, starts)
        self._shard_of = {entry.name: shard for shard in self._shards for entry in shard.entries}
        self._entries = {entry.name: entry for entry in entries}
        self._directory = OutputDirectory(Path(out), overwrite=overwrite or redo is not None)
        self._open: dict[str, _OpenShard] = {}
        self._done: set[str] = set()
        self._finished = False
        with self._one_line():
            digest = plan_digest(self._shards, fingerprint, redo.files(self._shards) if redo else ())
            self._done = self._directory.prepare(Manifest(digest, origin), self._shards, redo)
            self._check_space()
        self._missing = {
            entry.name: entry for entry in entries if self._shard_of[entry.name].file not in self._done
        }

    @property
    def notes(self) -> list[str]:
        return self._directory.notes

    def missing(self) -> list[Entry]:
        """Entries not written yet, in plan order; on resume those of unfinished shards."""
        return list(self._missing.values())

    @property
    def folder(self) -> Path:
        """Where everything is while it is written."""
        return self._directory.partial

    def finished(self) -> dict[str, TensorInfo]:
        """The tensors of finished shards, as they lie in ``OUT.partial``."""
        tensors: dict[str, TensorInfo] = {}
        for file in sorted(self._done):
            tensors.update(read_header(self._directory.partial / file)[0])
        return tensors

    def keep_notes(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep plain data about the shard of the entry ``name`` beside it, for a run that resumes this one.

        No other run discards that shard once it is finished.
        """
        with self._one_line():
            self._directory.write_notes(self._shard_of[name].file, content)

    def kept_notes(self, name: str) -> dict[str, Any]:
        """What :meth:`keep_notes` kept about the shard of the entry ``name``."""
        return self._directory.read_notes(self._shard_of[name].file)

    def write(self, name: str, data: torch.Tensor | bytes | memoryview | Callable[[BinaryIO], None]) -> None:
        """Write one tensor: a tensor, its bytes, or a function that writes its bytes to the file it is given.

        Errors: a name that was not planned or is written already; another dtype, shape or number of bytes
        than planned; a full disk.
        """
        if name not in self._missing:
            why = "is written already" if name in self._entries else "was not planned"
            raise HalfbyteError(f"{self._directory.out}: tensor {name!r} {why}")
        entry, shard = self._missing[name], self._shard_of[name]
        content = data if callable(data) else _as_bytes(entry, data)
        with self._one_line():
            if shard.file not in self._open:
                self._open[shard.file] = _OpenShard(self._directory.partial, shard)
            opened = self._open[shard.file]
            opened.write(entry, content)
            del self._missing[name]
            if not opened.remaining:
                opened.finish()
                del self._open[shard.file]
                self._done.add(shard.file)

    def finish(
        self,
        config: Mapping[str, Any],
        copy_from: Path | str,
        documents: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the index and ``config`` as config.json, copy side files of ``copy_from``, appear as OUT.

        documents: further JSON files by name.

        Errors: tensors that were never written; OUT is ``copy_from``; a full disk.
        """
        if self._missing:
            raise HalfbyteError(f"{self._directory.out}: never written: {listed(self._missing)}")
        refuse_to_replace_source(self._directory.out, Path(copy_from))
        partial = self._directory.partial
        with self._one_line():
            copy_side_files(Path(copy_from), partial)
            if len(self._shards) > 1:
                weight_map = {name: self._shard_of[name].file for name in sorted(self._shard_of)}
                total = sum(entry.nbytes for entry in self._entries.values())
                write_json(
                    partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
                )
            for name, content in (documents or {}).items():
                write_json(partial / name, content)
            write_json(partial / CONFIG_FILE, config)
            self._directory.publish()
        self._finished = True

    def close(self) -> None:
        """Stop: drop unfinished shards, and the partial directory too when no shard is finished."""
        for opened in self._open.values():
            opened.discard()
        self._open.clear()
        if not self._finished and not self._done:
            self._directory.discard()
        self._directory.release()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_space(self) -> None:
        needed = sum(shard.size for shard in self._shards if shard.file not in self._done)
        free = shutil.disk_usage(self._directory.partial).free
        if needed > free:
            raise HalfbyteError(
                f"{self._directory.out}: needs {needed / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB free"
            )

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """The disk's refusals as one line, after which a later run can go on."""
        try:
            yield
        except OSError as error:
            self.close()
            kept = f"; finished shards stay in {self._directory.partial}, the same command resumes" * bool(
                self._done
            )
            where = error.filename or self._directory.partial
            raise HalfbyteError(f"{where}: cannot be written ({error.strerror}){kept}") from None
        except BaseException:
            self.close()
            raise


class _OpenShard:
    """A shard that is being written under a name that no reader takes for weights."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._target = folder / shard.file
        self._temporary = folder / (shard.file + ".tmp")
        self._shard = shard
        self.remaining = {entry.name for entry in shard.entries}
        self._file = self._temporary.open("wb", buffering=0)
        write_all(self._file, memoryview(shard.header))

    def write(self, entry: Entry, content: memoryview | Callable[[BinaryIO], None]) -> None:
        start = self._shard.offsets[entry.name]
        self._file.seek(start)
        if callable(content):
            content(self._file)
            written = self._file.tell() - start
            if written != entry.nbytes:
                raise HalfbyteError(
                    f"{self._target}: tensor {entry.name!r} got {written} bytes, planned {entry.nbytes}"
                )
        else:
            write_all(self._file, content)
        self.remaining.remove(entry.name)

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.rename(self._target)
        sync_directory(self._target.parent)

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face tools do, and wait until it is on the disk."""
    write_synced(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _as_bytes(entry: Entry, data: torch.Tensor | bytes | memoryview) -> memoryview:
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        if len(view) != entry.nbytes:
            raise HalfbyteError(f"tensor {entry.name!r} has {len(view)} bytes, planned {entry.nbytes}")
        return view
    import torch

    from halfbyte.checkpoint.dtypes import STORED_NAMES

    found = (STORED_NAMES[data.dtype], tuple(data.shape))
    if found != (entry.dtype, entry.shape):
        raise HalfbyteError(
            f"tensor {entry.name!r} is {found[0]} {list(found[1])}, planned {entry.dtype} {list(entry.shape)}"
        )
    return data.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
