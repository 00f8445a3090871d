"""GGUF files of tiny models, written as llama.cpp's converter defines them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config, tiny_tokenizer

_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def reference_model(family: str, **overrides: Any) -> Any:
    """A seeded float32 model with norms and biases that are not their neutral values."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def write_gguf(
    path: Path,
    model: Any,
    *,
    storage: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``model`` (llama, qwen2 or qwen3).

    ``metadata``, ``tokenizer`` (both without their prefix) and ``tensors`` add, replace or (None) leave out.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if architecture == "qwen3" else None,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **(metadata or {}),
    }
    keys = {f"{architecture}.{name}": value for name, value in fields.items()}
    keys |= {f"tokenizer.{name}": value for name, value in {**_tokenizer(), **(tokenizer or {})}.items()}
    for key, value in keys.items():
        if value is not None:
            item = _value_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, _value_type(value), item)
    stored: dict[str, np.ndarray | None] = {**_tensors(model), **(tensors or {})}
    for name, values in stored.items():
        if values is None:
            continue
        kind = storage if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: the halves of each head's rotary pairs next to each other."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tensors(model: Any) -> dict[str, np.ndarray]:
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stored: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():  # a tied lm_head is not among them
        module, _, kind = name.rpartition(".")
        values = parameter.detach().numpy()
        if module in whole:
            stored[f"{whole[module]}.{kind}"] = values
            continue
        _, _, layer, inner = module.split(".", 3)
        leaf = _BLOCK_NAMES[inner]
        if config.model_type == "llama" and leaf in heads:
            values = interleave_halves(values, heads[leaf])
        stored[f"blk.{layer}.{leaf}.{kind}"] = np.ascontiguousarray(values)
    return stored


def _tokenizer() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    names[-1] = "ab"
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": names,
        "ggml.token_type": [3 if name.startswith("<") and len(name) > 1 else 1 for name in names],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": tokenizer.bos_token_id,
        "ggml.eos_token_id": tokenizer.eos_token_id,
        "ggml.eot_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "chat_template": _CHAT_TEMPLATE,
    }


def _value_type(value: Any) -> gguf.GGUFValueType:
    kinds = {
        list: gguf.GGUFValueType.ARRAY,
        str: gguf.GGUFValueType.STRING,
        bool: gguf.GGUFValueType.BOOL,
        float: gguf.GGUFValueType.FLOAT32,
        int: gguf.GGUFValueType.UINT32,
    }
    return kinds[type(value)]
