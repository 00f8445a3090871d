"""The writer against a process that dies and a disk that refuses, each in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import write_checkpoint

# Writes eight tensors in four shards over OUT; with MORE only the second shard again, its values larger by that. Every
# write, fsync, rename, link and removal is one step; the process kills itself before step number KILL_AT. Prints the
# steps that it took. The report is made of notes, most of which a resumed run has from the one before.
PROGRAM = """
import os, shutil, signal, sys
from pathlib import Path
out, source, kill_at, more = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
steps = 0
def counted(function):
    def step(*arguments, **named):
        global steps
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
        return function(*arguments, **named)
    return step
os.fsync = counted(os.fsync)
os.link = counted(os.link)
shutil.rmtree = counted(shutil.rmtree)
Path.rename, Path.unlink = counted(Path.rename), counted(Path.unlink)
from halfbyte.checkpoint import writer as module
from halfbyte.checkpoint.writer import CheckpointWriter, Entry
from halfbyte.checkpoint.redo import Redo
entries = [Entry(f"t{n}", "U8", (1000,)) for n in range(8)]
redo = Redo({"t2"}, lambda folder: {"source": "s"}) if more else None
with CheckpointWriter(
    out, entries, overwrite=True, shard_bytes=2000, redo=redo, origin={"source": "s"}, fingerprint="f"
) as writer:
    for entry in writer.missing():
        content = bytes([int(entry.name[1:]) + more]) * 1000
        writer.keep_notes(entry.name, {"about": entry.name})
        def halves(file):
            counted(file.write)(content[:500])
            counted(file.write)(content[500:])
        writer.write(entry.name, halves)
    report = {entry.name: writer.kept_notes(entry.name) for entry in entries}
    writer.finish({"architectures": ["XForCausalLM"]}, source, {"report.json": report})
print(steps)
"""


def run(out: Path, source: Path, kill_at: int = -1, more: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out), str(source), str(kill_at), str(more)],
        capture_output=True,
        text=True,
    )


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def without_marks(found: dict[str, bytes]) -> dict[str, bytes]:
    """Without what the next run clears up."""
    return {
        name: content
        for name, content in found.items()
        if name != "halfbyte-partial.json" and not name.endswith(".notes.json")
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "source", {})
    (path / "tokenizer.json").write_text("{}")
    return path


def test_kill_9_at_every_step(tmp_path: Path, source: Path) -> None:
    """Whenever the process dies, OUT is the old checkpoint or the new one, and a rerun ends in the same bytes."""
    done = run(tmp_path / "whole", source)
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    new = contents(tmp_path / "whole")
    resumed = 0
    for kill_at in range(steps):
        out = write_checkpoint(tmp_path / f"out{kill_at}", {"model.safetensors": {"old": torch.zeros(2)}})
        old = contents(out)
        assert run(out, source, kill_at).returncode == -9
        if out.exists():
            assert without_marks(contents(out)) in (old, new)
        partial = out.with_name(out.name + ".partial")
        if partial.exists() and not (partial / "config.json").exists():
            with pytest.raises(HalfbyteError):
                Checkpoint.open(partial)
        resumed += any(partial.glob("*.safetensors"))
        again = run(out, source)
        assert again.returncode == 0, again.stderr
        assert contents(out) == new
        assert not partial.exists()
    assert resumed > steps // 2
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_kill_9_at_every_step_of_a_redo(tmp_path: Path, source: Path) -> None:
    old_out, new_out = tmp_path / "old", tmp_path / "new"
    run(old_out, source)
    old = contents(old_out)
    shutil.copytree(old_out, new_out)
    done = run(new_out, source, more=100)
    assert done.returncode == 0, done.stderr
    new = contents(new_out)
    assert {name for name in new if new[name] != old[name]} == {
        "model-00002-of-00004.safetensors",
        "report.json",
    }
    for kill_at in range(int(done.stdout)):
        out = tmp_path / f"out{kill_at}"
        shutil.copytree(old_out, out)
        assert run(out, source, kill_at, more=100).returncode == -9
        if out.exists():
            assert without_marks(contents(out)) in (old, new)
        again = run(out, source, more=100)
        assert again.returncode == 0, again.stderr
        assert contents(out) == new
        assert not out.with_name(out.name + ".partial").exists()


def test_a_disk_that_refuses(tmp_path: Path, source: Path) -> None:
    """The kernel refuses to let any file grow beyond a limit, as a full disk refuses: one line, resumable."""
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))\n"
        "from halfbyte.errors import HalfbyteError\n"
        "from halfbyte.checkpoint.writer import CheckpointWriter, Entry\n"
        "import sys\n"
        "sizes = [500, 500, 4000]\n"
        "entries = [Entry(f't{n}', 'U8', (size,)) for n, size in enumerate(sizes)]\n"
        "try:\n"
        "    with CheckpointWriter(sys.argv[1], entries, shard_bytes=1000, fingerprint='f') as writer:\n"
        "        for entry in entries: writer.write(entry.name, bytes(entry.shape[0]))\n"
        "except HalfbyteError as error: print(error)\n"
    )
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", program, str(out)], capture_output=True, text=True, check=True
    )
    assert "cannot be written (File too large); finished shards stay in" in done.stdout
    assert done.stdout.count("\n") == 1
    assert not out.exists()
    assert sorted(contents(tmp_path / "out.partial")) == [
        "halfbyte-partial.json",
        "model-00001-of-00002.safetensors",
    ]
