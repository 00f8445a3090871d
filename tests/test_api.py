from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import halfbyte
from halfbyte import api
from tests.tiny import tiny_model


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


def test_import_is_light() -> None:
    """Describing headers must not pay for torch; nor must ``--help``."""
    code = "import sys, json, halfbyte, halfbyte.cli.app; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "transformers"} & set(loaded)
