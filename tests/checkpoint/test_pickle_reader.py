from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import WeightSource
from tests.checkpoint.files import write_checkpoint

TENSORS = {"a": torch.randn(4, 6).bfloat16(), "b": torch.randn(2, 3, 4).transpose(1, 2)}


def pickled(path: Path, files: dict[str, Any], index: dict[str, str] | None = None) -> Path:
    write_checkpoint(path, {})
    for name, content in files.items():
        torch.save(content, path / name)
    if index is not None:
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_refused_unless_allowed(tmp_path: Path) -> None:
    path = pickled(tmp_path, {"pytorch_model.bin": TENSORS})
    with pytest.raises(HalfbyteError, match="--allow-pickle"):
        Checkpoint.open(path)
    assert list(Checkpoint.open(path, allow_pickle=True).tensors) == ["a", "b"]


def test_reads_like_any_checkpoint(tmp_path: Path) -> None:
    index = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    path = pickled(tmp_path, {file: {name: TENSORS[name]} for name, file in index.items()}, index)
    checkpoint = Checkpoint.open(path, allow_pickle=True)
    assert checkpoint.shapes == {"a": (4, 6), "b": (2, 4, 3)}
    assert {name: info.dtype for name, info in checkpoint.tensors.items()} == {"a": "BF16", "b": "F32"}
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.load(name), tensor)
        assert torch.equal(torch.from_numpy(checkpoint.numpy(name)), tensor.float())
        stream = io.BytesIO()
        checkpoint.copy_bytes(name, stream)
        assert stream.getvalue() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert torch.equal(checkpoint.load_rows("b", 1, 2), TENSORS["b"][1:2])
    assert torch.equal(
        checkpoint.load_source(WeightSource("b", expert=0, transposed=True)), TENSORS["b"][0].t()
    )


def test_safetensors_beside_pickles_win(tmp_path: Path) -> None:
    path = pickled(tmp_path, {"pytorch_model.bin": TENSORS})
    write_checkpoint(tmp_path, {"model.safetensors": {"s": torch.zeros(2)}})
    assert list(Checkpoint.open(path).tensors) == ["s"]


class Hostile:
    """Runs a command when a plain unpickler reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def test_code_in_a_pickle_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = pickled(tmp_path, {"pytorch_model.bin": {"a": Hostile()}})
    with pytest.raises(HalfbyteError, match=r"pytorch_model\.bin: cannot be read as a pickle of tensors"):
        Checkpoint.open(path, allow_pickle=True)
    assert not (tmp_path / "hostile").exists()


def test_missing_broken_and_doubled_files(tmp_path: Path) -> None:
    index = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    path = pickled(tmp_path / "missing", {"pytorch_model-1.bin": {"a": TENSORS["a"]}}, index)
    with pytest.raises(HalfbyteError, match=r"pytorch_model-2\.bin does not exist"):
        Checkpoint.open(path, allow_pickle=True)
    path = pickled(tmp_path / "twice", {file: {"a": TENSORS["a"]} for file in index.values()}, index)
    with pytest.raises(HalfbyteError, match=r"'a' is in pytorch_model-1\.bin and pytorch_model-2\.bin"):
        Checkpoint.open(path, allow_pickle=True)
    path = pickled(tmp_path / "numbers", {"pytorch_model.bin": {"a": 1}})
    with pytest.raises(HalfbyteError, match="expected a dictionary of tensors"):
        Checkpoint.open(path, allow_pickle=True)
    path = pickled(tmp_path / "garbage", {})
    (path / "pytorch_model.bin").write_bytes(b"garbage")
    with pytest.raises(HalfbyteError, match="cannot be read as a pickle"):
        Checkpoint.open(path, allow_pickle=True)
