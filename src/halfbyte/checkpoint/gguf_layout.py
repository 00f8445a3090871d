"""Where the tensors of a GGUF file go in a Hugging Face checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfbyte.checkpoint.gguf_file import GgufFile
from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class Family:
    """How a GGUF architecture is spelled in Hugging Face terms.

    ``rotary_pairs``: q and k rows are stored with the two halves of a rotary pair next to each other, as
    llama.cpp's converter writes them for this architecture.
    """

    model_type: str
    class_name: str
    rotary_pairs: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", rotary_pairs=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", qk_norm=True),
}
"""GGUF ``general.architecture`` -> what it is here."""

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Placement:
    """One tensor: its name in the GGUF and here, its shape, and the stored row behind each of our rows."""

    stored: str
    name: str
    shape: tuple[int, ...]
    heads: int | None = None

    def row_order(self) -> np.ndarray | None:
        """``order[r]`` is the stored row of row ``r``; None where the order is the same.

        llama.cpp stores row ``(head, i, half)`` where Hugging Face has ``(head, half, i)``.
        """
        if self.heads is None:
            return None
        rows = np.arange(self.shape[0]).reshape(self.heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def family_of(gguf: GgufFile) -> Family:
    """The family of a file. Errors: an architecture that is not in ``FAMILIES``, or a variant of one."""
    family = FAMILIES.get(gguf.architecture)
    if family is None:
        raise HalfbyteError(
            f"{gguf.path}: architecture {gguf.architecture!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    for name, what in (("expert_count", "a mixture of experts"), ("attention.sliding_window", "a window")):
        if gguf.get(f"{gguf.architecture}.{name}"):
            raise HalfbyteError(
                f"{gguf.path}: architecture {gguf.architecture!r} with {what} ({name}) is not supported"
            )
    return family


def place_tensors(gguf: GgufFile, family: Family, config: Mapping[str, Any]) -> list[Placement]:
    """Every tensor that ``config`` asks for, in the order of the layers.

    Errors: a tensor is missing, has another shape, or has no place in the architecture.
    """
    placements = list(_expected(family, config))
    for placement in placements:
        if placement.stored not in gguf.tensors:
            raise HalfbyteError(f"{gguf.path}: tensor {placement.stored!r} is missing")
        if (found := gguf.shape(placement.stored)) != placement.shape:
            raise HalfbyteError(
                f"{gguf.path}: tensor {placement.stored!r} has shape {list(found)}, "
                f"expected {list(placement.shape)}"
            )
    placed = {placement.stored for placement in placements} | {ROPE_FACTORS}
    if extra := next((name for name in gguf.tensors if name not in placed), None):
        raise HalfbyteError(
            f"{gguf.path}: tensor {extra!r} has no place in architecture {gguf.architecture!r}"
        )
    return placements


def _expected(family: Family, config: Mapping[str, Any]) -> Iterator[Placement]:
    hidden, head_dim, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    yield Placement("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        stored, name = f"blk.{layer}.", f"model.layers.{layer}."
        yield Placement(stored + "attn_norm.weight", name + "input_layernorm.weight", (hidden,))
        yield from _attention(family, config, stored, name + "self_attn.")
        if family.qk_norm:
            yield Placement(stored + "attn_q_norm.weight", name + "self_attn.q_norm.weight", (head_dim,))
            yield Placement(stored + "attn_k_norm.weight", name + "self_attn.k_norm.weight", (head_dim,))
        yield Placement(stored + "ffn_norm.weight", name + "post_attention_layernorm.weight", (hidden,))
        inner = config["intermediate_size"]
        yield Placement(stored + "ffn_gate.weight", name + "mlp.gate_proj.weight", (inner, hidden))
        yield Placement(stored + "ffn_up.weight", name + "mlp.up_proj.weight", (inner, hidden))
        yield Placement(stored + "ffn_down.weight", name + "mlp.down_proj.weight", (hidden, inner))
    yield Placement("output_norm.weight", "model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Placement("output.weight", "lm_head.weight", (vocab, hidden))


def _attention(family: Family, config: Mapping[str, Any], stored: str, name: str) -> Iterator[Placement]:
    hidden, heads, kv_heads = (
        config[field] for field in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    width, kv_width = heads * config["head_dim"], kv_heads * config["head_dim"]
    every_bias = config.get("attention_bias", False)
    for ours, theirs, rows, columns, paired in (
        ("q_proj", "attn_q", width, hidden, heads),
        ("k_proj", "attn_k", kv_width, hidden, kv_heads),
        ("v_proj", "attn_v", kv_width, hidden, None),
        ("o_proj", "attn_output", hidden, width, None),
    ):
        order = paired if family.rotary_pairs else None
        yield Placement(f"{stored}{theirs}.weight", f"{name}{ours}.weight", (rows, columns), order)
        if every_bias or (family.qkv_bias and ours != "o_proj"):
            yield Placement(f"{stored}{theirs}.bias", f"{name}{ours}.bias", (rows,), order)
