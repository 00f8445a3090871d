"""A Qwen3-MoE of any size full of random numbers, made where it runs and in the form it runs in: for timing alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from halfbyte.engines.transformers.random_llama import filled, random_linear
from halfbyte.engines.transformers.replace import expert_gate
from halfbyte.layers.experts import ExpertNames, QuantExperts
from halfbyte.schemes import Scheme

_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MixtureShape:
    """As in config.json; those of Qwen3-30B-A3B unless given. intermediate: of one expert."""

    layers: int = 48
    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    top_k: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151936


def random_mixture(
    shape: MixtureShape, scheme: Scheme | None, positions: int, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A bfloat16 model in evaluation mode on ``device`` with room for ``positions`` tokens.

    scheme: of all linear layers but routers and the head, experts' too; none leaves them in bfloat16, where
    transformers multiplies all experts at once (``grouped_mm``). Errors: as :func:`random_llama`'s.
    """
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        experts_implementation="grouped_mm",
    )
    generator = torch.Generator(device).manual_seed(seed)
    return filled(config, scheme, generator, {Qwen3MoeExperts: _random_experts})


def _random_experts(name: str, module: nn.Module, scheme: Scheme, generator: torch.Generator) -> QuantExperts:
    assert isinstance(module, Qwen3MoeExperts)
    count, hidden, inner = module.down_proj.shape
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    experts = [
        {
            projection: random_linear(
                f"{name}.{index}.{projection}",
                nn.Linear(*sizes[projection], bias=False, device="meta"),
                scheme,
                generator,
            )
            for projection in sizes
        }
        for index in range(count)
    ]
    return QuantExperts(experts, _NAMES, expert_gate(module, _NAMES))
