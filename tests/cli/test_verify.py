from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfbyte.quantization import job
from halfbyte.recipe import Recipe
from tests.audit.tamper import Q_PROJ, calibrated, change, copied
from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    job.run(job.prepare(source, Recipe()), source.parent / "out")
    return source.parent / "out"


def test_a_good_checkpoint_passes(source: Path, out: Path) -> None:
    ran = halfbyte("verify", out, "--against", source)
    assert ran.code == 0
    assert ran.out.rstrip().endswith("passed")
    assert "model.layers.0-1.self_attn.q_proj" in ran.out
    assert "vLLM W4A8: accepted" in ran.out
    assert "its schema accepts quantization_config" in ran.out


def test_json(source: Path, out: Path) -> None:
    found = halfbyte("verify", out, "--against", source, "--json").json
    assert found["passed"] is True
    assert len(found["weights"]) == 14
    assert all(0.05 < weight["relative_error"] < 0.2 for weight in found["weights"])
    assert found["untouched"]["tensors"] == 7
    assert found["compressed_tensors_0_17"] is True
    assert found["vllm_w4a8"] == {"accepted": True, "because": []}


def test_damage_exits_with_1_and_names_the_tensor(source: Path, out: Path, tmp_path: Path) -> None:
    path = copied(out, tmp_path / "damaged")

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.weight_packed"][0, 0] ^= -1

    change(path, flip)
    ran = halfbyte("verify", path, "--against", source)
    assert ran.code == 1
    assert f"{Q_PROJ}.weight_packed" in ran.out
    assert "failed: 1 errors" in ran.out
    assert halfbyte("verify", path).code == 0
    as_json = halfbyte("verify", path, "--against", source, "--json")
    assert as_json.code == 1
    assert as_json.json["passed"] is False


def test_a_truncated_file_exits_with_1(out: Path, tmp_path: Path) -> None:
    path = copied(out, tmp_path / "damaged")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    ran = halfbyte("verify", path)
    assert ran.code == 1
    assert "truncated" in ran.out


def test_max_error(source: Path, out: Path) -> None:
    assert halfbyte("verify", out, "--against", source, "--max-error", "0.01").code == 1


def test_require_vllm(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, torch.float16, num_hidden_layers=1)
    job.run(job.prepare(source, Recipe()), tmp_path / "out")
    ran = halfbyte("verify", tmp_path / "out")
    assert ran.code == 0
    assert "vLLM W4A8: no, because" in ran.out
    assert halfbyte("verify", tmp_path / "out", "--require", "vllm").code == 1


@pytest.mark.parametrize("arguments", [["nothing"], [".", "--against", "nothing"]])
def test_bad_input_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    ran = halfbyte("verify", tmp_path / arguments[0], *arguments[1:])
    assert ran.code == 2
    assert ran.out == ""
    assert ran.complaint


def test_help_has_an_example() -> None:
    assert "Example: halfbyte verify" in halfbyte("verify", "--help").out


def test_scales_that_moved_are_said(source: Path, tmp_path: Path) -> None:
    out = calibrated(source, tmp_path / "out", "smoothquant")
    ran = halfbyte("verify", out, "--against", source)
    assert ran.code == 0
    assert "estimated" in ran.out
    found = halfbyte("verify", out, "--against", source, "--json").json
    assert found["moved_scales"] == {"tensors": 4, "weights_after_estimates": 8}


def test_a_rotated_model_is_not_compared(source: Path, tmp_path: Path) -> None:
    ran = halfbyte("verify", calibrated(source, tmp_path / "out", "rotation+gptq"), "--against", source)
    assert ran.code == 0
    assert "rotation" in ran.out
    assert "relative error" not in ran.out.partition("rule")[2]
