"""Decoder layers that norm, attend, add, norm, run a gated MLP and add, and norms that scale by their weight.

Others with the same parts may combine them in another way, so that parts alone do not tell; nor do names alone, which
anyone may give to a class of their own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from halfbyte.kernels.fused import GATES

_FAMILIES = ("Llama", "Ministral", "Mistral", "Qwen2", "Qwen3", "SeedOss", "SmolLM3")
_HOME = "transformers.models."
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def is_llama_like(module: nn.Module, kind: str) -> bool:
    """kind: ``DecoderLayer``, ``Attention``, ``MLP`` or ``RMSNorm`` of transformers, with the forward it has there."""
    cls = type(module)
    return (
        cls.__name__ in {f"{family}{kind}" for family in _FAMILIES}
        and cls.__module__.startswith(_HOME)
        and cls.forward.__module__ == cls.__module__
    )


def norms_of(module: nn.Module) -> list[Any]:
    """All RMSNorms in it that are of the known kind."""
    return [norm for norm in module.modules() if is_llama_like(norm, "RMSNorm")]


def unlike_llama(layer: nn.Module) -> str:
    """What in a decoder layer of the known kind is of another one; empty if nothing is."""
    attention: Any = layer.get_submodule("self_attn")
    mlp: Any = layer.get_submodule("mlp")
    gate = attention.config.hidden_act
    if gate not in GATES:
        return f"its gate is {gate}"
    kinds = {"self_attn": "Attention", "mlp": "MLP"}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += [f"self_attn.{name}" for name in attention._modules if name not in (*QKV, "o_proj")]
    for name, kind in (kinds | dict.fromkeys(norms, "RMSNorm")).items():
        if not is_llama_like(part := layer.get_submodule(name), kind):
            return f"its {name} is a {type(part).__name__} that is not known"
    if type(mlp.act_fn) is not type(ACT2FN[gate]):
        return f"its gate is {gate}, but its act_fn is a {type(mlp.act_fn).__name__}"
    return ""
