"""Inputs for attention of one token, and its result in float64."""

from __future__ import annotations

import torch


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache(
    batch: int, heads: int, length: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[batch, heads, length, size]``."""
    shape = (batch, heads, length, size)
    return normal(*shape, dtype=dtype, seed=1), normal(*shape, dtype=dtype, seed=2)


def angles(batch: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[batch, size]``, each angle twice as rotary embeddings have them."""
    half = 6 * torch.rand(batch, size // 2, generator=torch.Generator().manual_seed(3))
    both = torch.cat([half, half], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def visible(batch: int, length: int, slot: int) -> torch.Tensor:
    """Bool ``[batch, length]``: the new token's ``slot``, about two thirds of those before it, none after it."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[:, slot] = True
    mask[:, slot + 1 :] = False
    return mask


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """float64 ``[B, Q, D]`` of queries ``[B, Q, D]`` on what is seen (bool ``[B, L]``) of ``[B, G, L, D]``."""
    share = query.shape[1] // keys.shape[1]
    k = keys.double().repeat_interleave(share, dim=1)
    v = values.double().nan_to_num().repeat_interleave(share, dim=1)
    scores = torch.einsum("bqd,bqld->bql", query.double(), k.nan_to_num()) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bql,bqld->bqd", weights, v)
