"""Which rule decides for which module, and which groups fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfbyte.assignment import fit_group
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import Role
from halfbyte.recipe import Recipe
from halfbyte.schemes import PRESETS
from tests.layouts import layout_of, llama, mixture

W4A8, FP8, W8A16 = PRESETS["w4a8"], PRESETS["fp8"], PRESETS["w8a16"]
Q0, DOWN0 = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
GATE = "model.layers.0.mlp.gate"


def test_linears_and_experts_are_quantized_and_nothing_else() -> None:
    layout = mixture()
    schemes = Recipe().assign(layout).schemes
    assert list(schemes) == [module.name for module in layout.modules]
    for module in layout.modules:
        expected = W4A8 if module.role in (Role.LINEAR, Role.EXPERT) else None
        assert schemes[module.name] == expected, module.name
    assert {m.name for m in layout.modules if m.role is Role.ROUTER} == {
        GATE,
        f"{GATE[:-4]}shared_expert_gate",
    }


@pytest.mark.parametrize("everything", ["*", "re:.*", "re:model", "re:.*mlp.*gate"])
def test_broad_targets_spare_routers_embeddings_and_heads(everything: str) -> None:
    layout = mixture()
    schemes = Recipe(targets={everything: "fp8"}).assign(layout).schemes
    quantized = {name for name, scheme in schemes.items() if scheme}
    assert quantized == {module.name for module in layout.modules if module.role.quantizable}


@pytest.mark.parametrize("named", [GATE, "*.mlp.gate", r"re:.*mlp\.gate$"])
def test_a_router_is_quantized_when_it_alone_is_named(named: str) -> None:
    assert Recipe(targets={named: "fp8"}).assign(mixture()).schemes[GATE] == FP8


@pytest.mark.parametrize("named", ["lm_head", "re:lm_head", "*head"])
def test_untied_head_by_name(named: str) -> None:
    assignment = Recipe(targets={named: "w8a16"}).assign(llama())
    assert assignment.schemes["lm_head"] == W8A16
    assert assignment.schemes["model.embed_tokens"] is None


def test_tied_head_cannot_be_a_target_whether_stored_or_not() -> None:
    for layout in (llama(tie_word_embeddings=True), layout_of({Q0: (256, 256)}, tie_word_embeddings=True)):
        with pytest.raises(HalfbyteError, match=r"'lm_head' means lm_head, which is tied"):
            Recipe(targets={"lm_head": "w8a16"}).assign(layout)
        assert Recipe(targets={"*": "w8a16"}).assign(layout).schemes[Q0] == W8A16


def test_an_embedding_cannot_be_a_target() -> None:
    with pytest.raises(HalfbyteError, match=r"model\.embed_tokens: an embedding table is looked up"):
        Recipe(targets={"model.embed_tokens": "w8a16"}).assign(llama())


@pytest.mark.parametrize(
    ("ignore", "targets", "expected"),
    [
        ([], {DOWN0: "fp8", "re:.*down_proj": "w8a16"}, FP8),
        ([], {"re:.*down_proj": "w8a16", DOWN0: "fp8"}, FP8),
        ([], {"*.down_proj": "w8a16", "re:.*down_proj": "fp8"}, FP8),
        ([], {"*.down_proj": "fp8", "*.mlp.*": "w8a16"}, FP8),
        ([], {"re:.*down_proj": "fp8", "re:.*": "w8a16"}, FP8),
        (["re:.*mlp"], {DOWN0: "fp8"}, FP8),
        (["re:.*mlp"], {"*.down_proj": "fp8"}, None),
        (["re:.*mlp"], {"re:.*down_proj": "fp8"}, None),
        ([DOWN0], {"re:.*down_proj": "fp8"}, None),
        (["*.mlp.*"], {"re:.*down_proj": "fp8"}, FP8),
        ([], {}, W4A8),
    ],
)
def test_which_rule_decides(ignore: list[str], targets: dict[str, str], expected: object) -> None:
    assert Recipe(ignore=ignore, targets=targets).assign(llama()).schemes[DOWN0] == expected


def test_only_targets_with_scheme_none() -> None:
    schemes = Recipe(scheme="none", targets={"*.experts.*": "w4a8"}).assign(mixture()).schemes
    assert {name for name, scheme in schemes.items() if scheme} == {
        name for name in schemes if ".experts." in name
    }


def test_explicit_names_per_layer_load() -> None:
    layout = llama(blocks=8)
    downs = {f"model.layers.{index}.mlp.down_proj": "fp8" for index in range(8)}
    schemes = Recipe(targets=downs).assign(layout).schemes
    assert {name for name, scheme in schemes.items() if scheme == FP8} == set(downs)


def test_ignored_tower_stays_out_by_regular_expression() -> None:
    layout = layout_of({"tower.layers.0.fc1": (256, 256), "model.tower.layers.0.fc1": (256, 256)})
    schemes = Recipe(ignore=["re:tower.*"]).assign(layout).schemes
    assert schemes == {"tower.layers.0.fc1": None, "model.tower.layers.0.fc1": W4A8}


def test_ignore_entries_with_a_wrapper_suffix_mean_the_projection() -> None:
    schemes = Recipe(ignore=[f"{Q0}.linear"]).assign(llama()).schemes
    assert schemes[Q0] is None
    wrapped = layout_of({f"{Q0}.linear": (256, 256), DOWN0: (256, 512)})
    assert Recipe(ignore=[Q0]).assign(wrapped).schemes == {f"{Q0}.linear": None, DOWN0: W4A8}


@pytest.mark.parametrize(
    ("scheme", "in_features", "group"),
    [
        ("w4a8", 1024, 128),
        ("w4a8", 576, 64),
        ("w4a8", 96, 32),
        ("w4a8-int8", 576, 64),
        ("w4a8", 80, None),
        ("nvfp4", 48, 16),
        ("nvfp4", 40, None),
        ("mxfp4", 96, 32),
        ("mxfp4", 80, None),
        ("mxfp8", 48, None),
    ],
)
def test_group_that_fits(scheme: str, in_features: int, group: int | None) -> None:
    fitting = fit_group(PRESETS[scheme], in_features)
    assert (fitting.weights.group_size if fitting else None) == group


@pytest.mark.parametrize("scheme", ["w8a16", "fp8", "fp8_per_tensor", "fp8_per_block"])
def test_schemes_without_groups_take_any_width(scheme: str) -> None:
    assert fit_group(PRESETS[scheme], 577) == PRESETS[scheme]


def test_smaller_groups_are_said_once_per_width() -> None:
    layout = llama(blocks=30, hidden=576, inner=1536)
    assignment = Recipe().assign(layout)
    assert assignment.notes == ["180 modules with in_features 576: group 64 instead of 128"]
    assert assignment.schemes[Q0] == replace(W4A8, weights=W4A8.weights.with_group_size(64))
    assert assignment.schemes[DOWN0] == W4A8


def test_a_width_that_no_group_fits_is_an_error_that_says_what_to_do() -> None:
    layout = llama(hidden=256, inner=520)
    with pytest.raises(HalfbyteError) as caught:
        Recipe(scheme="nvfp4").assign(layout)
    assert str(caught.value) == (
        "scheme nvfp4: model.layers.*.mlp.down_proj (2 modules) has in_features 520, no multiple of a "
        "group of 16; accepted: such modules in ignore"
    )
    with pytest.raises(HalfbyteError, match=r"group of 128 or 64 or 32.*group_size: -1"):
        Recipe().assign(layout)
    Recipe(targets={"*.down_proj": {"group_size": -1}}).assign(layout)
    Recipe(ignore=["*.down_proj"]).assign(layout)


def test_methods_follow_their_module() -> None:
    methods = (
        Recipe(clip="mse", ignore=["*.o_proj"], targets={Q0: {"clip": "none"}})
        .assign(llama(blocks=1))
        .methods
    )
    assert methods[Q0].clip == "none"
    assert methods[DOWN0].clip == "mse"
    assert "model.layers.0.self_attn.o_proj" not in methods
    assert "lm_head" not in methods
