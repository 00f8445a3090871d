"""Several processes on one model: real ranks of ``torchrun``, with gloo on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.api import quantize
from halfbyte.calibration.ranks import Ranks
from halfbyte.calibration.request import CalibrationData
from halfbyte.errors import HalfbyteError
from tests.quantization.calibrated_runs import contents
from tests.tiny import tiny_model

DATA = CalibrationData(samples=5, length=(40, 64))


def run(ranks: int, source: Path, out: Path) -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "halfbyte",
    ]
    options = ["--data", "default", "--device", "cpu", "--samples", str(DATA.samples), "--length", "40,64"]
    command = [sys.executable, *launcher, "quantize", str(source), "-o", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("modules quantized") == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_ranks_give_the_codes_of_one(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path)
    quantize(source, tmp_path / "one", data=DATA)
    run(2, source, tmp_path / "two")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    reports = [json.loads(files.pop("quantization_report.json")) for files in (one, two)]
    assert one == two
    for first, second in zip(reports[0]["blocks"], reports[1]["blocks"], strict=True):
        assert first["routed_tokens"] == second["routed_tokens"]
        assert [m["tokens"] for m in first["modules"]] == [m["tokens"] for m in second["modules"]]


def test_shares() -> None:
    items = list(range(7))
    shares = [Ranks(rank, 3).share(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items
    assert [len(share) for share in shares] == [3, 2, 2]
    with pytest.raises(HalfbyteError, match="2 samples cannot be shared by 3 ranks"):
        Ranks(0, 3).share(items[:2])
    assert Ranks().from_first("alone") == "alone"
