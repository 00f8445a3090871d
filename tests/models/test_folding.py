"""Which folds are found. That they change nothing is tested on real models, with the code that applies them."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.models.describe import describe
from halfbyte.models.folding import Fold, Folds, find_folds
from halfbyte.models.producers import NormProducer, RowsProducer

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
    "hidden_act": "silu",
}


def norms(*names: str) -> Shapes:
    return {f"{LAYER}.{name}.weight": (64,) for name in names}


def linears(**leaves: tuple[int, int]) -> Shapes:
    return {f"{LAYER}.{name.replace('__', '.')}.weight": shape for name, shape in leaves.items()}


ATTENTION = linears(
    self_attn__q_proj=(64, 64),
    self_attn__k_proj=(32, 64),
    self_attn__v_proj=(32, 64),
    self_attn__o_proj=(64, 64),
)
GATED = linears(mlp__gate_proj=(96, 64), mlp__up_proj=(96, 64), mlp__down_proj=(64, 96))
PLAIN = linears(mlp__up_proj=(96, 64), mlp__down_proj=(64, 96))
DENSE = {**norms("input_layernorm", "post_attention_layernorm"), **ATTENTION, **GATED}


def found(shapes: Shapes, **config: Any) -> Folds:
    fields = {**LLAMA, **config}
    return find_folds(describe(fields, shapes), shapes, fields)


def reading(folds: Folds, leaf: str) -> Fold:
    return next(fold for fold in folds.folds if f"{LAYER}.{leaf}" in fold.consumers)


def names(*leaves: str) -> tuple[str, ...]:
    return tuple(f"{LAYER}.{leaf}" for leaf in leaves)


def test_folds_of_a_dense_block() -> None:
    folds = found(DENSE)
    assert folds.left_out == {}
    value = RowsProducer(f"{LAYER}.self_attn.v_proj", None, start=0, heads=2, stride=16, width=16)
    up = RowsProducer(f"{LAYER}.mlp.up_proj", None, start=0, heads=1, stride=96, width=96)
    assert set(folds.folds) == {
        Fold(
            NormProducer(f"{LAYER}.input_layernorm.weight", None, 0.0),
            names("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            64,
            64,
        ),
        Fold(
            NormProducer(f"{LAYER}.post_attention_layernorm.weight", None, 0.0),
            names("mlp.gate_proj", "mlp.up_proj"),
            64,
            64,
        ),
        Fold(value, names("self_attn.o_proj"), 32, 16, repeats=2),
        Fold(up, names("mlp.down_proj"), 96, 96),
    }


def test_every_reader_of_a_norm_is_listed_whether_quantized_or_not() -> None:
    shapes = {**norms("input_layernorm", "post_attention_layernorm"), **ATTENTION}
    shapes |= linears(mlp__gate=(2, 64), mlp__shared_expert_gate=(1, 64))
    experts = ("shared_expert", "experts.0", "experts.1")
    for expert in experts:
        shapes |= {tensor.replace(".mlp.", f".mlp.{expert}."): shape for tensor, shape in GATED.items()}
    fold = reading(found(shapes), "mlp.experts.0.gate_proj")
    inner = (f"mlp.{expert}.{leaf}" for expert in experts for leaf in ("gate_proj", "up_proj"))
    assert set(fold.consumers) == set(names("mlp.gate", "mlp.shared_expert_gate", *inner))


def test_gemma_reads_other_norms_with_an_offset() -> None:
    more = norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
    folds = found({**DENSE, **more}, model_type="gemma2")
    producer = NormProducer(f"{LAYER}.pre_feedforward_layernorm.weight", None, 1.0)
    assert reading(folds, "mlp.up_proj").producer == producer


def test_a_norm_with_a_bias_hands_it_over() -> None:
    producer = reading(found({**DENSE, f"{LAYER}.input_layernorm.bias": (64,)}), "self_attn.q_proj").producer
    assert isinstance(producer, NormProducer)
    assert producer.bias == f"{LAYER}.input_layernorm.bias"


def test_rows_with_a_bias_hand_it_over() -> None:
    fold = reading(found({**DENSE, f"{LAYER}.self_attn.v_proj.bias": (32,)}), "self_attn.o_proj")
    assert isinstance(fold.producer, RowsProducer)
    assert fold.producer.bias == f"{LAYER}.self_attn.v_proj.bias"


def test_parallel_halves_share_one_fold() -> None:
    shapes = {**norms("input_layernorm"), **ATTENTION, **GATED}
    fold = reading(found(shapes, model_type="cohere"), "self_attn.q_proj")
    assert set(fold.consumers) == set(names(*(f"self_attn.{part}_proj" for part in "qkv"))) | set(
        names("mlp.gate_proj", "mlp.up_proj")
    )


@pytest.mark.parametrize(
    ("config", "changes", "leaf", "why"),
    [
        ({"model_type": "newcomer"}, {}, "mlp.down_proj", "not known in family 'newcomer'"),
        ({"model_type": "olmo2"}, {}, "self_attn.q_proj", "residual stream"),
        ({"clip_qkv": 8.0}, {}, "self_attn.o_proj", "clamped"),
        ({"num_attention_heads": 3}, {}, "self_attn.o_proj", "which rows"),
        ({}, {f"{LAYER}.self_attn.v_proj.weight": (48, 64)}, "self_attn.o_proj", "which rows"),
        ({}, {f"{LAYER}.input_layernorm.weight": None}, "self_attn.q_proj", "is stored"),
        ({}, {f"{LAYER}.mlp.side_channel.weight": (32, 64)}, "mlp.up_proj", "side_channel may read"),
        ({}, {f"{LAYER}.mlp.odd_tensor": (2, 32, 64)}, "mlp.up_proj", "odd_tensor may read"),
        ({}, {f"{LAYER}.mlp.gate_proj.weight": None}, "mlp.down_proj", "does not pass"),
        ({}, {f"{LAYER}.mlp.up_proj.weight": (48, 64)}, "mlp.down_proj", "which rows"),
        ({"model_type": "gpt_oss"}, {}, "mlp.down_proj", "does not pass"),
        ({"model_type": "opt", "do_layer_norm_before": False}, {}, "self_attn.q_proj", "residual stream"),
    ],
)
def test_what_has_no_fold_says_why(
    config: dict[str, Any], changes: dict[str, tuple[int, ...] | None], leaf: str, why: str
) -> None:
    shapes = {tensor: shape for tensor, shape in {**DENSE, **changes}.items() if shape is not None}
    folds = found(shapes, **config)
    assert why in folds.left_out[f"{LAYER}.{leaf}"]
    assert not any(f"{LAYER}.{leaf}" in fold.consumers for fold in folds.folds)


@pytest.mark.parametrize(("activation", "folds"), [("relu", True), ("relu2", False), ("gelu", False)])
def test_a_plain_mlp_passes_factors_on_through_relu_alone(activation: str, folds: bool) -> None:
    shapes = {**norms("input_layernorm", "post_attention_layernorm"), **ATTENTION, **PLAIN}
    left_out = found(shapes, hidden_act=activation).left_out
    assert (f"{LAYER}.mlp.down_proj" not in left_out) == folds


def test_an_unknown_tensor_leaves_rows_to_fold() -> None:
    folds = found({**DENSE, **linears(mlp__side_channel=(32, 64))})
    kinds = {type(fold.producer) for fold in folds.folds}
    assert kinds == {RowsProducer}


def test_fused_rows_are_found_inside_their_projections() -> None:
    shapes = {
        **norms("input_layernorm", "post_attention_layernorm"),
        **linears(self_attn__qkv_proj=(128, 64), self_attn__o_proj=(64, 64)),
        **linears(mlp__gate_up_proj=(192, 64), mlp__down_proj=(64, 96)),
    }
    folds = found(shapes, model_type="phi3")
    value, up = (reading(folds, leaf).producer for leaf in ("self_attn.o_proj", "mlp.down_proj"))
    assert value == RowsProducer(f"{LAYER}.self_attn.qkv_proj", None, start=96, heads=2, stride=16, width=16)
    assert up == RowsProducer(f"{LAYER}.mlp.gate_up_proj", None, start=96, heads=1, stride=96, width=96)


def test_latent_values_alternate_with_keys() -> None:
    shapes = {
        **norms("input_layernorm", "post_attention_layernorm"),
        **{f"{LAYER}.self_attn.{name}_layernorm.weight": (24,) for name in ("q_a", "kv_a")},
        **linears(self_attn__q_a_proj=(24, 64), self_attn__q_b_proj=(96, 24)),
        **linears(self_attn__kv_a_proj_with_mqa=(32, 64), self_attn__kv_b_proj=(4 * 28, 24)),
        **linears(self_attn__o_proj=(64, 48)),
        **GATED,
    }
    folds = found(shapes, model_type="deepseek_v3", num_key_value_heads=4)
    assert folds.left_out == {}
    latent = RowsProducer(f"{LAYER}.self_attn.kv_b_proj", None, start=16, heads=4, stride=28, width=12)
    assert reading(folds, "self_attn.o_proj").producer == latent
    for name in ("q", "kv"):
        fold = reading(folds, f"self_attn.{name}_b_proj")
        assert fold.producer == NormProducer(f"{LAYER}.self_attn.{name}_a_layernorm.weight", None, 0.0)
        assert (fold.channels, len(fold.consumers)) == (24, 1)
