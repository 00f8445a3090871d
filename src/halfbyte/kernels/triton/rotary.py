# ruff: noqa: N803, N806
"""Rotary embedding of one new token per sequence, its key and value put into the cache, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.triton.cache_inputs import check_cache
from halfbyte.kernels.triton.row_math import rounded
from halfbyte.kernels.triton.rows import on_device, row_options


@triton.jit(do_not_specialize=["eps", "length"])
def rotate_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    position: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    qkv_stride: tl.tensor,
    angle_stride: tl.tensor,
    length: tl.tensor,
    eps: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One head of one token: queries go to ``query``, keys and values to slot ``position`` of the cache."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    low = tl.arange(0, HALF)
    high = low + HEAD // 2
    inside = low < HEAD // 2
    source = qkv + row * qkv_stride + head * HEAD
    first = tl.load(source + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + high, mask=inside, other=0.0).to(tl.float32)
    if head < Q_HEADS + KV_HEADS:
        if q_weight is not None:
            root = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) * (1.0 / HEAD) + eps)
            weight = q_weight if head < Q_HEADS else k_weight
            first = rounded(first * root, DTYPE) * tl.load(weight + low, mask=inside, other=0.0).to(
                tl.float32
            )
            second = rounded(second * root, DTYPE) * tl.load(weight + high, mask=inside, other=0.0).to(
                tl.float32
            )
            first = rounded(first, DTYPE)
            second = rounded(second, DTYPE)
        cos += row * angle_stride
        sin += row * angle_stride
        first_cos = tl.load(cos + low, mask=inside, other=0.0).to(tl.float32)
        second_cos = tl.load(cos + high, mask=inside, other=0.0).to(tl.float32)
        first_sin = tl.load(sin + low, mask=inside, other=0.0).to(tl.float32)
        second_sin = tl.load(sin + high, mask=inside, other=0.0).to(tl.float32)
        turned = rounded(first * first_cos, DTYPE) - rounded(second * first_sin, DTYPE)
        second = rounded(second * second_cos, DTYPE) + rounded(first * second_sin, DTYPE)
        first = turned
    if head < Q_HEADS:
        target = query + (row * Q_HEADS + head) * HEAD
    else:
        slot = tl.load(position)
        kv_head = (head - Q_HEADS) % KV_HEADS
        target = keys if head < Q_HEADS + KV_HEADS else values
        target += ((row * KV_HEADS + kv_head) * length + slot) * HEAD
    tl.store(target + low, first.to(DTYPE), mask=inside)
    tl.store(target + high, second.to(DTYPE), mask=inside)


@torch.library.custom_op("halfbyte::rotate_and_store", mutates_args=("keys", "values"))
def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """As :func:`halfbyte.kernels.cached_attention.rotate_and_store` has it."""
    check_cache("rotate_and_store", qkv, keys, values)
    batch, kv_heads, length, head = keys.shape
    heads = qkv.shape[1] // head
    query = qkv.new_empty(batch, heads - 2 * kv_heads, head)
    if batch == 0:
        return query
    half = triton.next_power_of_2(head // 2)
    options = row_options(qkv, half)
    with on_device(qkv):
        rotate_kernel[(batch, heads)](
            qkv,
            cos,
            sin,
            q_weight,
            k_weight,
            position,
            query,
            keys,
            values,
            qkv.stride(0),
            cos.stride(0) if cos.shape[0] > 1 else 0,
            length,
            eps,
            Q_HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HEAD=head,
            HALF=half,
            # Products are rounded before they are added, as torch's are, not fused with the addition.
            enable_fp_fusion=False,
            **options,
        )
    return query


@rotate_and_store.register_fake
def _(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    batch, kv_heads, _, head = keys.shape
    return qkv.new_empty(batch, qkv.shape[1] // head - 2 * kv_heads, head)
