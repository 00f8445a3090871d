from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte
from halfbyte import api
from halfbyte.calibration import ranks
from halfbyte.calibration.request import CalibrationData
from halfbyte.errors import HalfbyteError
from halfbyte.quantization import job
from tests.tiny import tiny_model


class StoppedError(Exception):
    """Ends a run once it is prepared."""


def prepared(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[halfbyte.Recipe, torch.device]:
    """The recipe and the device that ``quantize(**arguments)`` prepares its run with."""
    seen: list[tuple[halfbyte.Recipe, torch.device]] = []

    def prepare(model: object, recipe: halfbyte.Recipe, *, device: torch.device, **_: object) -> None:
        seen.append((recipe, device))
        raise StoppedError

    monkeypatch.setattr(job, "prepare", prepare)
    with pytest.raises(StoppedError):
        halfbyte.quantize("model", "out", **arguments)
    (found,) = seen
    return found


def test_the_verbs_work_one_after_the_other(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("Half a byte is four bits. " * 20)
    result = halfbyte.quantize(source, tmp_path / "out", "w8a16", ignore=["*.down_proj"])
    assert result.modules == 12
    assert halfbyte.inspect(tmp_path / "out").rows
    assert halfbyte.verify(tmp_path / "out", source).passed
    model, tokenizer = halfbyte.load(tmp_path / "out")
    tokens = tokenizer("Half", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=3, do_sample=False).shape == (1, 7)
    evaluation = halfbyte.evaluate(tmp_path / "out", source, text=text, context=64)
    assert evaluation.baseline is not None
    assert 0 <= evaluation.baseline.kl_mean < 0.01


def test_arguments_change_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("scheme: fp8\nignore: [a]\ntargets: {b: w8a16}\n")
    recipe = api.recipe_of(file, "w4a16", ["a", "c"], "mse")
    assert recipe.scheme == "w4a16"
    assert recipe.clip == "mse"
    assert list(recipe.ignore) == ["a", "c"]
    assert recipe.to_dict()["targets"] == halfbyte.Recipe.load(file).to_dict()["targets"]
    assert api.recipe_of(None, None, (), None) == halfbyte.Recipe()
    assert api.recipe_of({"scheme": "fp8"}, None, "lm_head", None) == halfbyte.Recipe(
        scheme="fp8", ignore=("lm_head",)
    )


def test_a_changed_recipe_leaves_open_what_it_left_open() -> None:
    assert api.recipe_of({"targets": {"b": "w8a16"}}, None, (), "mse", target="vllm").model_fields_set == {
        "targets",
        "ignore",
        "clip",
        "target",
    }


@pytest.mark.parametrize(
    ("recipe", "arguments", "algorithm"),
    [
        (None, {}, "awq+gptq"),
        ({"target": "vllm"}, {}, "awq+gptq"),
        (halfbyte.Recipe(clip="mse"), {}, "awq+gptq"),
        ({"algorithm": "rtn"}, {}, "rtn"),
        ({"target": "vllm"}, {"algorithm": "gptq"}, "gptq"),
        ({"target": "vllm"}, {"data": None}, "rtn"),
    ],
)
def test_data_means_the_best_algorithm_where_none_is_named(
    recipe: Any, arguments: dict[str, Any], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = prepared(monkeypatch, recipe=recipe, **{"data": "default", **arguments})
    assert found.algorithm == algorithm
    assert found.target == ("vllm" if isinstance(recipe, dict) and "target" in recipe else "halfbyte")


def test_a_target_keeps_its_own_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"targets": {"a": {"algorithm": "rtn"}, "b": {"group_size": 64}}}
    found, _ = prepared(monkeypatch, recipe=recipe, data="default")
    assert found.choices["a"].method.steps == ("rtn",)
    assert found.choices["b"].method.steps == ("awq", "gptq")


def test_a_rank_prepares_where_it_calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotated checkpoint computes from then on, on the device that it is prepared for."""
    own = torch.device("cuda", 3)
    monkeypatch.setattr(ranks, "joined", lambda device: contextlib.nullcontext((ranks.Ranks(3, 4), own)))
    _, device = prepared(monkeypatch, algorithm="rotation+gptq")
    assert device == own


def test_ranks_without_anything_to_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("llama", tmp_path)
    monkeypatch.setattr(
        ranks, "joined", lambda device: contextlib.nullcontext((ranks.Ranks(1, 2), torch.device("cpu")))
    )
    with pytest.raises(HalfbyteError, match=r"2 ranks have no samples to share.*accepted: one process"):
        halfbyte.quantize(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"samples": 128}, "--samples"),
        ({"length": 64}, "--length"),
        ({"masked_roles": ("tool",)}, "--mask-role"),
        ({"activations": "memory"}, "--activations"),
        ({"seed": 0}, "--seed"),
        ({"samples": 3, "seed": 1}, "--samples, --seed"),
    ],
)
def test_settings_of_data_that_is_not_used(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    with pytest.raises(HalfbyteError, match=f"^{named} would change nothing.*; accepted: with --data, or"):
        halfbyte.quantize(source, tmp_path / "out", data=CalibrationData(None, **settings))
    assert not (tmp_path / "out").exists()


def test_import_is_light() -> None:
    """Describing headers must not pay for torch; nor must ``--help``."""
    code = "import sys, json, halfbyte, halfbyte.cli.app; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "transformers"} & set(loaded)
