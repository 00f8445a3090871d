from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.checkpoint.reader import Checkpoint
from tests.checkpoint.gguf_files import reference_model, write_gguf
from tests.cli.run import halfbyte


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", reference_model("llama"))


def test_json_says_what_was_written(file: Path, tmp_path: Path) -> None:
    ran = halfbyte("import-gguf", file, "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    written = Checkpoint.open(tmp_path / "out")
    assert ran.json["architecture"] == "llama"
    assert ran.json["written_bytes"] == sum(info.nbytes for info in written.tensors.values())
    assert ran.json["stored_types"] == {"F32": len(written.tensors)}


def test_text_and_refusal_to_overwrite(file: Path, tmp_path: Path) -> None:
    assert "parameters (21 F32)" in halfbyte("import-gguf", file, "-o", tmp_path / "out").out
    again = halfbyte("import-gguf", file, "-o", tmp_path / "out")
    assert again.code == 2
    assert "--overwrite" in again.complaint


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    missing = halfbyte("import-gguf", tmp_path / "none.gguf", "-o", tmp_path / "out")
    assert missing.code == 2
    assert "none.gguf" in missing.complaint
    (tmp_path / "text.gguf").write_text("not a model")
    other = halfbyte("import-gguf", tmp_path / "text.gguf", "-o", tmp_path / "out")
    assert other.code == 2
    assert "is no complete GGUF file" in other.complaint
    assert not (tmp_path / "out").exists()
