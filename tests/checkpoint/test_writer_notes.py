"""What a run keeps beside its shards, and runs that do some of them again."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import CONFIG
from tests.checkpoint.test_writer import ENTRIES, TENSORS, contents, source

__all__ = ["source"]
NAMES = [entry.name for entry in ENTRIES]


def opened(out: Path, fingerprint: str = "f", redo: Collection[str] | None = None) -> CheckpointWriter:
    return CheckpointWriter(out, ENTRIES, shard_bytes=1, keep_others=True, redo=redo, fingerprint=fingerprint)


def begun(out: Path, names: Collection[str], fingerprint: str = "f") -> None:
    """Writes some tensors with notes, each a shard of its own, and stops."""
    with opened(out, fingerprint) as writer:
        for name in names:
            writer.keep_notes(name, {"about": name})
            writer.write(name, TENSORS[name])


def complete(out: Path, source: Path) -> None:
    with opened(out) as writer:
        for name in NAMES:
            writer.write(name, TENSORS[name])
        writer.finish(CONFIG, source)


def test_notes_stay_with_finished_shards_and_leave_with_the_run(tmp_path: Path, source: Path) -> None:
    begun(tmp_path / "out", ["a", "b"])
    with opened(tmp_path / "out") as writer:
        assert writer.kept_notes("a") == {"about": "a"}
        assert writer.kept_notes("c") == {}
        assert set(writer.finished()) == {"a", "b"}
        assert writer.finished()["a"].file.parent == writer.folder
        for name in "cde":
            writer.write(name, TENSORS[name])
        writer.finish(CONFIG, source, {"report.json": {"all": "well"}})
    assert json.loads((tmp_path / "out/report.json").read_text()) == {"all": "well"}
    assert not list((tmp_path / "out").glob("*notes*"))


def test_notes_of_a_shard_that_was_never_finished_are_gone(tmp_path: Path) -> None:
    begun(tmp_path / "out", ["a"])
    with opened(tmp_path / "out") as writer:
        writer.keep_notes("b", {"about": "b"})
    with opened(tmp_path / "out") as writer:
        assert writer.kept_notes("a") == {"about": "a"}
        assert writer.kept_notes("b") == {}


def test_damaged_notes_are_named(tmp_path: Path) -> None:
    begun(tmp_path / "out", ["a"])
    (notes,) = (tmp_path / "out.partial").glob("*notes*")
    notes.write_text("{")
    with opened(tmp_path / "out") as writer, pytest.raises(HalfbyteError, match=f"{notes.name}: is damaged"):
        writer.kept_notes("a")


def test_finished_work_of_another_run_is_kept_and_said(tmp_path: Path) -> None:
    begun(tmp_path / "out", ["a", "b"])
    before = contents(tmp_path / "out.partial")
    with pytest.raises(
        HalfbyteError, match=r"out\.partial: holds finished work of another source, recipe, data"
    ):
        opened(tmp_path / "out", "other")
    assert contents(tmp_path / "out.partial") == before


def test_nothing_finished_is_nothing_lost(tmp_path: Path) -> None:
    with opened(tmp_path / "out", "other") as writer:
        writer.keep_notes("a", {})
        with opened(tmp_path / "elsewhere") as second:
            assert len(second.missing()) == len(NAMES)
    with opened(tmp_path / "out") as writer:
        assert len(writer.missing()) == len(NAMES)


@pytest.mark.parametrize("whole", [True, False])
def test_some_shards_again(whole: bool, tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    if whole:
        complete(out, source)
    else:
        begun(out, ["a", "b", "d"])
    with opened(out, "another recipe", redo=["b"]) as writer:
        assert [entry.name for entry in writer.missing()] == (["b"] if whole else ["b", "c", "e"])
        for entry in writer.missing():
            writer.write(entry.name, TENSORS[entry.name])
        writer.finish(CONFIG, source)
    complete(tmp_path / "straight", source)
    assert contents(out) == contents(tmp_path / "straight")


def test_a_redo_that_stops_leaves_the_output_as_it_was(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    complete(out, source)
    before = contents(out)
    with opened(out, "another recipe", redo=["b"]):
        pass
    assert contents(out) == before


def test_shards_that_hold_something_else_are_written_again(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    complete(out, source)
    shard = out / "model-00004-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with opened(out, redo=["b"]) as writer:
        assert [entry.name for entry in writer.missing()] == ["b", "d"]
