"""The Hugging Face config that a GGUF file's metadata amounts to. No torch here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halfbyte.checkpoint.gguf_file import GgufFile
from halfbyte.checkpoint.gguf_layout import ROPE_FACTORS, Family
from halfbyte.errors import HalfbyteError

# What llama.cpp's converter assumes where Llama 3.1 and later models scale their rotary frequencies.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_TOKEN_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}


def model_config(gguf: GgufFile, family: Family) -> dict[str, Any]:
    """``config.json`` for a BF16 checkpoint of the file.

    Errors: a field is missing, varies by layer, or asks for what the architecture does not have.
    """
    hidden, heads = gguf.integer("embedding_length"), gguf.integer("attention.head_count")
    head_dim = gguf.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if gguf.integer(name, head_dim) != head_dim:
            raise HalfbyteError(
                f"{gguf.path}: {gguf.architecture}.{name} is {gguf.integer(name)}, "
                f"expected the head size {head_dim}"
            )
    if "token_embd.weight" not in gguf.tensors:
        raise HalfbyteError(f"{gguf.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "vocab_size": gguf.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.integer("feed_forward_length"),
        "num_hidden_layers": gguf.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": gguf.integer("context_length"),
        "rms_norm_eps": gguf.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(gguf, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_token_ids(gguf),
    }
    if not family.qkv_bias:
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    return config


def generation_config(gguf: GgufFile) -> dict[str, Any]:
    """``generation_config.json``: where generation starts and stops."""
    config = _token_ids(gguf)
    end, end_of_turn = config.get("eos_token_id"), gguf.get("tokenizer.ggml.eot_token_id")
    if end is not None and end_of_turn not in (None, end):
        config["eos_token_id"] = [end, end_of_turn]
    return config


def _token_ids(gguf: GgufFile) -> dict[str, Any]:
    stated = {ours: gguf.get(f"tokenizer.ggml.{theirs}") for ours, theirs in _TOKEN_IDS.items()}
    return {name: value for name, value in stated.items() if value is not None}


def _rope_parameters(gguf: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = gguf.real("rope.freq_base", 10000.0)
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_parameters(gguf, theta, head_dim)
    kind = gguf.get(f"{gguf.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise HalfbyteError(f"{gguf.path}: rope scaling {kind!r} is not supported; supported: linear, yarn")
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": gguf.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.integer("rope.scaling.original_context_length")
    return scaling


def _llama3_parameters(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The file holds one divisor per rotary frequency; the config wants the rule they came from."""
    divisors = gguf.rows(ROPE_FACTORS, slice(None)).astype(np.float64)
    factor = float(f"{divisors.max():.6g}")
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT * frequencies / (2 * math.pi)  # of the old context; few turns: stretched in full
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise HalfbyteError(f"{gguf.path}: tensor {ROPE_FACTORS!r} does not follow the Llama 3 rule")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
