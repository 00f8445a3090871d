"""``halfbyte quantize --data`` as a user gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


def test_data_calibrates_and_reports(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(
        "\n".join(json.dumps({"text": f"Sentence {n}: all is well that ends well. " * 3}) for n in range(40))
    )
    ran = halfbyte(
        *(
            "quantize",
            model,
            "-o",
            tmp_path / "out",
            "--data",
            data,
            "--samples",
            4,
            "--length",
            "64,96",
            "--json",
        )
    )
    assert ran.code == 0, ran.err
    assert ran.json["modules"] == 14
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert report["recipe"]["algorithm"] == "awq+gptq"
    assert report["data"]["sources"] == [str(data)]
    assert (report["data"]["samples"], report["data"]["shortest"], report["data"]["longest"]) == (4, 64, 96)
    again = halfbyte("quantize", model, "-o", tmp_path / "out", "--data", data)
    assert again.code == 2
    assert "exists" in again.complaint


def test_a_recipe_without_an_algorithm_is_calibrated_by_the_best(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("scheme: w4a8\n")
    ran = halfbyte(
        *("quantize", model, "-o", tmp_path / "out", "--recipe", recipe, "--target", "vllm"),
        *("--data", "default", "--samples", 2, "--length", "64"),
    )
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert report["recipe"]["algorithm"] == "awq+gptq"
    assert report["recipe"]["target"] == "vllm"


def test_an_algorithm_that_needs_data_takes_the_built_in_texts(model: Path, tmp_path: Path) -> None:
    ran = halfbyte(
        "quantize", model, "-o", tmp_path / "out", "--algorithm", "gptq", "--samples", 2, "--length", "64"
    )
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert report["data"]["sources"] == ["built-in"]
    assert report["data"]["samples"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--data", "default", "--length", "many"], "--length 'many'; accepted: numbers of tokens"),
        (
            ["--data", "default", "--length", "600"],
            "length 600 is longer than the model's context of 512 tokens",
        ),
        (["--data", "default", "--samples", "0"], "0 samples"),
        (["--data", "default", "--algorithm", "gptx"], "'gptx' is not known"),
        (["--data", "default", "--activations", "cloud"], "activations 'cloud'; accepted: memory, disk"),
        (["--data", "default", "--device", "tpu"], "device 'tpu' is not known"),
        (["--data", "default", "--redo", "layers.9.*"], "--redo 'layers.9.*' means no quantized module"),
        (["--redo", "layers.0.*"], "redo needs calibration data"),
        (
            ["--samples", "8", "--mask-role", "tool"],
            "--samples, --mask-role would change nothing, as nothing is calibrated; accepted: with --data",
        ),
        (["--target", "sglang"], "'target' is 'sglang'; accepted: 'halfbyte' or 'vllm'"),
    ],
)
def test_bad_input_is_one_line(model: Path, tmp_path: Path, options: list[str], said: str) -> None:
    ran = halfbyte("quantize", model, "-o", tmp_path / "out", *options)
    assert ran.code == 2, ran.out
    assert said in ran.complaint
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
