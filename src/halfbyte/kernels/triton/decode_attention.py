# ruff: noqa: N803
"""Attention of one new token per sequence on a cache of fixed length, of which only the filled part is read.

All query heads of a key head share one read of it. The filled slots are split over several programs where there
would be too few to keep the memory busy; the last of them to arrive puts the parts together, in their order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.triton.cache_inputs import check_cache
from halfbyte.kernels.triton.rows import on_device, row_options

# Of keys, and as much of values, that a program fetches at a time.
_TILE_BYTES = 16384
_MOST_SPLITS = 16
# Programs for which memory is busy: a few on each of a large GPU's multiprocessors.
_ENOUGH_PROGRAMS = 256
_FEWEST_ROWS = 16  # of a matrix product
_NOTHING = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["scale", "length"])
def attend_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    visible: tl.tensor,
    position: tl.tensor,
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    arrivals: tl.tensor,
    output: tl.tensor,
    visible_stride: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """``GROUP`` query heads that share key head ``program 0``, on part ``program 1`` of the filled slots.

    scale: of the scores, times log2(e). parts: fp32 ``[pairs, SPLITS, GROUP, HEAD]``, weighted sums of values; tops,
    totals: ``[pairs, SPLITS, GROUP]``, the largest score and the sum of weights. arrivals: int32 ``[pairs]``, zero
    before and after.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD)
    real = rows < GROUP
    row_offsets = (pair * GROUP + rows)[:, None] * HEAD + columns[None, :]
    q = tl.load(query + row_offsets, mask=real[:, None], other=0.0)
    blocks = tl.cdiv(tl.load(position).to(tl.int32) + 1, BLOCK)
    each = tl.cdiv(blocks, SPLITS)
    slots = tl.arange(0, BLOCK)
    keys += pair * length * HEAD
    values += pair * length * HEAD
    visible += pair // KV_HEADS * visible_stride
    largest = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, HEAD], tl.float32)
    for block in tl.range(split * each, tl.minimum((split + 1) * each, blocks)):
        slot = block * BLOCK + slots
        seen = tl.load(visible + slot, mask=slot < length, other=0) != 0
        cells = slot[:, None] * HEAD + columns[None, :]
        k = tl.load(keys + cells, mask=seen[:, None], other=0.0)
        v = tl.load(values + cells, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, _NOTHING)
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = higher
    if SPLITS > 1:
        first = pair * SPLITS * GROUP
        mine = first + split * GROUP + rows
        tl.store(parts + mine[:, None] * HEAD + columns[None, :], weighted, mask=real[:, None])
        tl.store(tops + mine, largest, mask=real)
        tl.store(totals + mine, total, mask=real)
        # Every thread's share is written before the one that counts says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.store(arrivals + pair, 0)
        largest = tl.full([ROWS], _NOTHING, tl.float32)
        for other in tl.static_range(SPLITS):
            theirs = first + other * GROUP + rows
            top = tl.load(tops + theirs, mask=real, other=_NOTHING, cache_modifier=".cg")
            largest = tl.maximum(largest, top)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, HEAD], tl.float32)
        for other in tl.static_range(SPLITS):
            theirs = first + other * GROUP + rows
            top = tl.load(tops + theirs, mask=real, other=_NOTHING, cache_modifier=".cg")
            shrink = tl.exp2(top - largest)
            total += tl.load(totals + theirs, mask=real, other=0.0, cache_modifier=".cg") * shrink
            cells = theirs[:, None] * HEAD + columns[None, :]
            part = tl.load(parts + cells, mask=real[:, None], other=0.0, cache_modifier=".cg")
            weighted += part * shrink[:, None]
    result = weighted / total[:, None]
    tl.store(output + row_offsets, result.to(output.dtype.element_ty), mask=real[:, None])


@torch.library.custom_op("halfbyte::attend_one", mutates_args=("arrivals",))
def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    arrivals: torch.Tensor,
) -> torch.Tensor:
    """As :func:`halfbyte.kernels.cached_attention.attend` has it.

    arrivals: int32, zeros, at least one for each sequence and key head; zeros again afterwards.
    """
    check_cache("attend_one", query, keys, values)
    batch, kv_heads, length, head = keys.shape
    output = torch.empty_like(query)
    if batch == 0:
        return output
    pairs, group = batch * kv_heads, query.shape[1] // kv_heads
    layout = attend_layout(group, head, query.dtype)
    splits = max(1, min(_MOST_SPLITS, _ENOUGH_PROGRAMS // pairs, -(-length // layout["BLOCK"])))
    parts = tops = totals = None
    if splits > 1:
        parts = query.new_empty(pairs, splits, group, head, dtype=torch.float32)
        tops, totals = query.new_empty(2, pairs, splits, group, dtype=torch.float32)
    overlap = row_options(query, head)["PDL"]
    with on_device(query):
        attend_kernel[(pairs, splits)](
            query,
            keys,
            values,
            visible,
            position,
            parts,
            tops,
            totals,
            arrivals,
            output,
            visible.stride(0),
            length,
            scale * math.log2(math.e),
            KV_HEADS=kv_heads,
            SPLITS=splits,
            PDL=overlap,
            launch_pdl=overlap,
            **layout,
        )
    return output


def attend_layout(group: int, head: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants and launch options by what a program works on."""
    rows = max(_FEWEST_ROWS, triton.next_power_of_2(group))
    return {
        "GROUP": group,
        "ROWS": rows,
        "HEAD": head,
        "BLOCK": min(128, _TILE_BYTES // (head * dtype.itemsize)),
        "num_warps": 4 if rows == _FEWEST_ROWS else 8,
        "num_stages": 3,
    }


@attend_one.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    arrivals: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(query)
