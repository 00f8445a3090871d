"""A layer's attention on queries, keys and values that were projected together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfbyte.engines.transformers.fixed_cache import FixedCache
from halfbyte.engines.transformers.llama_like import QKV
from halfbyte.kernels.cached_attention import HEAD_SIZES, HeadNorms, attend, rotate_and_store

# Attention that norms the heads of queries and keys, if it has norms for them, rotates all of both, and attends
# with one scale and a mask. What others do in between cannot be seen from their parts.
_ROTARY = frozenset(
    f"{family}Attention" for family in ("Llama", "Ministral", "Mistral", "Qwen2", "Qwen3", "SeedOss")
)


class FusedAttention:
    """Runs the module's own forward, with its norms, rotary embedding, cache and attention function, on projections
    that only cut columns out of what there is already.

    One new token on a :class:`FixedCache`, in modules known to be of the common kind, takes two kernels instead.
    """

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._columns = _columns(attention)
        self._is_rotary = type(attention).__name__ in _ROTARY and attention.head_dim in HEAD_SIZES

    def __call__(
        self,
        qkv: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[B, T, hidden]`` from ``[B, T, queries + keys + values]``, the rest as the module's forward has it."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if (
            self._is_rotary
            and isinstance(cache, FixedCache)
            and cache.slots.prompts is None
            and attention_mask is not None
            and attention_mask.dtype == torch.bool
        ):
            return self._one_token(qkv, attention_mask, cache, position_embeddings)
        return self._on_columns()(
            qkv,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            **kwargs,
        )[0]

    def _on_columns(self) -> nn.Module:
        """The attention itself as it is now, mode, hooks and all, but for its projections."""
        view = object.__new__(type(self._attention))
        view.__dict__.update(self._attention.__dict__)
        view.__dict__["_modules"] = {**self._attention._modules, **self._columns}
        return view

    def _one_token(
        self,
        qkv: torch.Tensor,
        mask: torch.Tensor,
        cache: FixedCache,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """qkv: ``[B, 1, ...]``. mask: ``[B, 1, 1, length]``, true where the token may look."""
        attention, slots = self._attention, cache.slots
        batch, head = qkv.shape[0], attention.head_dim
        kv_heads = attention.k_proj.out_features // head
        layer = cache.layers[attention.layer_idx]
        if not layer.is_initialized:
            like = qkv.new_empty(batch, kv_heads, 0, head)
            layer.lazy_initialization(like, like)
        cos, sin = (angles[:, 0] for angles in position_embeddings)
        query = rotate_and_store(
            qkv[:, 0], cos, sin, _head_norms(attention), layer.keys, layer.values, slots.position
        )
        attended = attend(
            query,
            layer.keys,
            layer.values,
            mask[:, 0, 0],
            slots.position,
            attention.scaling,
            slots.arrivals(batch * kv_heads),
        )
        return attention.o_proj(attended.view(batch, 1, -1))


def _head_norms(attention: Any) -> HeadNorms | None:
    if "q_norm" not in attention._modules:
        return None
    return HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)


class _Columns(nn.Module):
    """In the place of a projection: its part of what was projected already."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self._columns = columns

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        return projected[..., self._columns]


def _columns(attention: nn.Module) -> dict[str, nn.Module]:
    start = 0
    columns: dict[str, nn.Module] = {}
    for name in QKV:
        size: Any = attention.get_submodule(name).out_features
        columns[name] = _Columns(slice(start, start + size))
        start += size
    return columns
