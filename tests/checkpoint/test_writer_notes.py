"""What a run keeps beside its shards, and runs that do some of them again."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from halfbyte.checkpoint import durable
from halfbyte.checkpoint.manifest import Manifest
from halfbyte.checkpoint.redo import Redo
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import CONFIG
from tests.checkpoint.test_writer import ENTRIES, TENSORS, contents, source, write

__all__ = ["source"]
NAMES = [entry.name for entry in ENTRIES]


ORIGIN = {"source": "s", "rotated": False}


def opened(
    out: Path,
    fingerprint: str = "f",
    redo: Collection[str] | None = None,
    origin: dict[str, Any] = ORIGIN,
    of_out: dict[str, Any] | None = ORIGIN,
) -> CheckpointWriter:
    """of_out: what OUT says that it was made of."""
    again = None if redo is None else Redo(redo, lambda _: of_out)
    return CheckpointWriter(out, ENTRIES, shard_bytes=1, redo=again, origin=origin, fingerprint=fingerprint)


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


def test_a_run_without_notes_does_not_discard_them_either(tmp_path: Path, source: Path) -> None:
    begun(tmp_path / "out", ["a", "b"])
    before = contents(tmp_path / "out.partial")
    with pytest.raises(HalfbyteError, match=r"out\.partial: holds finished work of another"):
        write(tmp_path / "out", source)
    assert contents(tmp_path / "out.partial") == before


def test_shards_without_notes_are_in_no_other_runs_way(tmp_path: Path) -> None:
    """What comes before the first block is finished at once; the block after it may be what failed."""
    with opened(tmp_path / "out", "a recipe that fails") as writer:
        writer.write("a", TENSORS["a"])
        writer.keep_notes("b", {"about": "b"})
    with opened(tmp_path / "out", "another") as writer:
        assert len(writer.missing()) == len(NAMES)
        assert "discarded" in writer.notes[0]


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


def test_nothing_is_redone_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(
        HalfbyteError, match=r"out: is not there, so nothing of it can be redone; accepted: an output"
    ):
        opened(tmp_path / "out", redo=["b"])
    assert not any(tmp_path.iterdir())


def test_other_tensors_in_what_is_kept_are_refused(tmp_path: Path, source: Path) -> None:
    """Another scheme for all would otherwise quantize all anew."""
    out = tmp_path / "out"
    complete(out, source)
    shard = out / "model-00004-of-00005.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b'"U8"', b'"I8"') if b'"U8"' in content else b" " + content[1:])
    with pytest.raises(
        HalfbyteError, match=r"out: 1 shards that are not to be redone hold other tensors .* \(d, ...\)"
    ):
        opened(out, redo=["b"])
    assert not (tmp_path / "out.partial").exists()


def test_damaged_shards_are_written_again(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    complete(out, source)
    shard = out / "model-00004-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with opened(out, redo=["b"]) as writer:
        assert [entry.name for entry in writer.missing()] == ["b", "d"]


def test_only_what_is_of_one_model_is_kept(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    complete(out, source)
    before = contents(out)
    for of_out, said in (
        (
            {"source": "s", "rotated": True},
            r'out: was made of source "s", rotated true, and this run is of .* false',
        ),
        (None, r"out: does not say what it was made of"),
    ):
        with pytest.raises(HalfbyteError, match=said) as caught:
            opened(out, redo=["b"], of_out=of_out)
        assert "\n" not in str(caught.value)
        assert contents(out) == before
        assert not (tmp_path / "out.partial").exists()


def test_only_what_is_of_one_model_is_kept_of_an_unfinished_run(tmp_path: Path) -> None:
    begun(tmp_path / "out", ["a", "b"])
    before = contents(tmp_path / "out.partial")
    with pytest.raises(HalfbyteError, match=r'out\.partial: was made of source "s", .* of source "t"'):
        opened(tmp_path / "out", redo=["b"], origin={**ORIGIN, "source": "t"})
    assert contents(tmp_path / "out.partial") == before
    with opened(tmp_path / "out") as writer:
        assert writer.kept_notes("b") == {"about": "b"}


def test_a_redo_in_which_nothing_is_kept_may_be_of_anything(tmp_path: Path, source: Path) -> None:
    complete(tmp_path / "out", source)
    with opened(tmp_path / "out", redo=NAMES, of_out=None) as writer:
        assert len(writer.missing()) == len(NAMES)


def test_a_redo_discards_no_finished_work_that_it_cannot_keep(tmp_path: Path) -> None:
    """With another plan the shards of an unfinished run are no shards of this one."""
    begun(tmp_path / "out", ["a", "b"])
    before = contents(tmp_path / "out.partial")
    with pytest.raises(HalfbyteError, match=r"out\.partial: holds finished work of another"):
        CheckpointWriter(
            tmp_path / "out",
            ENTRIES[:4],
            shard_bytes=1,
            redo=Redo(["b"], lambda _: ORIGIN),
            origin=ORIGIN,
            fingerprint="f",
        )
    assert contents(tmp_path / "out.partial") == before


def interrupted_redo(out: Path, source: Path) -> None:
    """Over a complete OUT: ``b`` is done again, ``c`` is not."""
    complete(out, source)
    with opened(out, redo=["b", "c"]) as writer:
        writer.keep_notes("b", {"again": "b"})
        writer.write("b", TENSORS["b"])


def test_an_interrupted_redo_goes_on(tmp_path: Path, source: Path) -> None:
    interrupted_redo(tmp_path / "out", source)
    with opened(tmp_path / "out", redo=["c", "b"]) as writer:
        assert [entry.name for entry in writer.missing()] == ["c"]
        assert writer.kept_notes("b") == {"again": "b"}
        writer.write("c", TENSORS["c"])
        writer.finish(CONFIG, source)
    complete(tmp_path / "straight", source)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_an_interrupted_redo_is_no_run_of_the_same_recipe(tmp_path: Path, source: Path) -> None:
    interrupted_redo(tmp_path / "out", source)
    with pytest.raises(HalfbyteError, match=r"out\.partial: holds finished work of another"):
        CheckpointWriter(
            tmp_path / "out", ENTRIES, shard_bytes=1, overwrite=True, origin=ORIGIN, fingerprint="f"
        )
    (tmp_path / "second").mkdir()
    complete(tmp_path / "second/out", source)
    with opened(tmp_path / "second/out", redo=["b"]):
        pass
    with CheckpointWriter(
        tmp_path / "second/out", ENTRIES, shard_bytes=1, overwrite=True, origin=ORIGIN, fingerprint="f"
    ) as writer:
        assert len(writer.missing()) == len(NAMES)


def test_a_redo_that_did_nothing_is_in_no_other_redos_way(tmp_path: Path, source: Path) -> None:
    """The second one takes from OUT what the first one meant to do again."""
    complete(tmp_path / "out", source)
    with opened(tmp_path / "out", redo=["b"]):
        pass
    with opened(tmp_path / "out", redo=["c"]) as writer:
        assert [entry.name for entry in writer.missing()] == ["c"]


def test_shards_are_copied_where_links_are_not_to_be_had(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    def halfway(content: BinaryIO, copied: BinaryIO) -> None:
        copied.write(content.read(9))
        under_way.append(Path(copied.name).suffix)
        copied.write(content.read())

    under_way: list[str] = []

    out = tmp_path / "out"
    complete(out, source)
    monkeypatch.setattr(durable.os, "link", refused)
    monkeypatch.setattr(durable.shutil, "copyfileobj", halfway)
    with opened(out, redo=["b"]) as writer:
        assert [entry.name for entry in writer.missing()] == ["b"]
        for name in "acde":
            assert writer.finished()[name].file.stat().st_nlink == 1
    assert under_way == [".tmp"] * 4


def test_a_redo_stopped_while_it_takes_shards_over_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    complete(tmp_path / "out", source)
    before = contents(tmp_path / "out")
    with monkeypatch.context() as stopped:
        stopped.setattr(durable.os, "link", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path / "out", redo=["b"])
    assert not (tmp_path / "out.partial").exists()
    assert contents(tmp_path / "out") == before
    with opened(tmp_path / "out", redo=["b"]) as writer:
        assert [entry.name for entry in writer.missing()] == ["b"]


def test_notes_outlive_a_checkpoint_that_cannot_get_its_place(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    begun(out, NAMES)
    with opened(out) as writer:
        out.mkdir()
        with pytest.raises(HalfbyteError, match="exists; choose another output"):
            writer.finish(CONFIG, source)
    out.rmdir()
    with opened(out) as writer:
        assert writer.kept_notes("a") == {"about": "a"}


def test_what_a_killed_run_left_in_a_complete_checkpoint_is_cleared_up(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    complete(out, source)
    before = contents(out)
    Manifest("digest").write(out)
    (out / "model-00001-of-00005.safetensors.notes.json").write_text("{}")
    copied = tmp_path / "copied"
    with opened(copied) as writer:
        for name in NAMES:
            writer.write(name, TENSORS[name])
        writer.finish(CONFIG, out)
    assert contents(copied) == before
    with pytest.raises(HalfbyteError, match="exists; choose another output"):
        opened(out)
    assert contents(out) == before
