from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoint.dtypes import STORED_NAMES
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import CONFIG, write_checkpoint

TENSORS = {
    "a": torch.randn(4, 4).bfloat16(),
    "b": torch.randn(3).to(torch.float8_e4m3fn),
    "c": torch.tensor([4, 4]),
    "d": torch.randint(-9, 9, (2, 8), dtype=torch.int32),
    "e": torch.tensor(1.5),
}
ENTRIES = [Entry(name, STORED_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint to copy from, with files of all sorts beside the weights."""
    path = write_checkpoint(tmp_path / "source", {"model.safetensors": TENSORS})
    for name in (
        "tokenizer.json",
        "tokenizer.model",
        "generation_config.json",
        "chat_template.jinja",
        "vocab.txt",
    ):
        (path / name).write_text(name)
    for name in ("modeling_x.py", "LICENSE", "special_tokens_map.json", "merges.txt"):
        (path / name).write_text(name)
    for name in (
        "README.md",
        "pytorch_model.bin",
        "model.gguf",
        ".gitattributes",
        "pytorch_model.bin.index.json",
    ):
        (path / name).write_text(name)
    (path / "hf_quant_config.json").write_text("{}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("tool")
    (path / "original").mkdir()
    return path


def write(out: Path, source: Path, shard_bytes: int = 1 << 30, overwrite: bool = False) -> CheckpointWriter:
    with CheckpointWriter(
        out, ENTRIES, overwrite=overwrite, shard_bytes=shard_bytes, fingerprint="f"
    ) as writer:
        for entry in writer.missing():
            writer.write(entry.name, TENSORS[entry.name])
        writer.finish(CONFIG, source)
    return writer


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def leftovers(out: Path) -> list[str]:
    return sorted(file.name for file in out.parent.iterdir() if file.name not in (out.name, "source"))


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40])
def test_safetensors_reads_what_was_written(tmp_path: Path, source: Path, shard_bytes: int) -> None:
    out = tmp_path / "out"
    write(out, source, shard_bytes)
    loaded: dict[str, torch.Tensor] = {}
    files = sorted(out.glob("*.safetensors"))
    for file in files:
        loaded |= load_file(file)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name].float(), tensor.float())
    checkpoint = Checkpoint.open(out)
    assert checkpoint.notes == []
    assert checkpoint.config == CONFIG
    index = out / "model.safetensors.index.json"
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        assert not index.exists()
    else:
        parsed = json.loads(index.read_text())
        assert parsed["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert parsed["weight_map"] == {
            name: info.file.name for name, info in sorted(checkpoint.tensors.items())
        }
    assert leftovers(out) == []


def test_files_beside_the_weights(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    write(out, source)
    copied = contents(out).keys() - {"model.safetensors", "config.json"}
    assert copied == {
        *("tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja", "vocab.txt"),
        *("modeling_x.py", "LICENSE", "special_tokens_map.json", "merges.txt"),
        "additional_chat_templates/tool.jinja",
    }
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"


def test_untouched_tensors_stay_byte_for_byte(tmp_path: Path, source: Path) -> None:
    out, checkpoint = tmp_path / "out", Checkpoint.open(source)
    with CheckpointWriter(out, ENTRIES, shard_bytes=40, fingerprint="f") as writer:
        for name in reversed(TENSORS):  # any order

            def copy(file: BinaryIO, name: str = name) -> None:
                checkpoint.copy_bytes(name, file)

            writer.write(name, copy)
        writer.finish(CONFIG, source)
    write(tmp_path / "straight", source, 40)
    assert contents(out) == contents(tmp_path / "straight")


def test_bytes_are_taken_too(tmp_path: Path, source: Path) -> None:
    with CheckpointWriter(tmp_path / "out", [Entry("t", "I16", (2,))], fingerprint="") as writer:
        with pytest.raises(HalfbyteError, match="'t' has 3 bytes, planned 4"):
            writer.write("t", b"abc")
        writer.write("t", memoryview(b"abcd"))
        writer.finish(CONFIG, source)
    assert Checkpoint.open(tmp_path / "out").load("t").tolist() == [0x6261, 0x6463]


def test_every_tensor_exactly_once_and_as_planned(tmp_path: Path, source: Path) -> None:
    with CheckpointWriter(tmp_path / "out", ENTRIES, fingerprint="f") as writer:
        with pytest.raises(HalfbyteError, match="'z' was not planned"):
            writer.write("z", TENSORS["a"])
        with pytest.raises(HalfbyteError, match=r"'a' is F32 \[4, 4\], planned BF16 \[4, 4\]"):
            writer.write("a", TENSORS["a"].float())
        with pytest.raises(HalfbyteError, match=r"'a' is BF16 \[2, 8\], planned BF16 \[4, 4\]"):
            writer.write("a", TENSORS["a"].reshape(2, 8))
        writer.write("a", TENSORS["a"])
        with pytest.raises(HalfbyteError, match="'a' is written already"):
            writer.write("a", TENSORS["a"])
        with pytest.raises(HalfbyteError, match=r"never written: b, c, d and 1 more"):
            writer.finish(CONFIG, source)
    assert leftovers(tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [b"", bytes(31), bytes(33)])
def test_functions_that_write_another_number_of_bytes(tmp_path: Path, given: bytes) -> None:
    def write_bytes(file: BinaryIO) -> None:
        file.write(given)

    writer = CheckpointWriter(tmp_path / "out", ENTRIES, fingerprint="f")
    with pytest.raises(HalfbyteError, match=f"'a' got {len(given)} bytes, planned 32"):
        writer.write("a", write_bytes)
    assert leftovers(tmp_path / "out") == []


def test_an_existing_output_is_refused_then_replaced(tmp_path: Path, source: Path) -> None:
    out = write_checkpoint(tmp_path / "out", {"model.safetensors": {"old": torch.zeros(2)}})
    before = contents(out)
    with pytest.raises(HalfbyteError, match="out: exists; choose another output or pass --overwrite"):
        write(out, source)
    with (
        pytest.raises(HalfbyteError, match="never written"),
        CheckpointWriter(out, ENTRIES, overwrite=True, fingerprint="f") as writer,
    ):
        writer.finish(CONFIG, source)
    assert contents(out) == before
    write(out, source, overwrite=True)
    assert set(Checkpoint.open(out).tensors) == set(TENSORS)
    assert leftovers(out) == []


def test_only_checkpoints_are_overwritten(tmp_path: Path, source: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(HalfbyteError, match=r"home: is no checkpoint \(it has no config\.json\)"):
        write(home, source, overwrite=True)
    with pytest.raises(HalfbyteError, match=r"letter\.txt: is no checkpoint"):
        write(home / "letter.txt", source, overwrite=True)
    assert (home / "letter.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", source, overwrite=True)
    assert Checkpoint.open(tmp_path / "empty").notes == []


def test_the_source_is_never_replaced(source: Path) -> None:
    before = contents(source)
    with pytest.raises(HalfbyteError, match="is or holds the source"):
        write(source, source, overwrite=True)
    assert contents(source) == before


def interrupted(out: Path, fingerprint: str = "f", after: int = 3) -> None:
    """Write the first tensors in shards of one tensor each, then Ctrl-C inside the next."""

    def interrupt(file: BinaryIO) -> None:
        file.write(b"x")
        raise KeyboardInterrupt

    def run() -> None:
        with CheckpointWriter(out, ENTRIES, shard_bytes=1, fingerprint=fingerprint) as writer:
            for entry in ENTRIES[:after]:
                writer.write(entry.name, TENSORS[entry.name])
            writer.write(ENTRIES[after].name, interrupt)

    with pytest.raises(KeyboardInterrupt):
        run()


def test_an_interrupted_run_is_resumed(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    interrupted(out)
    assert not out.exists()
    with pytest.raises(HalfbyteError, match=r"no config\.json"):
        Checkpoint.open(tmp_path / "out.partial")
    assert not list((tmp_path / "out.partial").glob("*.tmp"))
    with CheckpointWriter(out, ENTRIES, shard_bytes=1, fingerprint="f") as writer:
        assert [entry.name for entry in writer.missing()] == ["d", "e"]
        assert "3 of 5 shards are finished" in writer.notes[0]
        for entry in writer.missing():
            writer.write(entry.name, TENSORS[entry.name])
        writer.finish(CONFIG, source)
    write(tmp_path / "straight", source, 1)
    assert contents(out) == contents(tmp_path / "straight")


def test_another_run_discards_the_partial_output(tmp_path: Path, source: Path) -> None:
    interrupted(tmp_path / "out", fingerprint="other recipe")
    with CheckpointWriter(tmp_path / "out", ENTRIES, shard_bytes=1, fingerprint="f") as writer:
        assert len(writer.missing()) == len(ENTRIES)
        assert "discarded" in writer.notes[0]


def test_a_damaged_shard_of_a_partial_output_is_written_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    shard = tmp_path / "out.partial" / "model-00002-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with CheckpointWriter(tmp_path / "out", ENTRIES, shard_bytes=1, fingerprint="f") as writer:
        assert [entry.name for entry in writer.missing()] == ["b", "d", "e"]


def test_an_interruption_before_the_first_shard_leaves_nothing(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", after=0)
    assert leftovers(tmp_path / "out") == []


def test_foreign_directories_of_that_name_are_left_alone(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("mine")
    with pytest.raises(HalfbyteError, match="is no partial output of halfbyte"):
        write(tmp_path / "out", source)
    assert (tmp_path / "out.partial" / "mine").exists()


def test_two_writers_of_one_output(tmp_path: Path, source: Path) -> None:
    with CheckpointWriter(tmp_path / "out", ENTRIES, fingerprint="f") as writer:
        writer.write("a", TENSORS["a"])
        with pytest.raises(HalfbyteError, match="another process is writing it"):
            CheckpointWriter(tmp_path / "out", ENTRIES, fingerprint="g")
        for entry in writer.missing():
            writer.write(entry.name, TENSORS[entry.name])
        writer.finish(CONFIG, source)
    assert Checkpoint.open(tmp_path / "out").notes == []


def test_room_is_checked_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(
        HalfbyteError, match=r"out: needs 1,152,921,504,606\.8 MB, the disk has [\d.,]+ MB free"
    ):
        CheckpointWriter(tmp_path / "out", [Entry("t", "U8", (1 << 60,))], fingerprint="f")
    assert leftovers(tmp_path / "out") == []
