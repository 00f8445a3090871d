"""Recipes: what the file may say, and what is refused in one line."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.checkpoint.w4afp8_config import experts_scheme
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import Role
from halfbyte.recipe import Options, Recipe
from halfbyte.schemes import PRESETS, resolve
from tests.layouts import mixture


def load(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return Recipe.load(path)


def test_yaml_and_python_say_the_same(tmp_path: Path) -> None:
    text = r"""
        scheme: w4a8
        clip: mse
        ignore:
          - "re:.*layers\\.0\\."
        targets:
          "*.down_proj": w8a8-int8
          "*.o_proj":
            group_size: 64
          lm_head: {scheme: w8a16, clip: none}
    """
    recipe = Recipe(
        scheme="w4a8",
        clip="mse",
        ignore=[r"re:.*layers\.0\."],
        targets={
            "*.down_proj": "w8a8-int8",
            "*.o_proj": Options(group_size=64),
            "lm_head": {"scheme": "w8a16", "clip": "none"},
        },
    )
    assert load(tmp_path, text) == recipe
    assert recipe.default is not None
    assert recipe.default.scheme == PRESETS["w4a8"]
    assert recipe.choices["*.down_proj"].scheme == PRESETS["w8a8-int8"]
    assert recipe.choices["*.down_proj"].method.clip == "mse"
    changed = recipe.choices["*.o_proj"].scheme
    assert changed.weights == PRESETS["w4a8"].weights.with_group_size(64)
    assert changed.activations == PRESETS["w4a8"].activations
    assert recipe.choices["lm_head"].method.clip == "none"


def test_empty_recipe_is_the_home_scheme(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Recipe()
    assert Recipe().scheme == "w4a8"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(scheme="W4AFP8", group_size=-1, symmetric=False, clip="mse", ignore=["a", "re:b"]),
        Recipe(
            scheme="none",
            targets={"a": "fp8", "b": {"scheme": "w4a16", "group_size": 32, "symmetric": False}},
        ),
    ],
)
def test_plain_data_and_back(recipe: Recipe) -> None:
    assert Recipe(**recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "sheme: w4a8",
            ["'sheme'", "scheme, group_size, symmetric, algorithm, clip, target, format, ignore, targets"],
        ),
        (
            "targets: {a: {groupsize: 64}}",
            ["'groupsize'", "'a'", "scheme, group_size, symmetric, algorithm, clip"],
        ),
        ("scheme: w4b8", ["'w4b8'", "w4a8-int8", "nvfp4"]),
        ("targets: {a: nvfp9}", ["target 'a'", "'nvfp9'", "nvfp4"]),
        ("targets: {a: {algorithm: rotation+gptq}}", ["target 'a'", "whole model"]),
        ("algorithm: gptx", ["'gptx'", "rotation, smoothquant, awq, rtn, gptq"]),
        ("clip: max", ["'clip'", "'max'", "'none', 'mse' or 'output'"]),
        ("group_size: '64'", ["'group_size'", "'64'", "integer"]),
        ("group_size: 0", ["group_size 0", "positive"]),
        ("group_size: -2", ["group_size -2", "positive"]),
        ("symmetric: 1", ["'symmetric'", "boolean"]),
        ("ignore: lm_head", ["'ignore'", "'lm_head'", "list"]),
        ("ignore: [3]", ["'ignore'", "3", "string"]),
        ("ignore: ['re:(']", ["'re:('", "regular expression"]),
        ("targets: {a: 3}", ["'a'", "3", "scheme's name"]),
        ("targets: {a: }", ["'a'", "None", "scheme's name"]),
        ("targets: [a]", ["'targets'", "mapping"]),
        ("ignore: [a]\ntargets: {a: fp8}", ["'a'", "ignore", "targets"]),
        ("scheme: fp8\ngroup_size: 64", ["scheme fp8", "integer weights"]),
        ("targets: {a: {scheme: nvfp4, group_size: 32}}", ["target 'a'", "scheme nvfp4", "integer weights"]),
        ("scheme: w4a8-int8\nsymmetric: true", ["w4a8-int8", "zero points"]),
        ("scheme: none\ngroup_size: 64", ["'none'"]),
        ("scheme: none\ntargets: {a: {group_size: 64}}", ["target 'a'", "accepted: a scheme"]),
        ("clip: mse\nclip: none", ["'clip'", "twice"]),
        ("targets:\n  a: fp8\n  a: w4a8", ["'a'", "twice"]),
        ("- w4a8", ["no mapping", "scheme, group_size"]),
        ("1: 2", ["no mapping"]),
        ("ignore: [", ["no valid YAML"]),
        ("a: !!python/object:os.system {}", ["no valid YAML"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(HalfbyteError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    for part in [str(tmp_path / "recipe.yaml"), *parts]:
        assert part in message


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match=r"none\.yaml.*No such file"):
        Recipe.load(tmp_path / "none.yaml")
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HalfbyteError, match="no valid YAML"):
        Recipe.load(tmp_path / "recipe.yaml")


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["scheme", "group_size", "symmetric", "clip", "ignore", "targets"]) | st.text(
    max_size=6
)


@given(st.dictionaries(KEYS, YAML_VALUES, max_size=4))
def test_any_data_is_a_recipe_or_one_line(data: dict[str, Any]) -> None:
    with contextlib.suppress(HalfbyteError):  # which is always one line; anything else fails
        recipe = Recipe(**data)
        assert Recipe(**recipe.to_dict()) == recipe


def test_options_change_the_numbers() -> None:
    rows = Recipe(scheme="w4a16", group_size=-1).default
    assert rows is not None
    assert (rows.scheme.weights.granularity, rows.scheme.weights.group_size) == ("channel", None)
    asymmetric = Recipe(scheme="w4a16", symmetric=False).default
    assert asymmetric is not None
    assert asymmetric.scheme.weights == PRESETS["w4a16-asym"].weights
    grouped = Recipe(scheme="w8a16", group_size=128).default
    assert grouped is not None
    assert (grouped.scheme.weights.granularity, grouped.scheme.weights.group_size) == ("group", 128)


def test_the_target_is_that_of_w4a8_layers() -> None:
    recipe = Recipe(target="vllm", targets={"a": "w4a16", "b": {"group_size": 64}, "c": "w4a8-int8"})
    assert recipe.default is not None
    assert recipe.default.scheme.target == "vllm"
    assert {name: choice.scheme.target for name, choice in recipe.choices.items()} == {
        "a": "halfbyte",
        "b": "vllm",
        "c": "halfbyte",
    }


def test_two_levels_without_groups_leave_one() -> None:
    choice = Recipe(scheme="w4a8-int8", group_size=-1).default
    assert choice is not None
    weights = choice.scheme.weights
    assert (weights.granularity, weights.outer, weights.scale, weights.symmetric) == (
        "channel",
        None,
        "model",
        False,
    )
    assert choice.scheme.activations == resolve("w4a8-int8").activations


def test_qserves_files_hold_fp16_scales() -> None:
    grouped = Recipe(scheme="w4a8-int8", format="qserve").default
    rows = Recipe(scheme="w4a8-int8", group_size=-1, format="qserve").default
    assert grouped is not None
    assert rows is not None
    assert (grouped.scheme.weights.scale, grouped.scheme.weights.outer_dtype) == ("int8", "f16")
    assert (rows.scheme.weights.scale, rows.scheme.weights.outer_dtype) == ("f16", "f32")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "scheme w4a8 cannot be stored as qserve; accepted: w4a8-int8"),
        ({"scheme": "w8a8-int8"}, "w8a8-int8 cannot be stored as qserve"),
        ({"scheme": "w4a8-int8", "targets": {"a": "w4a16-asym"}}, "target 'a': scheme w4a16-asym cannot"),
        ({"scheme": "w4a8-int8", "group_size": -1, "symmetric": True}, "cannot be stored as qserve"),
        (
            {"scheme": "w4a8-int8", "format": "gguf"},
            "'format' is 'gguf'; accepted: 'compressed-tensors', 'qserve' or 'w4afp8'",
        ),
    ],
)
def test_what_a_format_cannot_hold(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HalfbyteError, match=re.escape(words)):
        Recipe(**{"format": "qserve", **options})


def test_w4afp8_has_one_scheme_for_experts_and_one_for_the_rest() -> None:
    recipe = Recipe(format="w4afp8")
    schemes = {
        module.role: scheme
        for module, scheme in zip(mixture().modules, recipe.assign(mixture()).schemes.values(), strict=True)
    }
    assert schemes[Role.EXPERT] == experts_scheme()
    assert schemes[Role.LINEAR] == resolve("fp8_per_block")
    assert schemes[Role.ROUTER] is None
    assert experts_scheme().has_static_inputs
    assert not resolve("w4a8").has_static_inputs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"group_size": 64},
            "scheme w4a8 in groups of 64 cannot be stored as w4afp8; accepted: w4a8 with group",
        ),
        ({"group_size": -1}, "scheme w4a8 cannot be stored as w4afp8"),
        ({"symmetric": False}, "scheme w4a8 with zero points cannot be stored as w4afp8"),
        ({"scheme": "w4a16"}, "scheme w4a16 cannot be stored as w4afp8"),
        ({"scheme": "w4a8-int8"}, "scheme w4a8-int8 with zero points cannot be stored as w4afp8"),
        ({"scheme": "fp8"}, "scheme fp8 cannot be stored as w4afp8"),
        ({"target": "vllm"}, "target vllm is of another kernel than w4afp8's"),
        ({"targets": {"*.o_proj": "w8a16"}}, "target '*.o_proj': scheme w8a16 cannot be stored as w4afp8"),
    ],
)
def test_what_w4afp8_cannot_hold(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HalfbyteError, match=re.escape(words)):
        Recipe(**{"format": "w4afp8", **options})
