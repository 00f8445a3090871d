"""Tiny models in memory, prompts for them, and what transformers' own ``generate`` answers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import FAMILIES, tiny_config

PAD = 257
PROMPT_TOKENS = 9
_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")


def random_model(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """Seeded, float32, in evaluation mode, without a token that ends a text."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU's alone: GPUs keep their state
        model = transformers.AutoModelForCausalLM.from_config(
            _config(family, **overrides), dtype=torch.float32
        )
    model.generation_config.eos_token_id = None
    return model.eval()


def _config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    if family in FAMILIES:
        return tiny_config(family, **overrides)
    fields = {name: getattr(tiny_config("llama"), name) for name in (*FAMILIES["llama"], *_TOKENS)}
    return transformers.AutoConfig.for_model(family, **{**fields, **overrides})


def prompts(padded: bool = False, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask ``[count, 9]``; padded: all but the last one on the left, each by another length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (count, PROMPT_TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(count - 1):
            mask[row, : 2 * (count - 1 - row)] = 0
        ids[mask == 0] = PAD
    return ids, mask


def generated(
    model: transformers.PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, tokens: int, **options: Any
) -> torch.Tensor:
    """New tokens ``[B, N]`` of transformers' ``generate``: greedy unless asked otherwise."""
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        pad_token_id=PAD,
        **{"do_sample": False, **options},
    )
    return output[:, ids.shape[1] :]


class NoWaiting(TorchDispatchMode):
    """Within it, what would make the host wait for a GPU fails, as it does in a CUDA graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if waits or by_mask:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
