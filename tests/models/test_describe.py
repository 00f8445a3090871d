"""Layouts by name and shape: roles, orientation, fused experts, tied heads."""

from __future__ import annotations

import pytest

from halfbyte.models.describe import describe
from halfbyte.models.layout import ModelLayout, Role, WeightSource

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MOE = {**LLAMA, "model_type": "new_moe", "num_experts": 4}
EXPERTS = "model.layers.0.mlp.experts"


def role(name: str, shape: tuple[int, int], config: dict | None = None, **more: tuple[int, ...]) -> Role:
    layout = describe(config or MOE, {f"{name}.weight": shape, **more})
    return layout.modules[0].role


def sources(layout: ModelLayout) -> dict[str, tuple[tuple[int, int], WeightSource]]:
    return {module.name: (module.shape, module.source) for module in layout.modules}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", (64, 64), Role.LINEAR),
        ("model.layers.0.mlp.gate_proj", (128, 64), Role.LINEAR),
        ("model.layers.0.mlp.shared_expert.gate_proj", (128, 64), Role.LINEAR),
        ("model.layers.0.mlp.shared_experts.down_proj", (64, 128), Role.LINEAR),
        ("model.layers.0.mlp.experts.3.down_proj", (64, 128), Role.EXPERT),
        ("model.layers.0.block_sparse_moe.experts.3.w2", (64, 128), Role.EXPERT),
        ("model.layers.0.mlp.gate", (4, 64), Role.ROUTER),
        ("model.layers.0.block_sparse_moe.gate", (4, 64), Role.ROUTER),
        ("model.layers.0.mlp.router", (4, 64), Role.ROUTER),
        ("model.layers.0.mlp.router.classifier", (4, 64), Role.ROUTER),
        ("model.layers.0.block_sparse_moe.router.layer", (4, 64), Role.ROUTER),
        ("model.layers.0.mlp.gate.wg", (4, 64), Role.ROUTER),
        ("model.layers.0.mlp.shared_expert_gate", (1, 64), Role.ROUTER),
        ("model.layers.0.attn.gate", (64, 64), Role.LINEAR),
        ("model.embed_tokens", (100, 64), Role.EMBEDDING),
        ("model.some_table", (100, 64), Role.EMBEDDING),
        ("transformer.wpe", (512, 64), Role.EMBEDDING),
        ("model.decoder.embed_positions", (514, 64), Role.EMBEDDING),
        ("transformer.word_embeddings", (100, 64), Role.EMBEDDING),
        ("lm_head", (100, 64), Role.LM_HEAD),
        ("language_model.lm_head", (100, 64), Role.LM_HEAD),
        ("embed_out", (100, 64), Role.LM_HEAD),
        ("model.layers.0.self_attn.q_norm", (4, 16), Role.NORM),
        ("model.layers.0.input_layernorm", (4, 16), Role.NORM),
        ("score", (2, 64), Role.OTHER),
        ("visual.blocks.0.attn.qkv", (192, 64), Role.OTHER),
        ("model.vision_tower.layers.0.mlp.fc1", (128, 64), Role.OTHER),
        ("multi_modal_projector.linear_1", (64, 128), Role.OTHER),
        ("mtp.layers.0.mlp.gate_proj", (128, 64), Role.OTHER),
        ("model.layers.2.self_attn.q_proj", (64, 64), Role.OTHER),  # past the last of two blocks
        ("model.layers.2.embed_tokens", (100, 64), Role.OTHER),
        ("model.layers.0.altup.correction_coefs", (4, 64), Role.OTHER),
    ],
)
def test_role(name: str, shape: tuple[int, int], expected: Role) -> None:
    assert role(name, shape) is expected


def test_gate_of_a_dense_model_is_a_linear() -> None:
    assert role("model.layers.0.mlp.gate", (128, 64), LLAMA) is Role.LINEAR


def test_router_is_found_where_the_config_does_not_say_how_many_experts_there_are() -> None:
    gate = {"model.layers.0.ffn.gate.weight": (4, 64)}
    for expert in ("model.layers.0.ffn.experts.3.up_proj.weight", "model.layers.0.ffn.experts.down_proj"):
        shape = (48, 64) if expert.endswith("weight") else (4, 64, 48)
        assert describe(LLAMA, {**gate, expert: shape}).modules[0].role is Role.ROUTER


def test_state_space_layers_stay_as_they_are_whatever_their_name() -> None:
    layout = describe(
        MOE,
        {
            "model.layers.0.linear_attn.A_log": (8,),
            "model.layers.0.linear_attn.conv1d.weight": (64, 1, 4),
            "model.layers.0.linear_attn.in_proj_qkvz.weight": (256, 64),
            "model.layers.1.self_attn.q_proj.weight": (64, 64),
        },
    )
    assert [module.role for module in layout.modules] == [Role.OTHER, Role.LINEAR]
    assert layout.left_out == ("model.layers.0.linear_attn.conv1d.weight",)


def test_biases_scales_and_vectors_are_no_modules() -> None:
    layout = describe(
        MOE,
        {
            "model.layers.0.self_attn.q_proj.bias": (64,),
            "model.layers.0.input_layernorm.weight": (64,),
            "model.layers.0.self_attn.sinks": (4,),
            f"{EXPERTS}.gate_up_proj_bias": (4, 256),
        },
    )
    assert layout.modules == ()
    assert layout.left_out == ()


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.qkv_proj"),
        (["self_attn.q_proj.linear", "self_attn.k_proj.linear"], "self_attn.qkv_proj"),
        (["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj"),
        (
            ["block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w3"],
            "block_sparse_moe.experts.1.w13",
        ),
        (["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], "self_attn.fused_qkv_a_proj"),
        (["self_attn.o_proj", "mlp.down_proj", "self_attn.qkv_proj", "self_attn.kv_b_proj"], None),
    ],
)
def test_fused_groups(names: list[str], group: str | None) -> None:
    prefix = "model.layers.1."
    layout = describe(MOE, {f"{prefix}{name}.weight": (64, 64) for name in names})
    assert {module.fused_group for module in layout.modules} == {prefix + group if group else None}


@pytest.mark.parametrize(
    ("gate_up", "down", "transposed"),
    [
        ((4, 96, 64), (4, 64, 48), False),
        ((4, 64, 96), (4, 48, 64), True),
        ((4, 64, 64), (4, 64, 32), False),  # 2 x 32 rows are as many as the hidden size: down_proj tells
        ((4, 64, 64), (4, 32, 64), True),
        ((4, 128, 64), (4, 64, 64), False),  # here gate_up_proj does
        ((4, 64, 128), (4, 64, 64), True),
    ],
)
def test_fused_experts_unfold(gate_up: tuple[int, ...], down: tuple[int, ...], transposed: bool) -> None:
    layout = describe(MOE, {f"{EXPERTS}.down_proj": down, f"{EXPERTS}.gate_up_proj": gate_up})
    inner = down[1] if transposed else down[2]
    found = sources(layout)
    assert list(found)[:5] == [*(f"{EXPERTS}.{e}.down_proj" for e in range(4)), f"{EXPERTS}.0.gate_proj"]
    assert len(found) == 4 * 3
    assert found[f"{EXPERTS}.3.down_proj"] == (
        (64, inner),
        WeightSource(f"{EXPERTS}.down_proj", expert=3, transposed=transposed),
    )
    assert found[f"{EXPERTS}.2.gate_proj"] == (
        (inner, 64),
        WeightSource(f"{EXPERTS}.gate_up_proj", 2, (0, inner, 1), transposed),
    )
    assert found[f"{EXPERTS}.2.up_proj"] == (
        (inner, 64),
        WeightSource(f"{EXPERTS}.gate_up_proj", 2, (inner, 2 * inner, 1), transposed),
    )
    assert {module.role for module in layout.modules} == {Role.EXPERT}
    assert layout.modules[4].fused_group == layout.modules[5].fused_group == f"{EXPERTS}.0.gate_up_proj"


def test_square_experts_go_by_the_family() -> None:
    shapes = {f"{EXPERTS}.up_proj": (4, 64, 64), f"{EXPERTS}.down_proj": (4, 64, 64)}
    assert not any(m.source.transposed for m in describe(MOE, shapes).modules)
    assert all(m.source.transposed for m in describe({**MOE, "model_type": "gpt_oss"}, shapes).modules)


def test_gpt_oss_interleaves_gate_and_up() -> None:
    config = {**MOE, "model_type": "gpt_oss"}
    found = sources(describe(config, {f"{EXPERTS}.gate_up_proj": (4, 64, 96)}))
    assert found[f"{EXPERTS}.1.gate_proj"][1].rows == (0, 96, 2)
    assert found[f"{EXPERTS}.1.up_proj"][1].rows == (1, 96, 2)


def test_granite_experts_have_other_names() -> None:
    block = "model.layers.0.block_sparse_moe"
    shapes = {f"{block}.input_linear.weight": (4, 96, 64), f"{block}.output_linear.weight": (4, 64, 48)}
    found = sources(describe({**MOE, "model_type": "granitemoe"}, shapes))
    assert found[f"{block}.experts.1.up_proj"][0] == (48, 64)
    assert found[f"{block}.experts.1.down_proj"][0] == (64, 48)


def test_experts_whose_sizes_fit_nothing_are_left_out_and_said() -> None:
    layout = describe(MOE, {f"{EXPERTS}.gate_up_proj": (4, 40, 56)})
    assert layout.modules == ()
    assert layout.left_out == (f"{EXPERTS}.gate_up_proj",)


def test_experts_of_a_prediction_head_stay_as_they_are() -> None:
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert describe(MOE, {name: (4, 96, 64)}).left_out == (name,)


def test_latent_experts_read_a_smaller_state() -> None:
    config = {**MOE, "moe_latent_size": 32}
    found = sources(
        describe(config, {f"{EXPERTS}.up_proj": (4, 48, 32), f"{EXPERTS}.down_proj": (4, 32, 48)})
    )
    assert found[f"{EXPERTS}.0.up_proj"][0] == (48, 32)
    assert found[f"{EXPERTS}.0.down_proj"][0] == (32, 48)


def test_conv1d_is_transposed_and_linear_of_the_same_name_is_not() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "vocab_size": 100}
    attention, projection = "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"
    conv1d = describe(gpt2, {f"{attention}.weight": (64, 192), f"{projection}.weight": (64, 64)})
    linear = describe(
        {**gpt2, "model_type": "gpt_bigcode"},
        {f"{attention}.weight": (192, 64), f"{projection}.weight": (64, 64)},
    )
    for layout, transposed in ((conv1d, True), (linear, False)):
        assert [module.shape for module in layout.modules] == [(192, 64), (64, 64)]
        assert [module.source.transposed for module in layout.modules] == [transposed] * 2


@pytest.mark.parametrize(
    ("config", "has_head", "tied"),
    [
        ({"model_type": "llama", "tie_word_embeddings": True}, False, True),
        ({"model_type": "llama", "tie_word_embeddings": True}, True, True),
        ({"model_type": "llama", "tie_word_embeddings": False}, True, False),
        ({"model_type": "llama", "tie_word_embeddings": False}, False, False),
        ({"model_type": "llama"}, True, False),
        ({"model_type": "llama"}, False, True),
        ({"model_type": "gemma2"}, True, True),  # the family's default
        ({"model_type": "llava", "text_config": {"tie_word_embeddings": True}}, True, True),
        ({"model_type": "llava", "tie_word_embeddings": False, "text_config": {}}, True, False),
    ],
)
def test_tied(config: dict, has_head: bool, tied: bool) -> None:
    shapes = {"model.embed_tokens.weight": (100, 64)} | ({"lm_head.weight": (100, 64)} if has_head else {})
    assert describe(config, shapes).tied is tied


def test_sizes_come_from_the_language_part_of_a_multimodal_config() -> None:
    config = {
        "model_type": "qwen3_vl_moe",
        "vision_config": {"hidden_size": 48, "num_attention_heads": 3},
        "text_config": {**MOE, "model_type": "qwen3_vl_moe_text"},
    }
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    layout = describe(config, {name: (4, 64, 96), "model.visual.blocks.0.mlp.fc1.weight": (96, 48)})
    assert layout.family == "qwen3_vl_moe"
    assert layout.known
    assert (layout.heads, layout.kv_heads) == (4, 2)
    assert layout.modules[0].shape == (48, 64)
    assert layout.modules[-1].role is Role.OTHER


def test_unknown_family_is_said() -> None:
    assert not describe(MOE, {}).known
    assert not describe({}, {}).known
    assert describe(LLAMA, {}).known
