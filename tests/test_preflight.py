"""What is found before any work: each finding from the smallest model that has the fault."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout
from halfbyte.preflight import Finding, preflight
from halfbyte.recipe import Recipe
from tests.layouts import block, layout_of, llama, mixture

Q = "model.layers.*.self_attn.q_proj"
DOWN = "model.layers.*.mlp.down_proj"


def findings(layout: ModelLayout, recipe: Recipe | None = None, tp: int = 1) -> list[Finding]:
    recipe = recipe or Recipe()
    return preflight(layout, recipe, recipe.assign(layout), tp=tp)


def messages(found: list[Finding], level: str, where: str | None = None) -> list[str]:
    return [f.message for f in found if f.level == level and where in (None, f.where)]


def one(found: list[Finding], level: str, where: str) -> str:
    (message,) = messages(found, level, where)
    return message


def test_a_sound_model_has_nothing_to_say() -> None:
    assert findings(llama()) == []
    assert findings(mixture()) == []


# Rules


@pytest.mark.parametrize(
    "pattern", ["model.layers.9.mlp.down_proj", "re:q_proj", "*.qproj", "model.layers.0"]
)
def test_rules_that_match_nothing(pattern: str) -> None:
    for recipe in (Recipe(ignore=[pattern]), Recipe(targets={pattern: "fp8"})):
        assert one(findings(llama(), recipe), "warning", pattern).startswith("matches no module")


def test_head_of_a_nested_model_is_suggested_by_its_full_name() -> None:
    layout = layout_of({"language_model.lm_head": (1000, 256), **block(0, prefix="language_model.model.")})
    found = findings(layout, Recipe(ignore=["lm_head"]))
    assert one(found, "warning", "lm_head") == "matches no module: write language_model.lm_head"


def test_class_names_mean_nothing() -> None:
    assert "class names" in one(findings(llama(), Recipe(targets={"Linear": "fp8"})), "warning", "Linear")


def test_ignoring_a_tied_head_is_no_mistake() -> None:
    layout = layout_of({"model.embed_tokens": (1000, 256), **block(0)}, tie_word_embeddings=True)
    assert findings(layout, Recipe(ignore=["lm_head"])) == []


def test_rules_that_never_decide_and_rules_twice() -> None:
    recipe = Recipe(
        ignore=["*.layers.0.*", "re:.*mlp", "re:.*mlp"], targets={"*.mlp.*": "fp8", "re:.*head": "fp8"}
    )
    found = findings(llama(), recipe)
    assert one(found, "warning", "re:.*mlp") == "stands in ignore 2 times"
    assert "decides for none" in one(found, "warning", "*.mlp.*")
    assert messages(found, "warning", "re:.*head") == []


def test_a_target_left_with_nothing_but_a_router_says_so() -> None:
    recipe = Recipe(ignore=["re:.*mlp.*_proj"], targets={"*.mlp.*": "fp8"})
    assert "routers and norms stay out unless named alone" in one(
        findings(mixture(), recipe), "warning", "*.mlp.*"
    )


# Fused partners


def test_one_shard_ignored_names_the_shards() -> None:
    found = findings(llama(), Recipe(ignore=["*.k_proj"]))
    message = one(found, "error", "model.layers.*.self_attn.qkv_proj")
    assert "q_proj w4a8 group 128, k_proj not quantized, v_proj w4a8 group 128" in message
    assert message.endswith("(2 modules)")


def test_partial_list_with_wrapper_suffixes_is_an_error() -> None:
    prefix = "model.layers.0.self_attn"
    layout = layout_of({f"{prefix}.{leaf}.linear": (256, 256) for leaf in ("q_proj", "k_proj", "v_proj")})
    found = findings(layout, Recipe(ignore=[f"{prefix}.q_proj.linear", f"{prefix}.k_proj"]))
    assert "v_proj w4a8 group 128" in one(found, "error", "model.layers.*.self_attn.qkv_proj")
    whole = Recipe(scheme="none", targets={"re:.*[qkv]_proj$": "w4a8"})
    assert messages(findings(layout, whole), "error") == []


@pytest.mark.parametrize("other", ["fp8", {"group_size": 64}, {"symmetric": False}])
def test_partners_of_different_schemes(other: object) -> None:
    found = findings(llama(), Recipe(targets={"*.up_proj": other}))
    assert "gate_proj w4a8 group 128, up_proj" in one(found, "error", "model.layers.*.mlp.gate_up_proj")


def test_partners_in_latent_attention() -> None:
    attention = "model.layers.0.self_attn"
    layout = layout_of({f"{attention}.q_a_proj": (128, 256), f"{attention}.kv_a_proj_with_mqa": (192, 256)})
    found = findings(layout, Recipe(targets={"*.q_a_proj": "fp8"}))
    assert messages(found, "error", "model.layers.*.self_attn.fused_qkv_a_proj")


def test_experts_of_one_layer_that_differ() -> None:
    found = findings(mixture(), Recipe(targets={"*.experts.0.*": "fp8"}))
    assert "fp8, w4a8 group 128" in one(found, "warning", "model.layers.*.mlp.experts")


# Tensor parallelism


def test_groups_cut_by_ranks() -> None:
    layout = llama(inner=1408)
    message = one(findings(layout, tp=2), "error", DOWN)
    assert message == (
        "in_features 1408 is 704 per rank, no multiple of its group of 128 under --tp 2; "
        "the largest --tp that fits is 1, and group_size 64 fits --tp 2 (2 modules)"
    )
    assert messages(findings(layout, Recipe(group_size=64), tp=2), "error") == []
    assert messages(findings(layout, tp=1), "error") == []


@pytest.mark.parametrize(
    ("inner", "tp", "per_rank"),
    [(11008, 4, "2752"), (29568, 2, "14784"), (13696, 2, "6848"), (13696, 128, "107")],
)
def test_sizes_of_real_models_that_do_not_divide(inner: int, tp: int, per_rank: str) -> None:
    found = findings(llama(hidden=16384, inner=inner, kv=16384), tp=tp)
    assert f"in_features {inner} is {per_rank} per rank" in one(found, "error", DOWN)


def test_blocks_cut_by_ranks_name_the_largest_number_that_fits() -> None:
    layout = mixture(inner=1280)
    found = findings(layout, Recipe(scheme="fp8_per_block", ignore=["*.self_attn.*"]), tp=8)
    for name, side in (("up_proj", "out_features"), ("down_proj", "in_features")):
        message = one(found, "error", f"model.layers.*.mlp.experts.*.{name}")
        assert f"{side} 1280 is 160 per rank, no multiple of its block of 128" in message
        assert "the largest --tp that fits is 5" in message


def test_a_block_narrower_than_128_fits_no_more_than_one_rank() -> None:
    found = findings(mixture(inner=320), Recipe(scheme="fp8_per_block", ignore=["*.self_attn.*"]), tp=8)
    message = one(found, "error", "model.layers.*.mlp.experts.*.up_proj")
    assert "320 is 40 per rank" in message
    assert "the largest --tp that fits is 1" in message


def test_key_and_value_heads_are_repeated_beyond_their_number() -> None:
    layout = llama(hidden=1024, inner=1024, kv=256, num_attention_heads=8, num_key_value_heads=2)
    assert messages(findings(layout, Recipe(scheme="fp8_per_block"), tp=8), "error") == []
    found = findings(layout, tp=3)
    assert one(found, "error", "num_attention_heads") == "8 heads cannot be shared by --tp 3"
    assert "2 heads cannot be shared or repeated by --tp 3" in one(found, "error", "num_key_value_heads")


def test_packed_words_cut_by_ranks() -> None:
    layout = llama(hidden=264, inner=528, kv=264)
    rows = findings(layout, Recipe(group_size=-1), tp=2)
    assert "132 per rank, no multiple of the 8 codes" in one(rows, "error", "model.layers.*.self_attn.o_proj")
    zeros = findings(layout, Recipe(scheme="w4a16-asym", group_size=-1), tp=2)
    assert "132 per rank, no multiple of the 8 zero points" in one(zeros, "error", Q)


def test_what_every_rank_holds_whole_is_not_cut() -> None:
    layout = layout_of({"model.layers.0.self_attn.q_a_proj": (100, 256), "lm_head": (1000, 256)})
    assert messages(findings(layout, Recipe(scheme="fp8_per_block"), tp=8), "error") == []


def test_no_ranks() -> None:
    with pytest.raises(HalfbyteError, match="--tp 0"):
        findings(llama(), tp=0)


# The model


def test_tied_model_with_a_head_of_its_own() -> None:
    found = findings(llama(tie_word_embeddings=True))
    assert "tie_word_embeddings is true" in one(found, "warning", "lm_head.weight")


def test_model_without_any_head() -> None:
    assert "neither stored nor tied" in one(findings(layout_of(block(0))), "warning", "lm_head")


def test_weights_that_stay_are_said() -> None:
    modules = {
        "lm_head": (1000, 256),
        **block(0),
        "visual.blocks.0.fc1": (256, 256),
        "visual.blocks.1.fc1": (256, 256),
    }
    found = findings(layout_of(modules, {"model.layers.0.conv.weight": (256, 1, 4)}, model_type="novel"))
    assert one(found, "note", "visual.blocks.*.fc1") == (
        "weights outside the language model's blocks, or tiny, stay as they are: visual.blocks.*.fc1 (2)"
    )
    assert one(found, "note", "model.layers.*.conv.weight") == (
        "tensors that are no linear weight stay as they are: model.layers.*.conv.weight"
    )
    assert "no family in the table" in one(found, "note", "novel")


def test_nothing_to_quantize() -> None:
    assert "nothing would be quantized" in one(findings(llama(), Recipe(scheme="none")), "error", "llama")


def test_fused_experts_that_fit_no_size_are_reported_not_skipped_in_silence() -> None:
    experts = "model.layers.0.mlp.experts"
    layout = layout_of({"lm_head": (1000, 256)}, {f"{experts}.gate_up_proj": (4, 40, 56)}, num_experts=4)
    found = findings(layout)
    assert messages(found, "error") == [
        "nothing would be quantized; accepted: a recipe that means some layer"
    ]
    assert messages(found, "note", "model.layers.*.mlp.experts.gate_up_proj")


# What vLLM asks for


def test_w4a8_groups_other_than_128() -> None:
    found = findings(llama(), Recipe(group_size=64))
    assert "needs groups of 128, this has groups of 64" in one(found, "note", DOWN)
    assert "one scale per row" in one(findings(llama(), Recipe(group_size=-1)), "note", DOWN)
    assert "no zero points" in one(findings(llama(), Recipe(symmetric=False)), "note", DOWN)
    assert findings(llama(), Recipe(scheme="w4a16", group_size=64)) == []


def test_w4a8_dense_sizes() -> None:
    attention = "model.layers.0.self_attn"
    layout = layout_of(
        {
            "lm_head": (1000, 256),
            f"{attention}.q_a_proj": (1536, 256),
            f"{attention}.kv_a_proj_with_mqa": (576, 256),
        }
    )
    message = one(findings(layout), "note", "model.layers.*.self_attn.fused_qkv_a_proj")
    assert message == "[2112, 256] per rank: vLLM's CUTLASS W4A8 kernel needs multiples of 128"


def test_w4a8_expert_sizes_are_those_of_a_rank() -> None:
    layout = mixture(inner=512)
    assert messages(findings(layout), "note") == []
    found = findings(layout, tp=4)
    message = one(found, "note", "model.layers.*.mlp.experts.*.down_proj")
    assert message == "[256, 128] per rank: vLLM's W4A8 expert kernel needs multiples of 256 (4 modules)"


def test_what_is_rounded_for_vllms_kernel_should_run_there() -> None:
    found = findings(mixture(inner=512), Recipe(target="vllm"), tp=4)
    message = one(found, "warning", "model.layers.*.mlp.experts.*.down_proj")
    assert message == "[256, 128] per rank: vLLM's W4A8 expert kernel needs multiples of 256 (4 modules)"


def test_block_fp8_that_is_ragged() -> None:
    found = findings(llama(hidden=576, inner=1536, kv=192), Recipe(scheme="fp8_per_block"))
    assert messages(found, "error") == []
    qkv = messages(found, "note", "model.layers.*.self_attn.qkv_proj")
    assert any("in_features 576 is no multiple of 128" in message for message in qkv)
    assert any("k_proj has out_features 192" in message for message in qkv)
    assert not any("v_proj" in message for message in qkv)


# QServe's files

QSERVE = Recipe(scheme="w4a8-int8", format="qserve")


def test_omniserve_reads_no_norms() -> None:
    found = findings(llama(), QSERVE)
    assert [(f.level, f.where) for f in found] == [("warning", "format: qserve")]
    assert "OmniServe" in found[0].message
    assert findings(llama(), Recipe(scheme="w4a8-int8", format="qserve", algorithm="rotation")) == []


def test_qserves_config_has_no_exceptions() -> None:
    left = QSERVE.model_copy(update={"ignore": ("*.down_proj",)})
    assert "every linear layer" in one(findings(llama(), left), "error", DOWN)
    mixed = Recipe(scheme="w4a8-int8", format="qserve", targets={"*.down_proj": {"group_size": -1}})
    assert "groups of 128, rows" in one(findings(llama(), mixed), "error", "format: qserve")
    head = Recipe(scheme="w4a8-int8", format="qserve", targets={"lm_head": {}})
    assert "leave it alone" in one(findings(llama(), head), "error", "lm_head")


def test_qserves_readers_have_no_experts() -> None:
    assert any("no experts" in message for message in messages(findings(mixture(), QSERVE), "error"))


# SGLang's w4afp8

W4AFP8 = Recipe(format="w4afp8")


def test_w4afp8_says_that_input_scales_are_a_guess() -> None:
    found = findings(mixture(), W4AFP8)
    assert [(f.level, f.where) for f in found] == [("warning", "format: w4afp8")]
    assert "input_scale of all experts is 1 without data" in found[0].message
    assert findings(mixture(), Recipe(format="w4afp8", algorithm="awq+gptq")) == []


def test_w4afp8_is_of_mixtures() -> None:
    assert "no experts" in one(findings(llama(), W4AFP8), "error", "format: w4afp8")


@pytest.mark.parametrize(
    ("options", "where", "words"),
    [
        ({"ignore": ["*.o_proj"]}, "model.layers.*.self_attn.o_proj", "is left alone"),
        ({"ignore": ["*.experts.1.*"]}, "model.layers.*.mlp.experts.*.up_proj", "is left alone"),
        ({"targets": {"*.o_proj": "w4a8"}}, "model.layers.*.self_attn.o_proj", "would be int4"),
        (
            {"targets": {"*.experts.*": "fp8_per_block"}},
            "model.layers.*.mlp.experts.*.up_proj",
            "would be e4m3",
        ),
        ({"targets": {"lm_head": "fp8_per_block"}}, "lm_head", "16 bits"),
    ],
)
def test_w4afp8_has_no_exceptions(options: dict[str, Any], where: str, words: str) -> None:
    found = findings(mixture(), Recipe(format="w4afp8", **options))
    assert any(words in message for message in messages(found, "error", where)), found
