"""One new token per sequence on a cache of fixed length: on the GPU two kernels, elsewhere what they mean in torch.

B sequences, Q query heads of size D that share G key heads, L slots. Each step rounds to the inputs' dtype where
transformers' modules do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from halfbyte.kernels.fused import ops_for, rms_norm

# Sizes D of a head that the kernels have.
HEAD_SIZES = frozenset({16, 32, 64, 128, 256})


class HeadNorms(NamedTuple):
    """RMSNorms over each head of queries and keys. q, k: weights ``[D]``."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Queries ``[B, Q, D]``, normed and rotated; keys (likewise) and values go into the cache.

    qkv: ``[B, (Q + 2 G) * D]``, rows may lie apart. cos, sin: ``[B, D]`` or ``[1, D]``. keys, values: contiguous
    ``[B, G, L, D]``; written at slot ``position``, int64 ``[1]``.
    """
    if ops := ops_for(qkv, cos, sin, keys, values, *(norms or ())[:2]):
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        return ops.rotate_and_store(qkv, cos, sin, q_weight, k_weight, eps, keys, values, position)
    batch, kv_heads, _, head = keys.shape
    heads = qkv.view(batch, -1, head)
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query, _ = rms_norm(query, None, norms.q, norms.eps)
        key, _ = rms_norm(key, None, norms.k, norms.eps)
    keys.index_copy_(2, position, _rotated(key, cos, sin).unsqueeze(2))
    values.index_copy_(2, position, value.unsqueeze(2))
    return _rotated(query, cos, sin)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    arrivals: torch.Tensor,
) -> torch.Tensor:
    """``[B, Q, D]``: each query's softmax over the slots that are visible, bool ``[B, L]``, up to ``position``.

    arrivals: scratch of int32 zeros for the kernel, ``B * G`` of them; zeros again afterwards.
    """
    if ops := ops_for(query, keys, values):
        return ops.attend_one(query, keys, values, visible, position, scale, arrivals)
    batch, kv_heads, _, head = keys.shape
    attended = functional.scaled_dot_product_attention(
        query.view(batch, kv_heads, -1, head), keys, values, visible[:, None, None], scale=scale
    )
    return attended.reshape(query.shape)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = heads.chunk(2, dim=-1)
    return heads * cos.unsqueeze(1) + torch.cat((-high, low), -1) * sin.unsqueeze(1)
