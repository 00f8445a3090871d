"""Sizes of a mixture of experts, for checkpoints that exist to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.bench.synthetic import TensorSpec, tensor_bytes


@dataclass(frozen=True)
class Qwen3MoeShape:
    """Sizes of a Qwen3-MoE-shaped model with its own ``lm_head``. The defaults are those of Qwen3-30B-A3B."""

    layers: int
    hidden: int = 2048
    experts: int = 128
    experts_per_token: int = 8
    expert_size: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 151936

    def config(self) -> dict[str, Any]:
        """config.json of this model."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "moe_intermediate_size": self.expert_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor, BF16, in the order of the layers; experts one by one, as they are published."""
        found: dict[str, TensorSpec] = {}

        def add(name: str, *shape: int) -> None:
            found[f"{name}.weight"] = ("BF16", shape)

        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        add("model.embed_tokens", self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            add(f"{prefix}.input_layernorm", self.hidden)
            add(f"{prefix}.self_attn.q_proj", queries, self.hidden)
            add(f"{prefix}.self_attn.k_proj", keys, self.hidden)
            add(f"{prefix}.self_attn.v_proj", keys, self.hidden)
            add(f"{prefix}.self_attn.o_proj", self.hidden, queries)
            add(f"{prefix}.self_attn.q_norm", self.head_dim)
            add(f"{prefix}.self_attn.k_norm", self.head_dim)
            add(f"{prefix}.post_attention_layernorm", self.hidden)
            add(f"{prefix}.mlp.gate", self.experts, self.hidden)
            for expert in range(self.experts):
                add(f"{prefix}.mlp.experts.{expert}.gate_proj", self.expert_size, self.hidden)
                add(f"{prefix}.mlp.experts.{expert}.up_proj", self.expert_size, self.hidden)
                add(f"{prefix}.mlp.experts.{expert}.down_proj", self.hidden, self.expert_size)
        add("model.norm", self.hidden)
        add("lm_head", self.vocab, self.hidden)
        return found

    @property
    def nbytes(self) -> int:
        return sum(map(tensor_bytes, self.tensors().values()))
