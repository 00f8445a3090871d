from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.schemes import PRESETS
from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


def _only(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_json_says_what_was_written(model: Path, tmp_path: Path) -> None:
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", "--json")
    assert ran.code == 0
    assert ran.json["modules"] == 14
    assert ran.json["written_bytes"] == sum(
        t.nbytes for t in load_file(tmp_path / "out/model.safetensors").values()
    )


def test_text_and_help(model: Path, tmp_path: Path) -> None:
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", "--ignore", "*.down_proj")
    assert ran.code == 0
    assert "12 modules quantized" in ran.out
    assert "Example: halfbyte quantize" in halfbyte("quantize", "--help").out


def test_recipe_with_changes(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('targets: {"*.down_proj": w8a16}\n')
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", "--recipe", recipe, "--scheme", "w4a16")
    assert ran.code == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert sorted(group["weights"]["num_bits"] for group in config["config_groups"].values()) == [4, 8]


def test_unknown_scheme_lists_those_known(model: Path, tmp_path: Path) -> None:
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", "--scheme", "w3a3")
    assert ran.code == 2
    assert all(name in ran.complaint for name in ("w3a3", *PRESETS))
    assert not _only(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    ran = halfbyte("quantize", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert ran.code == 2
    assert "nowhere" in ran.complaint
    assert not _only(tmp_path)


def test_no_config(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "config.json").unlink()
    ran = halfbyte("quantize", copy, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "config.json" in ran.complaint
    assert _only(tmp_path) == {"copy"}


def test_no_causal_lm(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForSequenceClassification"]})
    )
    ran = halfbyte("quantize", copy, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "BertForSequenceClassification" in ran.complaint
    assert _only(tmp_path) == {"copy"}


def test_pickle_only_when_allowed(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    ran = halfbyte("quantize", copy, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "--allow-pickle" in ran.complaint
    assert _only(tmp_path) == {"copy"}
    assert halfbyte("quantize", copy, "-o", tmp_path / "out", "--allow-pickle").code == 0
    assert halfbyte("quantize", model, "-o", tmp_path / "safe").code == 0
    pickled, safe = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "safe"))
    assert pickled.keys() == safe.keys()
    assert all(torch.equal(pickled[name].view(torch.uint8), safe[name].view(torch.uint8)) for name in safe)


def test_output_exists(model: Path, tmp_path: Path) -> None:
    assert halfbyte("quantize", model, "-o", tmp_path / "out").code == 0
    ran = halfbyte("quantize", model, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "--overwrite" in ran.complaint
    assert halfbyte("quantize", model, "-o", tmp_path / "out", "--overwrite").code == 0
    assert _only(tmp_path) == {"out"}


def test_preflight_errors_come_before_work(model: Path, tmp_path: Path) -> None:
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", "--ignore", "*.k_proj")
    assert ran.code == 2
    assert "k_proj" in ran.complaint
    assert not _only(tmp_path)


def test_tensor_parallel_is_checked(model: Path, tmp_path: Path) -> None:
    """o_proj has 128 inputs: two ranks would cut its one group of 128 in two."""
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", "--tp", "2")
    assert ran.code == 2
    assert "o_proj" in ran.complaint
    assert not _only(tmp_path)
