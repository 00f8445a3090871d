from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte import api
from halfbyte.bench.quality import relative_to_rtn
from halfbyte.cli import app
from halfbyte.errors import HalfbyteError
from tests.cli.run import halfbyte
from tests.tiny import tiny_model

SHORT = ("--context", "64", "--windows", "2", "--samples", "4", "--length", "64", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"), torch.float32)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    return tmp_path / "text.txt"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["halfbyte", "bench", "quality", *map(str, arguments)])
    app.app(standalone_mode=False)


def test_rungs_and_others_beside_the_original(model: Path, text: Path, tmp_path: Path) -> None:
    api.quantize(model, tmp_path / "other", "w4a16")
    record = tmp_path / "new" / "quality.json"
    ran = halfbyte(
        "bench", "quality", model, *SHORT, "--ladder", "gptq,rtn", "--text", "code", "--text", text,
        "--others", tmp_path / "other", "--others", tmp_path / "nowhere", "-o", record, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert json.loads(record.read_text()) == ran.json
    assert ran.json["meta"]["command"].startswith("halfbyte bench quality")
    rows = ran.json["rows"]
    names = ["original", "gptq", "rtn", str(tmp_path / "other")]
    assert [(row["rung"], row["text"]) for row in rows[:-1]] == [
        (name, where) for name in names for where in ("code", str(text))
    ]
    assert (rows[-1]["rung"], "nowhere" in rows[-1]["failed"]) == (str(tmp_path / "nowhere"), True)
    by_rung = {row["rung"]: row for row in rows if row.get("text") == str(text)}
    assert by_rung["gptq"]["samples"] == 4
    assert by_rung["gptq"]["error"] < by_rung["gptq"]["error_rtn"]
    assert all("increase_of_rtn" in row for row in rows[2:-1])
    assert rows == relative_to_rtn(rows)


def test_a_rung_is_what_quantize_makes(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(
        monkeypatch,
        model,
        *SHORT,
        "--ladder",
        "rtn:mse",
        "--text",
        text,
        "--keep",
        tmp_path / "kept",
        "--json",
    )
    row: dict[str, Any] = json.loads(capsys.readouterr().out)["rows"][-1]
    api.quantize(model, tmp_path / "mine", "w4a8", algorithm="rtn", clip="mse")
    weights = "model.safetensors"
    kept = tmp_path / "kept" / "rtn-clip-mse"
    assert (kept / weights).read_bytes() == (tmp_path / "mine" / weights).read_bytes()
    found = api.evaluate(tmp_path / "mine", model, text=text, dtype=torch.float32, context=64, windows=2)
    assert row["perplexity"] == pytest.approx(found.perplexity, rel=1e-5)
    assert (row["method"], row["increase_of_rtn"]) == ("rtn clip mse", None)


def test_a_table_for_people(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, model, *SHORT, "--ladder", "rtn", "--text", "prose", "--others", tmp_path)
    printed = capsys.readouterr()
    title, original, rtn = printed.out.splitlines()
    assert title.split()[:3] == ["rung", "scheme", "text"]
    assert original.split()[:3] == ["original", "original", "prose"]
    assert rtn.split()[:3] == ["rtn", "w4a8", "prose"]
    assert "%" in rtn
    assert f"{tmp_path} failed: " in printed.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--ladder", "rtn,"), "--ladder 'rtn,'"),
        (("--ladder", "rtn,gptk"), "'gptk'"),
        (("--ladder", "rtn", "--clips", "wide"), "'rtn:wide'"),
        (("--scheme", "none"), "'none'"),
        (("--text", "no-such-file.txt"), "no-such-file.txt"),
        (("-o", "/dev/null/record.json"), "cannot be written"),
    ],
)
def test_bad_arguments_are_found_before_the_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    with pytest.raises(HalfbyteError, match=named):
        run(monkeypatch, "no-such-model", *arguments)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    ran = halfbyte("bench", "quality", tmp_path / "nowhere")
    assert ran.code == 2
    assert "nowhere" in ran.complaint
