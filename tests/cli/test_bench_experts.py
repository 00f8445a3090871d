"""``halfbyte bench experts`` without a GPU: what it is asked, and records shown again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.run import halfbyte

META = {"command": "halfbyte bench experts", "commit": None, "date": "2026-12-01", "versions": {}}
ROW = {
    "kernel": "hopper-w4a8",
    "op": "experts",
    "scheme": "w4a8",
    "model": "mixtral-8x7b",
    "gemm": "down",
    "routing": "uniform",
    "tokens": 16,
    "E": 8,
    "top_k": 2,
    "N": 4096,
    "K": 14336,
    "us": 57.25,
    "rel_err": 0.0017,
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--models", "gpt-5"), "'gpt-5'; accepted: qwen3-30b-a3b, mixtral-8x7b, deepseek-v3"),
        (("--gemms", "side"), "'side'; accepted: gate-up, down, block"),
        (("--routing", "fair"), "'fair'; accepted: uniform, zipf"),
        (("--tokens", "0"), "--tokens '0'"),
        (("--tokens", "1,,2"), "--tokens"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, str], said: str) -> None:
    ran = halfbyte("bench", "experts", *arguments)
    assert ran.code == 2
    assert said in ran.complaint


def test_a_record_is_shown_again(tmp_path: Path) -> None:
    slower = {**ROW, "kernel": "torch-fp8-rowwise", "scheme": "fp8", "us": 114.5}
    inexact = {**ROW, "kernel": "vllm-cutlass-w4a8", "us": 50.0, "rel_err": 0.035}
    missing = {
        "kernel": "humming-w4a8",
        "model": "mixtral-8x7b",
        "gemm": "down",
        "reason": "cannot be imported",
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"meta": META, "rows": [ROW, slower, inexact], "missing": [missing]}))
    ran = halfbyte("bench", "experts", "--from", str(path))
    assert ran.code == 0
    assert "mixtral-8x7b down, uniform (8 x 4096 x 14336, top 2)" in ran.out
    assert "57.2 (1.7e-3)*" in ran.out
    assert "50.0 (3.5e-2) " in ran.out
    assert "114.5 (1.7e-3) " in ran.out
    assert "not measured: humming-w4a8 (mixtral-8x7b down): cannot be imported" in ran.out


def test_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"rows": [{}]}')
    ran = halfbyte("bench", "experts", "--from", str(path))
    assert ran.code == 2
    assert "is no record" in ran.complaint


@pytest.mark.parametrize(
    ("field", "value"),
    [("us", "fast"), ("us", -1), ("tokens", True), ("rel_err", float("nan")), ("model", 3)],
)
def test_rows_that_nobody_wrote(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"meta": META, "rows": [{**ROW, field: value}]}))
    ran = halfbyte("bench", "experts", "--from", str(path))
    assert ran.code == 2
    assert f"rows[0].{field} is " in ran.complaint
    assert "accepted: what bench experts wrote" in ran.complaint
