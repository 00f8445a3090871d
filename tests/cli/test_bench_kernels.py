from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.cli import bench_gpu
from tests.cli.run import halfbyte

RECORD: dict[str, Any] = {
    "meta": {
        "commit": "abc123",
        "command": "halfbyte bench kernels --ms 1",
        "versions": {"torch": "2.11.0"},
        "date": "2030-01-02",
        "gpu": "made-up GPU",
    },
    "rows": [
        {
            "kernel": kernel, "op": "w4a8_linear", "scheme": "w4a8", "inputs": "quantized", "N": 64, "K": 128,
            "M": 1, "us": us, "floor_us": 1.0, "rel_err": 0.002,
        }
        for kernel, us in (("ours", 2.0), ("theirs", 3.0))
    ],
    "missing": [{"kernel": "absent", "reason": "vllm is not installed"}],
}  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("command", ["kernels", "tune"])
def test_without_a_gpu_it_is_refused(command: str) -> None:
    ran = halfbyte("bench", command, "--shapes", "64x128", "--ms", "1")
    assert ran.code == 2
    assert f"error: bench {command} needs a CUDA GPU" in ran.complaint
    assert ran.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shapes", "64"),
        ("--shapes", "64x128,"),
        ("--ms", "1,zero"),
        ("--ms", "0"),
        ("--ms", ""),
        ("--ms", "9" * 5000),
        ("--ms", "99999999999999"),
        ("--shapes", ""),
        ("--shapes", f"64x{'9' * 5000}"),
        ("--shapes", "99999999999999x64"),
        ("--shapes", "1048576x1048576"),
        ("--ops", ""),
        ("--ops", "w4a4_linear"),
        ("--kernels", ""),
        ("--kernels", "hopper*,"),
        ("--group-size", "99999999999999"),
        ("--passes", "9" * 5000),
        ("--group-size", "0"),
        ("--passes", "0"),
        ("--from", "nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, str]) -> None:
    ran = halfbyte("bench", "kernels", *arguments)
    assert ran.code == 2
    assert arguments[0] in ran.complaint or arguments[1] in ran.complaint


@pytest.mark.parametrize(
    "arguments", [("--shapes", ""), ("--shapes", "64"), ("--ms", ""), ("--ms", "9" * 5000), ("--passes", "0")]
)
def test_bad_arguments_of_tune_are_one_line(arguments: tuple[str, str]) -> None:
    ran = halfbyte("bench", "tune", *arguments)
    assert ran.code == 2
    assert arguments[0] in ran.complaint


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shapes", "64x128"),
        ("--ms", "1"),
        ("--ops", "w4a8_linear"),
        ("--kernels", "ours"),
        ("--group-size", "128"),
        ("--passes", "3"),
        ("--from-bf16",),
        ("--peers", "."),
    ],
)
def test_what_is_only_shown_is_not_measured(recorded: Path, arguments: tuple[str, ...]) -> None:
    ran = halfbyte("bench", "kernels", "--from", recorded, *arguments)
    assert ran.code == 2
    assert ran.complaint.endswith(f"not accepted beside it: {arguments[0]}")


@pytest.mark.parametrize("option", ["--out", "--markdown"])
def test_files_that_cannot_be_written_are_found_first(recorded: Path, option: str) -> None:
    ran = halfbyte("bench", "kernels", "--from", recorded, option, recorded / "new")
    assert (ran.code, ran.out) == (2, "")
    assert "record.json/new cannot be written" in ran.complaint


def test_tune_looks_where_its_record_goes(recorded: Path) -> None:
    ran = halfbyte("bench", "tune", "-o", recorded.parent)
    assert ran.code == 2
    assert "is a folder" in ran.complaint


def test_names_in_a_record_are_not_markup(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    rows = [{**row, "op": "[/red]_linear", "kernel": f"[{row['kernel']}]"} for row in RECORD["rows"]]
    path.write_text(json.dumps({**RECORD, "rows": rows}))
    ran = halfbyte("bench", "kernels", "--from", path)
    assert ran.code == 0
    assert "[/red]_linear, 64 x 128" in ran.out
    assert "[theirs]" in ran.out


def test_a_bad_record_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**RECORD, "rows": [{**RECORD["rows"][0], "us": None}]}))
    ran = halfbyte("bench", "kernels", "--from", path)
    assert ran.code == 2
    assert "other.json is no record: rows[0].us is null" in ran.complaint


def test_a_record_is_shown_again(recorded: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "kernels.md"
    ran = halfbyte("bench", "kernels", "--from", recorded, "--markdown", page)
    assert ran.code == 0
    assert "w4a8_linear, 64 x 128" in ran.out
    assert "2.0 (2.0e-3)*" in ran.out
    assert "not measured: absent: vllm is not installed" in ran.out
    assert "| 1 | 1.0 | **2.0 (2.0e-3)** | 3.0 (2.0e-3) |" in page.read_text()


def test_a_record_is_json_again(recorded: Path, tmp_path: Path) -> None:
    ran = halfbyte("bench", "kernels", "--from", recorded, "--json", "-o", tmp_path / "copy.json")
    assert ran.code == 0
    assert ran.json == RECORD
    assert json.loads((tmp_path / "copy.json").read_text()) == RECORD


def test_a_record_of_tune_names_the_gpu_case_by_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tune.json"
    row = {
        "op": "w4a8_linear", "kernel": "ours", "N": 64, "K": 128, "M": 1, "config": {"[tokens]": 8}, "us": 2.0,
        "rel_err": 0.002, "chosen": True,
    }  # fmt: skip

    def measure(*arguments: object) -> Iterator[list[dict[str, Any]]]:
        yield [row]
        assert len(json.loads(path.read_text())["rows"]) == 1
        yield [{**row, "M": 2}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "made-up GPU")
    monkeypatch.setattr("halfbyte.bench.kernels.tune.tune", measure)
    bench_gpu.tune(shapes="64x128", ms="1,2", passes=1, out=path)
    record = json.loads(path.read_text())
    assert record["meta"]["gpu"] == "made-up GPU"
    assert [row["M"] for row in record["rows"]] == [1, 2]
