"""Layouts made of names and sizes alone, for rules that look at nothing else."""

from __future__ import annotations

from typing import Any

from halfbyte.models.describe import describe
from halfbyte.models.layout import ModelLayout

Shapes = dict[str, tuple[int, ...]]


def block(
    index: int, hidden: int = 256, inner: int = 512, kv: int = 128, prefix: str = "model."
) -> dict[str, tuple[int, int]]:
    """The linears of one Llama block, module name -> shape."""
    attention, mlp = f"{prefix}layers.{index}.self_attn", f"{prefix}layers.{index}.mlp"
    return {
        f"{attention}.q_proj": (hidden, hidden),
        f"{attention}.k_proj": (kv, hidden),
        f"{attention}.v_proj": (kv, hidden),
        f"{attention}.o_proj": (hidden, hidden),
        f"{mlp}.gate_proj": (inner, hidden),
        f"{mlp}.up_proj": (inner, hidden),
        f"{mlp}.down_proj": (hidden, inner),
    }


def layout_of(
    modules: dict[str, tuple[int, ...]], tensors: Shapes | None = None, **config: Any
) -> ModelLayout:
    """The layout of ``modules`` (names without ``.weight``) and other ``tensors`` of an untied Llama."""
    fields = {"model_type": "llama", "hidden_size": 256, "vocab_size": 1000, "tie_word_embeddings": False}
    shapes: Shapes = {f"{name}.weight": shape for name, shape in modules.items()}
    return describe({**fields, **config}, {**shapes, **(tensors or {})})


def llama(blocks: int = 2, hidden: int = 256, inner: int = 512, kv: int = 128, **config: Any) -> ModelLayout:
    """An untied Llama with ``lm_head`` and embedding."""
    modules: dict[str, tuple[int, ...]] = {"model.embed_tokens": (1000, hidden), "lm_head": (1000, hidden)}
    for index in range(blocks):
        modules |= block(index, hidden, inner, kv)
    return layout_of(modules, hidden_size=hidden, **config)


def mixture(experts: int = 4, hidden: int = 256, inner: int = 256, **config: Any) -> ModelLayout:
    """One block of an untied mixture of experts: attention, router, experts, shared expert and its gate."""
    mlp = "model.layers.0.mlp"
    modules: dict[str, tuple[int, ...]] = {
        name: shape for name, shape in block(0, hidden).items() if "self_attn" in name
    }
    modules |= {
        "lm_head": (1000, hidden),
        f"{mlp}.gate": (experts, hidden),
        f"{mlp}.shared_expert_gate": (1, hidden),
    }
    for expert in [*(f"experts.{index}" for index in range(experts)), "shared_expert"]:
        modules[f"{mlp}.{expert}.gate_proj"] = modules[f"{mlp}.{expert}.up_proj"] = (inner, hidden)
        modules[f"{mlp}.{expert}.down_proj"] = (hidden, inner)
    fields = {"model_type": "qwen2_moe", "num_experts": experts, "hidden_size": hidden}
    return layout_of(modules, **{**fields, **config})
