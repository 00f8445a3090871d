from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.checkpoint.reader import Checkpoint
from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qserve")
    source = tiny_model("llama", folder / "source", num_hidden_layers=1)
    scheme = ("--scheme", "w4a8-int8", "--format", "qserve")
    ran = halfbyte("quantize", source, "-o", folder / "written", *scheme)
    assert ran.code == 0, ran.err
    return folder / "written"


def test_json_says_what_was_written(written: Path, tmp_path: Path) -> None:
    ran = halfbyte("import-qserve", written, "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    nbytes = sum(info.nbytes for info in Checkpoint.open(tmp_path / "out").tensors.values())
    assert (ran.json["group_size"], ran.json["modules"], ran.json["written_bytes"]) == (128, 7, nbytes)


def test_text_and_refusal_to_overwrite(written: Path, tmp_path: Path) -> None:
    assert "7 weights in groups of 128" in halfbyte("import-qserve", written, "-o", tmp_path / "out").out
    again = halfbyte("import-qserve", written, "-o", tmp_path / "out")
    assert again.code == 2
    assert "--overwrite" in again.complaint


def test_a_scheme_that_the_form_cannot_hold(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path / "source", num_hidden_layers=1)
    ran = halfbyte("quantize", source, "-o", tmp_path / "out", "--format", "qserve")
    assert ran.code == 2
    assert "scheme w4a8 cannot be stored as qserve; accepted: w4a8-int8" in ran.complaint
