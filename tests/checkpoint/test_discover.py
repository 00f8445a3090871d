from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import tensors, write_checkpoint

INDEX = "model.safetensors.index.json"


def shard(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def sharded(
    path: Path, total: int, index_total: int | None = None, extra: dict[str, str] | None = None
) -> Path:
    """Tensors t1..t3 spread over ``total`` files, an index that speaks of ``index_total`` files."""
    files: dict[str, dict[str, torch.Tensor]] = {shard(n, total): {} for n in range(1, total + 1)}
    for number in (1, 2, 3):
        files[shard(min(number, total), total)].update(tensors(**{f"t{number}": (2, 2)}))
    index_total = total if index_total is None else index_total
    index = {f"t{n}": shard(min(n, index_total), index_total) for n in (1, 2, 3)}
    return write_checkpoint(path, files, index | (extra or {}))


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("indexed", [True, False])
def test_complete_sets_of_shards(tmp_path: Path, total: int, indexed: bool) -> None:
    path = sharded(tmp_path, total)
    if not indexed:
        (path / INDEX).unlink()
    checkpoint = Checkpoint.open(path)
    assert list(checkpoint.tensors) == ["t1", "t2", "t3"]
    assert checkpoint.notes == []


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """Of three shards that the index names the second is gone."""
    path = sharded(tmp_path, 3)
    (path / shard(2, 3)).unlink()
    with pytest.raises(HalfbyteError, match=r"model-00002-of-00003\.safetensors named by .* does not exist"):
        Checkpoint.open(path)
    (path / INDEX).unlink()
    with pytest.raises(HalfbyteError, match=r"of 3 shards .*, 2 is missing"):
        Checkpoint.open(path)


def test_a_stale_index_of_complete_shards_is_tolerated(tmp_path: Path) -> None:
    """The index speaks of three files, but the tensors lie in two, which are complete."""
    checkpoint = Checkpoint.open(sharded(tmp_path, 2, index_total=3))
    assert set(checkpoint.tensors) == {"t1", "t2", "t3"}
    assert "stale" in checkpoint.notes[0]
    assert shard(1, 3) in checkpoint.notes[0]


def test_a_stale_index_beside_the_single_file_is_tolerated(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"model.safetensors": tensors(a=(2,))}, {"a": shard(1, 2)})
    assert list(Checkpoint.open(path).tensors) == ["a"]


def test_a_stale_index_that_lists_more_than_the_shards_hold_is_not(tmp_path: Path) -> None:
    path = sharded(tmp_path, 2, index_total=3, extra={"t4": shard(3, 3)})
    with pytest.raises(HalfbyteError, match=r"model-00001-of-00003\.safetensors.* does not exist"):
        Checkpoint.open(path)


def test_tensors_in_other_shards_than_the_index_says(tmp_path: Path) -> None:
    path = sharded(tmp_path, 2, extra={"t3": shard(1, 2)})
    checkpoint = Checkpoint.open(path)
    assert checkpoint.tensors["t3"].file.name == shard(2, 2)
    assert "places t3 in the wrong shard" in checkpoint.notes[0]


def test_tensors_that_the_index_forgot_are_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {shard(1, 1): tensors(a=(2,), mtp=(2,))}, {"a": shard(1, 1)})
    checkpoint = Checkpoint.open(path)
    assert set(checkpoint.tensors) == {"a", "mtp"}
    assert "does not list mtp" in checkpoint.notes[0]


def test_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="lists t9, which no shard holds"):
        Checkpoint.open(sharded(tmp_path, 2, extra={"t9": shard(1, 2)}))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards(tmp_path: Path, indexed: bool) -> None:
    files = {shard(1, 2): tensors(a=(2,), b=(2,)), shard(2, 2): tensors(b=(2,), c=(2,))}
    index = {"a": shard(1, 2), "b": shard(1, 2), "c": shard(2, 2)}
    path = write_checkpoint(tmp_path, files, index if indexed else None)
    with pytest.raises(HalfbyteError, match=r"'b' is in two shards, model-00001-.* and model-00002-"):
        Checkpoint.open(path)


def test_two_complete_sets_are_ambiguous(tmp_path: Path) -> None:
    files = {shard(1, 1): tensors(a=(2,)), shard(1, 2): tensors(a=(2,)), shard(2, 2): tensors(b=(2,))}
    with pytest.raises(HalfbyteError, match="complete sets of"):
        Checkpoint.open(write_checkpoint(tmp_path, files))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not readable as JSON"),
        ('{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}', "'a' occurs twice"),
        ('{"weight_map": []}', "must map tensor names"),
        ("{}", "must map tensor names"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "is not the name of a file beside the index"),
    ],
)
def test_broken_indexes(tmp_path: Path, index: str, message: str) -> None:
    path = write_checkpoint(tmp_path, {"model.safetensors": tensors(a=(2,))})
    (path / INDEX).write_text(index)
    with pytest.raises(HalfbyteError, match=message):
        Checkpoint.open(path)


def test_a_truncated_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    path = sharded(tmp_path, 2)
    whole = (path / shard(2, 2)).read_bytes()
    (path / shard(2, 2)).write_bytes(whole[:-1])
    with pytest.raises(HalfbyteError, match=r"model-00002-of-00002\.safetensors: truncated"):
        Checkpoint.open(path)


def test_other_safetensors_files_are_left_alone(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path, {"model.safetensors": tensors(a=(2,)), "consolidated.safetensors": tensors(x=(2,))}
    )
    assert list(Checkpoint.open(path).tensors) == ["a"]


def test_a_huge_set_is_described_without_listing_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"model-00001-of-999999999.safetensors": tensors(a=(2,))})
    with pytest.raises(HalfbyteError, match=r"2, 3, 4 and \d+ more is missing"):
        Checkpoint.open(path)


def test_the_index_is_json_of_names(tmp_path: Path) -> None:
    path = sharded(tmp_path, 2)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["t1"] = None
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(HalfbyteError, match="None is not the name of a file"):
        Checkpoint.open(path)
