# ruff: noqa: N803, N806, SIM300
"""INT4 weights times BF16 or FP16 inputs on any GPU with BF16 tensor cores, scales exact.

Codes minus zero points are small integers, which both formats hold exactly. Tensor cores add up the products
of one group in fp32, and the group's scale multiplies that sum: no weight is ever rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.triton.linear_decode import words_to_floats
from halfbyte.kernels.triton.linear_parts import add_parts, store_part, store_result, tile_origin
from halfbyte.kernels.triton.linear_plan import MANY, Gpu, Plan, Tile, gpu_of, plan, tile_for
from halfbyte.kernels.triton.rows import on_device

SPAN = 128

# By the most tokens that a tile is for. Below 128 inputs to a group its sums live next to the total's.
_FEW = {
    16: Tile(tokens=16, rows=64, warps=4, stages=5, resident=4),
    32: Tile(tokens=32, rows=64, warps=4, stages=4, resident=4),
    64: Tile(tokens=64, rows=64, warps=4, stages=4, resident=2),
}
TILES = {**_FEW, MANY: Tile(tokens=128, rows=128, warps=8, stages=3, resident=1)}
TILES_OF_SMALL_GROUPS = {**_FEW, MANY: Tile(tokens=64, rows=128, warps=8, stages=3, resident=1)}


@triton.jit(do_not_specialize=["tokens", "spans", "steps", "groups"])
def w4a16_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    spans: tl.tensor,
    steps: tl.tensor,
    groups: tl.tensor,
    spans_to_group: tl.tensor,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """x ``[tokens, inputs]``, weight int16 ``[spans, rows, 32]``, scales and zeros (int16) ``[groups, rows]``.

    GROUP: inputs to a scale; 128 stands for ``spans_to_group`` whole spans too. WHOLE: no span is cut short.
    SPLIT: ``steps`` spans from ``program_id(1)`` on are added up and left in ``parts``.
    """
    first_token, first_row = tile_origin(tokens, rows, TOKENS, ROWS)
    m = first_token + tl.arange(0, TOKENS)
    n = first_row + tl.arange(0, ROWS)
    # Tokens and rows past the end repeat the last one; what they give is not stored.
    x_row = tl.minimum(m, tokens - 1).to(tl.int64) * inputs
    row = tl.minimum(n, rows - 1)
    unit = tl.arange(0, 32)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    begin = tl.program_id(1) * steps
    for span in range(begin, tl.minimum(begin + steps, spans)):
        words = tl.load(weight_ptr + (tl.cast(span, tl.int64) * rows + row[:, None]) * 32 + unit[None, :])
        quarters = words_to_floats(words, DTYPE)
        for quarter in tl.static_range(4):
            k = span * 128 + quarter * 32 + unit
            source = x_ptr + x_row[None, :] + k[:, None]
            x = tl.load(source) if WHOLE else tl.load(source, mask=k[:, None] < inputs, other=0.0)
            if quarter % (GROUP // 32) == 0:
                if GROUP == 128:
                    group = span // spans_to_group
                else:
                    # Inputs past the end are zeros, whatever scale they meet.
                    group = tl.minimum(span * (128 // GROUP) + quarter // (GROUP // 32), groups - 1)
                scale = tl.load(scales_ptr + group * rows + row).to(tl.float32)
                zero = tl.full([ROWS], 1032.0 if DTYPE == tl.float16 else 136.0, tl.float32)
                if ZEROS:
                    zero += tl.load(zeros_ptr + group * rows + row).to(tl.float32)
                partial = tl.zeros([ROWS, TOKENS], tl.float32)
            partial = tl.dot(quarters[quarter] - zero.to(DTYPE)[:, None], x, partial)
            if quarter % (GROUP // 32) == GROUP // 32 - 1:
                sums += partial * scale[:, None]
    if SPLIT:
        store_part(sums, m, n, parts_ptr, tokens, rows)
    else:
        store_result(sums, m, n, out_ptr, None, None, bias_ptr, tokens, rows, "none", "none", BIAS)


def plan_for(tokens: int, rows: int, inputs: int, group_size: int, gpu: Gpu) -> Plan:
    """How a product ``[tokens, inputs] x [rows, inputs]`` is cut up."""
    tile = tile_for(TILES if group_size >= SPAN else TILES_OF_SMALL_GROUPS, tokens)
    step_bytes = tile.rows * SPAN // 2 + tile.tokens * SPAN * 2
    return plan(tile, tokens, rows, -(-inputs // SPAN), step_bytes, gpu)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    cut: Plan,
) -> torch.Tensor:
    """What :func:`w4a16` computes, cut up in a given way."""
    x = x.contiguous()
    tokens, inputs = x.shape
    spans, rows = weight.shape[:2]
    out = x.new_empty(tokens, rows)
    split = cut.splits > 1
    parts = x.new_empty(cut.splits, tokens, rows, dtype=torch.float32) if split else None
    grid = (triton.cdiv(tokens, cut.tile.tokens) * triton.cdiv(rows, cut.tile.rows), cut.splits)
    w4a16_kernel[grid](
        x,
        weight,
        scales,
        zeros,
        bias,
        out,
        parts,
        tokens,
        rows,
        inputs,
        spans,
        cut.steps,
        scales.shape[0],
        max(1, group_size // SPAN),
        GROUP=min(group_size, SPAN),
        ZEROS=zeros is not None,
        BIAS=bias is not None,
        WHOLE=inputs % SPAN == 0,
        SPLIT=split,
        TOKENS=cut.tile.tokens,
        ROWS=cut.tile.rows,
        num_warps=cut.tile.warps,
        num_stages=cut.tile.stages,
    )
    if parts is not None:
        add_parts(parts, out, None, None, bias)
    return out


@torch.library.custom_op("halfbyte::triton_w4a16", mutates_args=())
def w4a16(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """``x [M, K]`` (bf16 or fp16) times an INT4 weight, ``[M, N]`` in the dtype of x; M may be 0.

    weight: int16 ``[ceil(K / 128), N, 32]``, codes + 8 by ``pack_spans``. scales: bf16, fp16 or fp32 ``[G, N]``.
    zeros: int16 ``[G, N]``. group_size: 32, 64 or a multiple of 128; K rounded up to one where G is 1.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[1])
    cut = plan_for(x.shape[0], weight.shape[1], x.shape[1], group_size, gpu_of(x.device))
    with on_device(x):
        return multiply(x, weight, scales, zeros, bias, group_size, cut)


@w4a16.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
