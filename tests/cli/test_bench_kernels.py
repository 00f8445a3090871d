from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
def test_without_a_gpu_it_is_refused() -> None:
    ran = halfbyte("bench", "kernels", "--shapes", "64x128", "--ms", "1")
    assert ran.code == 2
    assert "needs a CUDA GPU" in ran.complaint
    assert ran.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shapes", "64"),
        ("--shapes", "64x128,"),
        ("--ms", "1,zero"),
        ("--ms", "0"),
        ("--ms", ""),
        ("--ops", "w4a4_linear"),
        ("--group-size", "0"),
        ("--passes", "0"),
        ("--from", "nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, str]) -> None:
    ran = halfbyte("bench", "kernels", *arguments)
    assert ran.code == 2
    assert arguments[0] in ran.complaint or arguments[1] in ran.complaint


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


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"meta": {}}',
        '{"meta": 1, "rows": []}',
        json.dumps({**RECORD, "rows": [{"op": "linear", "us": 1.0}]}),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    ran = halfbyte("bench", "kernels", "--from", path)
    assert ran.code == 2
    assert "other.json is no record" in ran.complaint
