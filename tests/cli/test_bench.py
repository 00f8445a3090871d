from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.run import halfbyte


def test_record_names_its_command(tmp_path: Path) -> None:
    arguments = ("bench", "linear", "--shape", "64x128", "--rows", "1,2", "--scheme", "w4a16", "--json")
    ran = halfbyte(*arguments, "-o", tmp_path / "new" / "linear.json")
    assert ran.code == 0
    assert json.loads((tmp_path / "new" / "linear.json").read_text()) == ran.json
    assert ran.json["meta"]["command"].startswith("halfbyte bench linear --shape 64x128")
    assert {"commit", "versions", "date", "machine"} < ran.json["meta"].keys()
    assert [(row["scheme"], row["M"]) for row in ran.json["rows"]] == [
        ("bf16", 1), ("bf16", 2), ("w4a16", 1), ("w4a16", 2),
    ]  # fmt: skip


def test_bad_shape_is_one_line() -> None:
    ran = halfbyte("bench", "linear", "--shape", "64")
    assert ran.code == 2
    assert "--shape" in ran.complaint


@pytest.mark.parametrize("side", ["9" * 5000, "99999999999999"])
def test_numbers_that_are_too_large_are_one_line(side: str) -> None:
    for option, value in (("--shape", f"{side}x64"), ("--rows", side)):
        ran = halfbyte("bench", "linear", option, value)
        assert ran.code == 2
        assert f"{option} '9999" in ran.complaint
        assert len(ran.complaint) < 300


@pytest.mark.parametrize("command", ["quantize", "inspect", "linear"])
def test_where_the_record_goes_is_looked_at_first(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = halfbyte("bench", command, "-o", tmp_path / "file" / "record.json")
    assert ran.code == 2
    assert "file/record.json cannot be written" in ran.complaint
