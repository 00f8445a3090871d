"""Which tensors a rotation has to turn. That turning them changes nothing is tested on real models."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.producers import NormProducer, RowsProducer
from halfbyte.models.residual import Residual, StreamNorm, TurnableHeads, find_residual

LAYER = "model.layers.0"
Shapes = dict[str, tuple[int, ...]]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "tie_word_embeddings": False,
}
AROUND: Shapes = {"model.embed_tokens.weight": (100, 64), "model.norm.weight": (64,)}
HEAD: Shapes = {"lm_head.weight": (100, 64)}
BLOCK: Shapes = {
    f"{LAYER}.input_layernorm.weight": (64,),
    f"{LAYER}.post_attention_layernorm.weight": (64,),
    f"{LAYER}.self_attn.q_proj.weight": (64, 64),
    f"{LAYER}.self_attn.k_proj.weight": (32, 64),
    f"{LAYER}.self_attn.v_proj.weight": (32, 64),
    f"{LAYER}.self_attn.o_proj.weight": (64, 64),
}
MLP: Shapes = {
    f"{LAYER}.mlp.gate_proj.weight": (96, 64),
    f"{LAYER}.mlp.up_proj.weight": (96, 64),
    f"{LAYER}.mlp.down_proj.weight": (64, 96),
}
DENSE = {**AROUND, **HEAD, **BLOCK, **MLP}
VALUES = RowsProducer(f"{LAYER}.self_attn.v_proj", None, start=0, heads=2, stride=16, width=16)


def found(shapes: Shapes, **config: Any) -> Residual:
    fields = {**LLAMA, **config}
    return find_residual(describe(fields, shapes), shapes, fields)


def norm(name: str, offset: float = 0.0) -> NormProducer:
    return NormProducer(name, None, offset)


def names(*leaves: str) -> tuple[str, ...]:
    return tuple(f"{LAYER}.{leaf}" for leaf in leaves)


def test_a_dense_model() -> None:
    assert found(DENSE) == Residual(
        hidden=64,
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        head_origin="lm_head.weight",
        norms=(
            StreamNorm(
                norm(f"{LAYER}.input_layernorm.weight"),
                names("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ),
            StreamNorm(
                norm(f"{LAYER}.post_attention_layernorm.weight"), names("mlp.gate_proj", "mlp.up_proj")
            ),
        ),
        final_norm=norm("model.norm.weight"),
        writers=names("self_attn.o_proj", "mlp.down_proj"),
        biases=(),
        heads=(TurnableHeads(VALUES, f"{LAYER}.self_attn.o_proj"),),
    )


def test_a_tied_head_is_made_of_the_embedding() -> None:
    residual = found({**AROUND, **BLOCK, **MLP}, tie_word_embeddings=True)
    assert (residual.head, residual.head_origin) == ("lm_head.weight", "model.embed_tokens.weight")


def test_routers_shared_experts_and_their_gates_read_the_stream_and_experts_write_it() -> None:
    shapes = {**AROUND, **HEAD, **BLOCK}
    shapes |= {f"{LAYER}.mlp.gate.weight": (2, 64), f"{LAYER}.mlp.shared_expert_gate.weight": (1, 64)}
    experts = ("shared_expert", "experts.0", "experts.1")
    for expert in experts:
        shapes |= {tensor.replace(".mlp.", f".mlp.{expert}."): shape for tensor, shape in MLP.items()}
    residual = found(shapes, model_type="qwen2_moe")
    inner = (f"mlp.{expert}.{leaf}" for expert in experts for leaf in ("gate_proj", "up_proj"))
    assert set(residual.norms[1].readers) == set(names("mlp.gate", "mlp.shared_expert_gate", *inner))
    assert set(residual.writers) == set(
        names("self_attn.o_proj", *(f"mlp.{expert}.down_proj" for expert in experts))
    )


def test_biases_that_are_added_to_the_stream() -> None:
    inside = {f"{LAYER}.self_attn.{leaf}.bias": (size,) for leaf, size in (("q_proj", 64), ("v_proj", 32))}
    added = {f"{LAYER}.self_attn.o_proj.bias": (64,), f"{LAYER}.mlp.down_proj.bias": (64,)}
    residual = found({**DENSE, **inside, **added})
    assert set(residual.biases) == set(added)
    assert residual.heads[0].rows.bias == f"{LAYER}.self_attn.v_proj.bias"


def test_experts_in_one_tensor_have_their_biases_in_another() -> None:
    experts = {
        f"{LAYER}.mlp.router.weight": (2, 64),
        f"{LAYER}.mlp.experts.gate_up_proj": (2, 64, 192),
        f"{LAYER}.mlp.experts.gate_up_proj_bias": (2, 192),
        f"{LAYER}.mlp.experts.down_proj": (2, 96, 64),
        f"{LAYER}.mlp.experts.down_proj_bias": (2, 64),
    }
    residual = found({**AROUND, **HEAD, **BLOCK, **experts}, model_type="gpt_oss", num_local_experts=2)
    assert residual.biases == (f"{LAYER}.mlp.experts.down_proj_bias",)


def test_gains_with_an_offset_have_it_everywhere() -> None:
    residual = found(DENSE, model_type="gemma")
    assert {entry.norm.offset for entry in residual.norms} == {1.0}
    assert residual.final_norm == norm("model.norm.weight", 1.0)


@pytest.mark.parametrize(
    "config", [{"clip_qkv": 8.0}, {"num_attention_heads": 3}, {"model_type": "qwen3_next"}]
)
def test_heads_stay_where_values_are_clamped_unknown_or_gated(config: dict[str, Any]) -> None:
    residual = found(DENSE, **config)
    assert residual.heads == ()
    assert residual.writers == found(DENSE).writers


def test_a_multimodal_config_without_other_modalities() -> None:
    config = {"model_type": "newcomer", "text_config": LLAMA}
    assert find_residual(describe(config, DENSE), DENSE, config) == found(DENSE)


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ({"model_type": "newcomer"}, {}, "wired is not known"),
        ({"model_type": "gpt_neox"}, {}, "subtract the mean"),
        ({"model_type": "cohere"}, {}, "subtract the mean"),
        ({"model_type": "olmo2"}, {}, "behind attention and the MLP"),
        (
            {"model_type": "gemma2"},
            {
                f"{LAYER}.pre_feedforward_layernorm.weight": (64,),
                f"{LAYER}.post_feedforward_layernorm.weight": (64,),
            },
            "post_attention_layernorm.weight scales channels behind",
        ),
        (
            {"model_type": "glm4"},
            {f"{LAYER}.post_mlp_layernorm.weight": (64,)},
            "post_mlp_layernorm.weight scales",
        ),
        ({}, {f"{LAYER}.input_layernorm.bias": (64,)}, "input_layernorm.bias is added"),
        ({}, {"model.norm.bias": (64,)}, "model.norm.weight, model.norm.bias"),
        ({}, {"model.norm.weight": None}, "before the output head, found: none"),
        ({}, {"model.embed_positions.weight": (50, 64)}, "embed_tokens, model.embed_positions"),
        ({}, {"model.embed_tokens.weight": None}, "found: none"),
        ({}, {"lm_head.weight": None}, "one output head"),
        ({}, {f"{LAYER}.input_layernorm.weight": None}, "is stored"),
        ({}, {f"{LAYER}.mlp.side_channel.weight": (32, 64)}, "side_channel may read"),
        ({}, {f"{LAYER}.mlp.odd_tensor": (2, 32, 64)}, "odd_tensor may read"),
        ({}, {"model.layers.1.eh_proj.weight": (64, 128)}, "eh_proj may read"),
        ({}, {"multi_modal_projector.linear_1.weight": (64, 48)}, "multi_modal_projector.linear_1 may read"),
        ({}, {"vision_tower.patch.weight": (64, 3, 14, 14)}, "vision_tower.patch.weight may read"),
        ({}, {f"{LAYER}.mlp.down_proj.weight": (48, 96)}, "down_proj has 48 channels"),
    ],
)
def test_what_cannot_be_rotated_says_why_in_one_line(
    config: dict[str, Any], changes: dict[str, tuple[int, ...] | None], why: str
) -> None:
    shapes = {tensor: shape for tensor, shape in {**DENSE, **changes}.items() if shape is not None}
    with pytest.raises(HalfbyteError, match="cannot be rotated") as refused:
        found(shapes, **config)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
