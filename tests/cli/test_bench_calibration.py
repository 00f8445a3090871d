from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from halfbyte.bench import calibration, calibration_process
from halfbyte.bench.process import ProcessCost
from halfbyte.cli import app
from halfbyte.errors import HalfbyteError
from tests.cli.run import halfbyte

TINY = ("bench", "calibration", "--shape", "tiny", "--samples", "2", "--length", "64", "--device", "cpu")


def test_a_tiny_model_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    record = tmp_path / "new" / "calibration.json"
    ran = halfbyte(*TINY, "--layers", "3", "--folder", tmp_path / "models", "-o", record, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(record.read_text()) == ran.json
    assert ran.json["meta"]["command"].startswith("halfbyte bench calibration --shape tiny")
    total, *blocks = ran.json["rows"]
    assert (total["op"], total["layers"], total["algorithm"]) == ("calibration", 3, "gptq clip output")
    assert 0.1 < total["peak_rss_gb"] < 5
    assert [row["block"] for row in blocks] == [1, 2, 3]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-3-layers"]
    assert ran.err.startswith("uses 0.001 GB of the disk of")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["halfbyte", *map(str, arguments)])
    app.app(standalone_mode=False)


def test_a_table_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def in_this_process(command: Sequence[str]) -> ProcessCost:
        calibration_process.main(*command[3:])
        return ProcessCost(1.0, 123_000_000)

    monkeypatch.setattr(calibration, "measure", in_this_process)
    run(monkeypatch, *TINY, "--layers", "1", "--algorithm", "rtn")
    printed = capsys.readouterr().out
    assert "not known from 1 of 4 blocks" in printed
    assert "0.123" in printed
    assert "quantizing_s" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "7b"), "shape '7b'"),
        (("--layers", "49", "--shape", "30b-a3b"), "49 layers"),
        (("--scheme", "w9"), "'w9'"),
        (("--algorithm", "gptk"), "'gptk'"),
        (("--clip", "wide"), "clip"),
        (("--activations", "tape"), "'tape'"),
        (("--device", "tpu"), "'tpu'"),
        (("-o", "/dev/null/record.json"), "cannot be written"),
    ],
)
def test_bad_arguments_are_found_before_a_model_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    with pytest.raises(HalfbyteError, match=named):
        run(monkeypatch, "bench", "calibration", "--folder", tmp_path / "models", *arguments)
    assert not (tmp_path / "models").exists()


def test_a_number_out_of_range_is_one_line() -> None:
    ran = halfbyte("bench", "calibration", "--samples", "0")
    assert ran.code == 2
    assert "--samples" in ran.complaint
