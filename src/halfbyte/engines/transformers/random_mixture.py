"""A Qwen3-MoE of any size full of random numbers, made where it runs and in the form it runs in: for timing alone."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from halfbyte.bench.qwen3_moe_shape import Qwen3MoeShape
from halfbyte.engines.transformers.random_llama import filled, random_linear
from halfbyte.engines.transformers.replace import expert_gate
from halfbyte.layers.experts import ExpertNames, QuantExperts
from halfbyte.schemes import Scheme

_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")


def random_mixture(
    shape: Qwen3MoeShape, scheme: Scheme | None, positions: int, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A bfloat16 model in evaluation mode on ``device`` with room for ``positions`` tokens.

    scheme: of all linear layers but routers and the head, experts' too; none leaves them in bfloat16, where
    transformers multiplies all experts at once (``grouped_mm``). Errors: as :func:`random_llama`'s.
    """
    ours = {"max_position_embeddings": positions, "experts_implementation": "grouped_mm"}
    config = Qwen3MoeConfig.from_dict({**shape.config(), **ours})
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
