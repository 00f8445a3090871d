"""Which tensor goes where in which output file, settled before the first byte is written. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from halfbyte.checkpoint.discover import SINGLE_FILE
from halfbyte.checkpoint.headers import DTYPE_BITS, tensor_nbytes
from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: ``dtype`` in safetensors spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        nbytes = tensor_nbytes(self.dtype, self.shape)
        if nbytes is None:
            raise HalfbyteError(
                f"tensor {self.name!r}: {self.dtype} of shape {list(self.shape)} fills no whole bytes"
            )
        return nbytes


@dataclass(frozen=True)
class Shard:
    """One output file: its name, its header with the length in front, and where its tensors start in it."""

    file: str
    header: bytes
    entries: tuple[Entry, ...]
    offsets: dict[str, int]
    size: int


def plan_shards(
    entries: Sequence[Entry], shard_bytes: int, starts: Collection[str] = frozenset()
) -> list[Shard]:
    """Shards of at most ``shard_bytes`` of data, filled in the order of ``entries`` (a tensor may be larger).

    starts: names of entries that each begin a shard which ends before the next of them, whatever its size: what lies
    between two is final together.
    Errors: no entries, a name twice, an unknown dtype.
    """
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise HalfbyteError(f"tensor {twice!r} would be written twice")
    if unknown := next((entry for entry in entries if entry.dtype not in DTYPE_BITS), None):
        raise HalfbyteError(f"tensor {unknown.name!r}: dtype {unknown.dtype!r} is not known")
    groups = list(_fill(entries, shard_bytes, starts))
    if not groups:
        raise HalfbyteError("there is no tensor to write")
    total = len(groups)
    files = (
        [SINGLE_FILE]
        if total == 1
        else [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    )
    return [_lay_out(file, group) for file, group in zip(files, groups, strict=True)]


def plan_digest(shards: Sequence[Shard], fingerprint: str, again: Collection[str] = ()) -> str:
    """Names what is being written: two runs with one digest write the same bytes.

    again: file names of the shards that are written again, if all others are kept.
    """
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(json.dumps(sorted(again)).encode())
    for shard in shards:
        digest.update(shard.file.encode() + shard.header)
    return digest.hexdigest()


def _fill(entries: Iterable[Entry], shard_bytes: int, starts: Collection[str]) -> Iterable[list[Entry]]:
    group: list[Entry] = []
    size = 0
    started = False
    for entry in entries:
        starts_here = entry.name in starts
        is_full = not started and size + entry.nbytes > shard_bytes
        if group and (starts_here or is_full):
            yield group
            group, size = [], 0
        started = started or starts_here
        group.append(entry)
        size += entry.nbytes
    if group:
        yield group


def _lay_out(file: str, entries: Sequence[Entry]) -> Shard:
    """Wide dtypes first: the format allows no padding, and readers view bytes as values in place."""
    ordered = sorted(entries, key=lambda entry: -DTYPE_BITS[entry.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in ordered:
        end = position + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets: dict[str, int] = {}
    size = start
    for entry in ordered:
        offsets[entry.name] = size
        size += entry.nbytes
    return Shard(file, len(text).to_bytes(8, "little") + text, tuple(ordered), offsets, size)
