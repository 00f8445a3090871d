from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.bench import calibration, calibration_process
from halfbyte.bench.calibration import SHAPES, CalibrationCase, bench_calibration
from halfbyte.bench.calibration_process import random_samples
from halfbyte.bench.process import ProcessCost
from halfbyte.errors import HalfbyteError
from halfbyte.recipe import Recipe

GPTQ = Recipe(scheme="w4a16", algorithm="gptq")


def test_shapes_have_the_published_sizes() -> None:
    assert SHAPES["8b"].nbytes == 2 * 8_030_261_248
    assert SHAPES["30b-a3b"].nbytes == 2 * 30_532_122_624


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "7b"}, "shape '7b' is not known; accepted: 8b, 30b-a3b, tiny"),
        ({"shape": "tiny", "layers": 5}, "5 layers of shape tiny; accepted: 1 to 4"),
        ({"activations": "tape"}, "activations in 'tape'; accepted: memory or disk"),
        ({"shape": "tiny", "layers": 2, "calibrated": 3}, "3 calibrated blocks of 2; accepted: 1 to 2"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
        ({"recipe": Recipe(scheme="none")}, "scheme 'none' quantizes nothing"),
    ],
)
def test_a_bad_case_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HalfbyteError, match=message):
        CalibrationCase(**{"recipe": GPTQ, **options})


def test_samples_are_random_tokens_that_all_count() -> None:
    data = random_samples(50, 6, 40)
    assert [(sample.ids.shape, sample.ids.dtype) for sample in data.samples] == [((40,), torch.int64)] * 6
    assert all(sample.counts.all() for sample in data.samples)
    drawn = torch.stack([sample.ids for sample in data.samples])
    assert int(drawn.min()) >= 0
    assert 45 <= int(drawn.max()) < 50
    assert (data.report.samples, data.report.tokens, data.report.counted) == (6, 240, 240)
    assert all(map(torch.equal, drawn, (sample.ids for sample in random_samples(50, 6, 40).samples)))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what would be a process of its own here, which saves an interpreter's start."""

    def measure(command: Sequence[str]) -> ProcessCost:
        assert list(command[:3]) == [sys.executable, "-m", "halfbyte.bench.calibration_process"]
        calibration_process.main(*command[3:])
        return ProcessCost(1.0, 123_000_000)

    monkeypatch.setattr(calibration, "measure", measure)


def tiny(layers: int | None = None, **options: Any) -> CalibrationCase:
    return CalibrationCase(GPTQ, "tiny", layers, samples=3, length=64, device="cpu", **options)


@pytest.mark.usefixtures("in_this_process")
def test_some_blocks_alone_are_calibrated(tmp_path: Path) -> None:
    total, *blocks = bench_calibration(tmp_path, tiny(3, calibrated=2), lambda _: None)
    assert (total["algorithm"], total["calibrated_blocks"], total["model_s"]) == ("gptq clip output", 2, None)
    assert total["model_s_is"] == "not asked for: not all blocks are calibrated"
    assert [block["observing_s"] > 0 for block in blocks] == [True, True, False]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("activations", ["memory", "disk"])
def test_a_row_for_the_run_and_one_for_each_block(tmp_path: Path, activations: str) -> None:
    said: list[str] = []
    total, *blocks = bench_calibration(tmp_path, tiny(3, activations=activations), said.append)
    assert (total["op"], total["shape"], total["layers"], total["layers_of_model"]) == (
        "calibration",
        "tiny",
        3,
        4,
    )
    assert (total["scheme"], total["algorithm"], total["device"]) == ("w4a16", "gptq clip output", "cpu")
    assert (total["samples"], total["length"], total["activations"]) == (3, 64, activations)
    assert (total["fallbacks"], total["peak_gpu_gb"], total["peak_rss_gb"]) == (0, None, 0.123)
    parts = [total[f"{part}_s"] for part in ("start", "observing", "quantizing", "running", "end")]
    assert sum(parts) == pytest.approx(total["seconds"], abs=4e-3)
    assert total["model_s"] == pytest.approx(total["seconds"] + total["block_s"], abs=2e-3)
    assert total["model_s_is"] == "extrapolated from 3 of 4 blocks"
    assert total["tokens_per_s"] == pytest.approx(3 * 64 / total["model_s"], rel=0.01)
    assert [(row["op"], row["block"]) for row in blocks] == [("calibration_block", n) for n in (1, 2, 3)]
    for phase in ("observing", "quantizing", "running"):
        assert sum(row[f"{phase}_s"] for row in blocks) == pytest.approx(total[f"{phase}_s"], abs=3e-3)
    assert sum(blocks[1][f"{phase}_s"] for phase in ("observing", "quantizing", "running")) == pytest.approx(
        total["block_s"], abs=3e-3
    )
    (line,) = said
    assert line.startswith("uses 0.001 GB of the disk of")


@pytest.mark.usefixtures("in_this_process")
def test_bytes_are_those_of_the_checkpoints(tmp_path: Path) -> None:
    total = bench_calibration(tmp_path, tiny(1), lambda line: None)[0]
    if total["read_gb"] is None:
        pytest.skip("this system does not count a process's bytes")
    # Beside the tensors: headers, the report, and modules of transformers that are imported on the way.
    assert total["source_gb"] <= total["read_gb"] < total["source_gb"] + 0.05
    assert total["checkpoint_gb"] <= total["written_gb"] < total["checkpoint_gb"] + 1e-4


@pytest.mark.usefixtures("in_this_process")
def test_all_layers_are_measured_and_few_do_not_tell(tmp_path: Path) -> None:
    total = bench_calibration(tmp_path, tiny(), lambda line: None)[0]
    assert (total["layers"], total["model_s"], total["model_s_is"]) == (4, total["seconds"], "measured")
    total = bench_calibration(tmp_path, tiny(2), lambda line: None)[0]
    assert (total["model_s"], total["tokens_per_s"]) == (None, None)
    assert total["model_s_is"].startswith("not known from 2 of 4 blocks")


@pytest.mark.usefixtures("in_this_process")
def test_the_source_stays_and_is_used_again_and_nothing_else_is_left(tmp_path: Path) -> None:
    bench_calibration(tmp_path, tiny(1), lambda line: None)
    (source,) = tmp_path.iterdir()
    before = {file: file.stat().st_mtime_ns for file in source.iterdir()}
    bench_calibration(tmp_path, tiny(1), lambda line: None)
    assert list(tmp_path.iterdir()) == [source]
    assert {file: file.stat().st_mtime_ns for file in source.iterdir()} == before


def test_a_run_that_fails_says_why_and_leaves_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(command: Sequence[str]) -> ProcessCost:
        (Path(command[3]).parent / "quantized.partial").mkdir()
        raise HalfbyteError("exit code 1: no memory")

    monkeypatch.setattr(calibration, "measure", failing)
    with pytest.raises(HalfbyteError, match="no memory"):
        bench_calibration(tmp_path, tiny(1), lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-1-layers"]


def test_too_small_a_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
    said: list[str] = []
    with pytest.raises(HalfbyteError, match=r"needs 0\.002 GB .* 0\.001 GB free; accepted: fewer layers"):
        bench_calibration(tmp_path, tiny(), said.append)
    assert not said
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*.safetensors")) < 100_000


def test_the_process_says_what_is_wrong_in_its_last_line(tmp_path: Path) -> None:
    request = {
        "model": str(tmp_path / "nowhere"),
        "out": str(tmp_path / "out"),
        "recipe": GPTQ.to_dict(),
        "vocab": 10,
        "blocks": 1,
        "samples": 1,
        "length": 4,
        "device": "cpu",
        "activations": "memory",
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    with pytest.raises(SystemExit, match="nowhere"):
        calibration_process.main(str(tmp_path / "request.json"), str(tmp_path / "result.json"))
    assert not (tmp_path / "result.json").exists()
