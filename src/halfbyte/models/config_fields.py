"""The few numbers of config.json that matter here, under the names that families give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ConfigFields:
    """Sizes of the language model; none where config.json does not say.

    context: the longest sequence, in tokens.
    expert_widths: sizes that the inputs of an expert may have (hidden, or a smaller latent size).
    tied: what ``tie_word_embeddings`` says.
    """

    family: str
    text_family: str
    hidden: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    vocab: int | None
    context: int | None
    expert_widths: frozenset[int]
    tied: bool | None


def read_config(config: Mapping[str, Any]) -> ConfigFields:
    """Reads config.json, the language part of a multimodal one included."""
    text = text_config(config)
    hidden = _integer(text, _HIDDEN)
    heads = _integer(text, _HEADS)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    family = str(config.get("model_type", ""))
    widths = (hidden, _integer(text, ("moe_latent_size",)))
    return ConfigFields(
        family=family,
        text_family=str(text.get("model_type", family)),
        hidden=hidden,
        layers=_integer(text, _LAYERS),
        heads=heads,
        kv_heads=_integer(text, _KV_HEADS) or heads,
        experts=_integer(text, _EXPERTS),
        vocab=_integer(text, ("vocab_size",)),
        context=_integer(text, _CONTEXT),
        expert_widths=frozenset(width for width in widths if width),
        tied=tied if isinstance(tied, bool) else None,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that is about the language model: all of it, or a part of a multimodal one."""
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return text_config(inner)
    return config


def _integer(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
