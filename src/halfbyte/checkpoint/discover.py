"""Which files of a directory are the model's weights, and whether they are all there. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from halfbyte.checkpoint.headers import TensorInfo, parse_json, read_header
from halfbyte.errors import HalfbyteError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


def find_safetensors(path: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors of the safetensors checkpoint in directory ``path``, and notes on what was tolerated.

    Both are empty when the directory holds no safetensors checkpoint. An index decides which files count. One
    that names absent files is tolerated if a complete set lies there that holds every tensor which it lists.
    Errors: a missing shard, a tensor in two shards, a tensor that the index lists and no shard holds, and
    what :func:`halfbyte.checkpoint.headers.read_header` finds.
    """
    index = path / INDEX_FILE
    if not index.exists():
        return read_shards(path, complete_set(path)), []
    weight_map = read_weight_map(index)
    named = sorted(set(weight_map.values()))
    absent = [name for name in named if not (path / name).exists()]
    if not absent:
        tensors = read_shards(path, named)
        return tensors, _compare_with_index(index, weight_map, tensors)
    try:
        present = complete_set(path)
    except HalfbyteError:
        present = []
    tensors = read_shards(path, present)
    if not present or not weight_map.keys() <= tensors.keys():
        raise HalfbyteError(
            f"{path}: {listed(absent)} named by {INDEX_FILE} does not exist; fetch the missing shards"
        )
    return tensors, [f"{INDEX_FILE} is stale: it names {listed(absent)}; read {listed(present)} instead"]


def complete_set(path: Path) -> list[str]:
    """File names of the checkpoint in ``path`` without an index: the single file, or one full set of shards.

    Errors: shards missing from a set, or several sets.
    """
    if (path / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    sets: dict[int, dict[int, str]] = {}
    for file in path.glob("model-*.safetensors"):
        if match := _SHARD.fullmatch(file.name):
            sets.setdefault(int(match[2]), {})[int(match[1])] = file.name
    complete = {
        n: shards for n, shards in sets.items() if (len(shards), min(shards), max(shards)) == (n, 1, n)
    }
    if len(complete) > 1:
        raise HalfbyteError(
            f"{path}: holds complete sets of {listed(map(str, complete))} shards; remove all but one"
        )
    if complete:
        (shards,) = complete.values()
        return [shards[number] for number in sorted(shards)]
    if sets:
        total, shards = max(sets.items(), key=lambda item: len(item[1]))
        missing = [str(number) for number in range(1, min(total, 10_000) + 1) if number not in shards]
        raise HalfbyteError(
            f"{path}: of {total} shards model-*-of-{total:05d}.safetensors, {listed(missing)} is missing"
        )
    return []


def read_weight_map(index: Path, key: str = "weight_map") -> dict[str, str]:
    """Tensor name -> file name from an index file.

    Errors: no JSON, no such map, or a file name that is a path (it could point out of the checkpoint).
    """
    weight_map = parse_json(read_bytes(index), index).get(key)
    if not isinstance(weight_map, dict) or not weight_map:
        raise HalfbyteError(f"{index}: {key!r} must map tensor names to file names")
    wrong = [file for file in weight_map.values() if not isinstance(file, str)]
    wrong = wrong or [file for file in set(weight_map.values()) if Path(file).name != file]
    if wrong:
        raise HalfbyteError(f"{index}: {wrong[0]!r} is not the name of a file beside the index")
    return weight_map


def read_bytes(file: Path) -> bytes:
    """Content of a small file. Errors: one that cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise HalfbyteError(f"{file}: cannot be read ({error.strerror})") from None


def read_shards(path: Path, names: Iterable[str]) -> dict[str, TensorInfo]:
    """Tensors of the named safetensors files in ``path``. Errors: a tensor that two of them hold."""
    tensors: dict[str, TensorInfo] = {}
    for file_name in names:
        shard, _ = read_header(path / file_name)
        if twice := tensors.keys() & shard.keys():
            name = min(twice)
            raise HalfbyteError(
                f"{path}: tensor {name!r} is in two shards, {tensors[name].file.name} and {file_name}"
            )
        tensors.update(shard)
    return tensors


def listed(names: Iterable[str]) -> str:
    """At most three of the names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _compare_with_index(
    index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> list[str]:
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise HalfbyteError(f"{index}: lists {listed(absent)}, which no shard holds")
    notes = []
    if moved := [name for name, file in weight_map.items() if tensors[name].file.name != file]:
        notes.append(f"{INDEX_FILE} is stale: it places {listed(moved)} in the wrong shard")
    if unlisted := [name for name in tensors if name not in weight_map]:
        notes.append(f"{INDEX_FILE} does not list {listed(unlisted)}, which the shards hold")
    return notes
