"""Tiny random checkpoints of real families on disk: what ``save_pretrained`` writes, each in a moment.

All have two blocks, hidden size 128, 264 tokens, and a byte-level tokenizer made here, so that they can be
quantized in groups of 128, generate text and be scored without a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
_SPECIAL = [
    BOS,
    EOS,
    "<|endoftext|>",
    *(f"<unused{i}>" for i in range(5)),
]  # the third: Qwen's class adds it itself
VOCAB_SIZE = 256 + len(_SPECIAL)
HIDDEN = 128
EXPERTS = 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.08,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    **_LLAMA,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, "tie_word_embeddings": True},
    "qwen3": _LLAMA,
    "mistral": _LLAMA,
    "gemma2": {**_LLAMA, "tie_word_embeddings": True, "sliding_window": 64},
    "gemma3_text": {**_LLAMA, "tie_word_embeddings": True, "sliding_window": 64},
    "phi3": _LLAMA,
    "gpt2": {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 256},
    "opt": {
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "gpt_neox": {**_LLAMA, "rotary_pct": 0.25},
    "mixtral": {**_LLAMA, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 256},
    "qwen3_moe": _MOE,
    "olmoe": {**_LLAMA, "intermediate_size": 128, "num_experts": EXPERTS, "num_experts_per_tok": 2},
    "gpt_oss": {**_LLAMA, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 64},
    "llama4_text": {
        **_LLAMA,
        "intermediate_size_mlp": 256,
        "intermediate_size": 128,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "attention_chunk_size": 256,
    },
    "deepseek_v3": {
        **{name: value for name, value in _LLAMA.items() if name != "head_dim"},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
}


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The config of a tiny model of ``family`` (a key of ``FAMILIES``, which is its ``model_type``)."""
    return transformers.AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **overrides})


def tiny_model(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a seeded random checkpoint and its tokenizer to ``folder/family``; returns that path.

    ``overrides`` are config fields, such as ``num_hidden_layers=1`` or ``tie_word_embeddings=True``.
    """
    path = folder / family
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: GPUs keep their state
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte (ids 0 to 255 in the byte-level alphabet's order), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, model_max_length=512
    )
