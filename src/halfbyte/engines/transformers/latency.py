"""What ``bench.latency`` times: this engine, on models full of random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from halfbyte.bench.qwen3_moe_shape import Qwen3MoeShape
from halfbyte.engines.transformers.cuda_graphs import captured
from halfbyte.engines.transformers.fusion import fuse, running_linears
from halfbyte.engines.transformers.random_llama import LlamaShape, random_llama
from halfbyte.engines.transformers.random_mixture import random_mixture
from halfbyte.engines.transformers.session import session
from halfbyte.layers.experts import QuantExperts
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import Scheme


class RandomModel:
    """A model to be timed, on the GPU if there is one."""

    engine = "transformers"

    def __init__(self, shape: LlamaShape | Qwen3MoeShape, scheme: Scheme | None, positions: int) -> None:
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        if isinstance(shape, Qwen3MoeShape):
            self._model = random_mixture(shape, scheme, positions, self.device)
        else:
            self._model = random_llama(shape, scheme, positions, self.device)
        fuse(self._model)

    @property
    def kernels(self) -> str:
        """What the quantized layers run on, with the number of layers where there are several kernels."""
        running = (*running_linears(self._model), *_mixtures(self._model))
        counts = Counter(
            str(layer.kernel) for layer in running if isinstance(layer, (QuantLinear, QuantExperts))
        )
        if len(counts) <= 1:
            return next(iter(counts), "torch")
        return ", ".join(f"{kernel} {count}" for kernel, count in counts.items())

    def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> RandomRun:
        """Ready to answer: kernels compiled, graphs captured."""
        return RandomRun(self._model, batch, prompt_tokens, new_tokens)


class RandomRun:
    """One batch of prompts of random tokens."""

    def __init__(self, model: PreTrainedModel, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        generator = torch.Generator(model.device).manual_seed(batch)
        self._prompt = torch.randint(
            model.config.vocab_size, (batch, prompt_tokens), device=model.device, generator=generator
        )
        self._model = model  # whose weights the session reads, but does not keep
        self._session = session(model, batch, prompt_tokens + new_tokens)
        self.linears = _alone(model, batch, generator)

    linears: Callable[[], None]
    """All linear layers that one step runs, and nothing else, on inputs quantized before."""

    def read(self) -> None:
        """The prompts, up to their first new tokens."""
        self._session.decoder.read(self._prompt)

    def step(self) -> None:
        """One more token each."""
        self._session.step()


def _alone(model: PreTrainedModel, batch: int, generator: torch.Generator) -> Callable[[], None]:
    inputs: dict[int, torch.Tensor] = {}
    calls = [_call(layer, batch, inputs, generator) for layer in running_linears(model)]
    calls += [_experts_call(experts, model, batch, generator) for experts in _mixtures(model)]

    @torch.no_grad()
    def step() -> None:
        for call in calls:
            call()

    return captured(step, model.device) if model.device.type == "cuda" else step


def _mixtures(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, (QuantExperts, Qwen3MoeExperts))]


def _experts_call(
    experts: Any, model: PreTrainedModel, batch: int, generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """All of a block's experts, which tokens choose at random: products, and what lies between them."""
    config = model.config
    x = torch.randn(batch, config.hidden_size, device=generator.device, generator=generator).bfloat16()
    chances = torch.rand(batch, config.num_experts, device=generator.device, generator=generator)
    ids = chances.topk(config.num_experts_per_tok).indices
    shares = torch.ones_like(ids, dtype=torch.bfloat16)
    return lambda: experts(x, ids, shares)


def _call(
    layer: Any, batch: int, inputs: dict[int, torch.Tensor], generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """``layer`` on inputs that it shares with all layers of the same width."""
    width = layer.in_features
    if width not in inputs:
        inputs[width] = torch.randn(batch, width, device=generator.device, generator=generator).bfloat16()
    x = inputs[width]
    if isinstance(layer, QuantLinear) and layer.takes_quantized(x):
        quantized = layer.quantize(x)
        return lambda: layer.forward_quantized(quantized, x.dtype)
    return lambda: layer(x)
