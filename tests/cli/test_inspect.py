from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.quantization import job
from halfbyte.recipe import Recipe
from tests.audit.tamper import Q_PROJ, copied, drop
from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect")
    source = tiny_model("llama", root)
    job.run(job.prepare(source, Recipe()), root / "out")
    return root / "out"


def test_the_table_merges_layers_unless_all_are_wanted(model: Path) -> None:
    ran = halfbyte("inspect", model)
    assert ran.code == 0
    assert ran.err == ""
    (line,) = [line for line in ran.out.splitlines() if "self_attn.q_proj" in line]
    assert line.split()[:2] == ["model.layers.0-1.self_attn.q_proj", "2"]
    assert "W4A8 w4a8" in line
    assert "compressed-tensors (pack-quantized)" in ran.out
    every = halfbyte("inspect", model, "--all").out.splitlines()
    assert len([line for line in every if "self_attn.q_proj" in line]) == 2


def test_a_checkpoint_for_another_kernel(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    job.run(job.prepare(source, Recipe(target="vllm")), tmp_path / "out")
    assert halfbyte("inspect", tmp_path / "out", "--json").json["target"] == "vllm"
    (line,) = [
        line for line in halfbyte("inspect", tmp_path / "out").out.splitlines() if "rounded for" in line
    ]
    assert line.split() == ["rounded", "for", "vllm's", "kernel"]


def test_json(model: Path) -> None:
    found = halfbyte("inspect", model, "--json").json
    assert found["format"] == "compressed-tensors (pack-quantized)"
    assert found["bytes"] == sum(found["files"].values())
    assert found["scales_read"] is True
    assert found["target"] is None
    assert found["anomalies"] == []
    (row,) = [row for row in found["weights"] if row["name"].endswith("q_proj")]
    assert row["count"] == 2
    assert 0 < row["scale_min"] < row["scale_max"]
    every = halfbyte("inspect", model, "--json", "--all").json
    assert Q_PROJ in {row["name"] for row in every["weights"]}


def test_scales_can_be_left_alone(model: Path) -> None:
    ran = halfbyte("inspect", model, "--no-scales")
    assert "values not read" in ran.out
    assert halfbyte("inspect", model, "--no-scales", "--json").json["scales_read"] is False


def test_anomalies_are_listed_and_no_failure(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path / "damaged")
    drop(path, f"{Q_PROJ}.weight_shape")
    ran = halfbyte("inspect", path)
    assert ran.code == 0
    assert f"{Q_PROJ}: weight_shape is missing" in ran.out


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    ran = halfbyte("inspect", tmp_path / "nothing")
    assert ran.code == 2
    assert ran.out == ""
    assert "no such directory" in ran.complaint


def test_help_has_an_example() -> None:
    assert "Example: halfbyte inspect" in halfbyte("inspect", "--help").out
