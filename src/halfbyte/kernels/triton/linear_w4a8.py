# ruff: noqa: N803, N806
"""INT4 weights times FP8 or INT8 inputs on any GPU whose tensor cores take them, scales exact.

Codes minus zero points are integers in -15..15, which E4M3 and INT8 both hold exactly, so that tensor cores
multiply codes with codes. Scales come after the sum of a group:

- floating-point group scales multiply it in fp32 and the products are added in fp32. That also keeps Hopper's
  FP8 tensor cores, which add in fewer bits, from doing so for longer than a group;
- integer group scales (QoQ's second level) multiply it in int32. All sums stay exact, and one fp32 scale per
  channel remains for the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.triton.linear_decode import magnitudes_to_e4m3, offsets_to_e4m3, offsets_to_int8
from halfbyte.kernels.triton.linear_layout import byte_span
from halfbyte.kernels.triton.linear_parts import add_parts, store_part, store_result, tile_origin, which
from halfbyte.kernels.triton.linear_plan import MANY, Gpu, Plan, Tile, gpu_of, plan, tile_for
from halfbyte.kernels.triton.rows import on_device

# By the most tokens that a tile is for. More scales to load leave fewer registers for sums.
_FEW = {
    16: Tile(tokens=16, rows=64, warps=4, stages=5, resident=4),
    32: Tile(tokens=32, rows=64, warps=4, stages=5, resident=4),
    64: Tile(tokens=64, rows=64, warps=4, stages=4, resident=2),
}
TILES = {**_FEW, MANY: Tile(tokens=128, rows=128, warps=8, stages=4, resident=1)}
TILES_OF_SMALL_GROUPS = {**_FEW, MANY: Tile(tokens=64, rows=128, warps=8, stages=4, resident=1)}


@triton.jit(do_not_specialize=["tokens", "spans", "steps", "groups"])
def w4a8_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    channel_scale_ptr: tl.tensor,
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
    INTEGER_SCALES: tl.constexpr,
    X_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """x ``[tokens, inputs]``, weight uint8 ``[spans, rows, UNITS]``, scales and zeros (int8) ``[groups, rows]``.

    GROUP: inputs to a scale; 128 stands for ``spans_to_group`` whole spans too. WHOLE: no span is cut short.
    SPLIT: ``steps`` spans from ``program_id(1)`` on are added up and left in ``parts``.
    """
    SPAN: tl.constexpr = 64 if GROUP == 32 else GROUP
    UNITS: tl.constexpr = SPAN // 2
    FP8: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    SUMS: tl.constexpr = tl.float32 if FP8 else tl.int32
    first_token, first_row = tile_origin(tokens, rows, TOKENS, ROWS)
    m = first_token + tl.arange(0, TOKENS)
    n = first_row + tl.arange(0, ROWS)
    # Tokens and rows past the end repeat the last one; what they give is not stored.
    x_row = tl.minimum(m, tokens - 1).to(tl.int64) * inputs
    row = tl.minimum(n, rows - 1)
    unit = tl.arange(0, UNITS)
    total = tl.zeros([ROWS, TOKENS], tl.int32 if INTEGER_SCALES else tl.float32)
    begin = tl.program_id(1) * steps
    for span in range(begin, tl.minimum(begin + steps, spans)):
        units = tl.load(weight_ptr + (tl.cast(span, tl.int64) * rows + row[:, None]) * UNITS + unit[None, :])
        # Of two groups in a span, the first is in the low nibbles; past the end inputs are zeros.
        low_group = span * 2 if GROUP == 32 else span // spans_to_group
        high_group = tl.minimum(span * 2 + 1, groups - 1) if GROUP == 32 else low_group
        if FP8 and not ZEROS:
            low, high = magnitudes_to_e4m3(units)
        else:
            zero = tl.full([ROWS], 8, tl.uint8)
            if ZEROS:
                zero = (tl.load(zeros_ptr + low_group * rows + row) + 8).to(tl.uint8, bitcast=True)
            if FP8:
                low, high = offsets_to_e4m3(units, zero[:, None])
            else:
                low, high = offsets_to_int8(units, zero[:, None])
            if ZEROS and GROUP == 32:
                zero = (tl.load(zeros_ptr + high_group * rows + row) + 8).to(tl.uint8, bitcast=True)
                if FP8:
                    _, high = offsets_to_e4m3(units, zero[:, None])
                else:
                    _, high = offsets_to_int8(units, zero[:, None])
        k = span * SPAN + unit
        source = x_ptr + x_row[None, :] + k[:, None]
        if WHOLE:
            x_low = tl.load(source)
            x_high = tl.load(source + UNITS)
        else:
            x_low = tl.load(source, mask=k[:, None] < inputs, other=0.0)
            x_high = tl.load(source + UNITS, mask=k[:, None] + UNITS < inputs, other=0.0)
        partial = tl.dot(low, x_low, out_dtype=SUMS)
        if GROUP == 32:
            scale = tl.load(scales_ptr + low_group * rows + row)
            total += partial.to(total.dtype) * scale.to(total.dtype)[:, None]
            partial = tl.dot(high, x_high, out_dtype=SUMS)
        else:
            partial = tl.dot(high, x_high, partial, out_dtype=SUMS)
        scale = tl.load(scales_ptr + high_group * rows + row)
        total += partial.to(total.dtype) * scale.to(total.dtype)[:, None]
    if FP8:
        total *= 512.0
    if SPLIT:
        store_part(total, m, n, parts_ptr, tokens, rows)
    else:
        store_result(
            total,
            m,
            n,
            out_ptr,
            x_scale_ptr,
            channel_scale_ptr,
            bias_ptr,
            tokens,
            rows,
            X_SCALE,
            "each" if INTEGER_SCALES else "none",
            BIAS,
        )


def plan_for(tokens: int, rows: int, inputs: int, group_size: int, gpu: Gpu) -> Plan:
    """How a product ``[tokens, inputs] x [rows, inputs]`` is cut up."""
    span = byte_span(group_size)
    tile = tile_for(TILES if group_size >= 128 else TILES_OF_SMALL_GROUPS, tokens)
    return plan(tile, tokens, rows, -(-inputs // span), tile.rows * span // 2 + tile.tokens * span, gpu)


def multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channel_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    cut: Plan,
) -> torch.Tensor:
    """What :func:`w4a8` computes, cut up in a given way."""
    x = x.contiguous()
    tokens, inputs = x.shape
    spans, rows = weight.shape[:2]
    span = byte_span(group_size)
    integers = scales.dtype == torch.int8
    out = x.new_empty(tokens, rows, dtype=dtype)
    split = cut.splits > 1
    part_dtype = torch.int32 if integers else torch.float32
    parts = x.new_empty(cut.splits, tokens, rows, dtype=part_dtype) if split else None
    grid = (triton.cdiv(tokens, cut.tile.tokens) * triton.cdiv(rows, cut.tile.rows), cut.splits)
    w4a8_kernel[grid](
        x,
        x_scale,
        weight,
        scales,
        zeros,
        channel_scale,
        bias,
        out,
        parts,
        tokens,
        rows,
        inputs,
        spans,
        cut.steps,
        scales.shape[0],
        max(1, group_size // span),
        GROUP=min(group_size, 128),
        ZEROS=zeros is not None,
        INTEGER_SCALES=integers,
        X_SCALE=which(x_scale),
        BIAS=bias is not None,
        WHOLE=inputs % span == 0,
        SPLIT=split,
        TOKENS=cut.tile.tokens,
        ROWS=cut.tile.rows,
        num_warps=cut.tile.warps,
        num_stages=cut.tile.stages,
    )
    if parts is not None:
        add_parts(parts, out, x_scale, channel_scale, bias)
    return out


@torch.library.custom_op("halfbyte::triton_w4a8", mutates_args=())
def w4a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channel_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Inputs ``[M, K]`` (E4M3 or INT8 codes) times an INT4 weight, ``[M, N]`` in ``dtype``; M may be 0.

    x_scale: fp32 ``[M, 1]`` or ``[1]``. weight: uint8 ``[spans, N, span / 2]`` by ``pack_spans`` for the span
    of ``group_size``: codes by ``encode_magnitude`` for E4M3 inputs without zeros, by ``encode_offset``
    otherwise. scales ``[G, N]``: bf16, fp16 or fp32, or int8 with ``channel_scale`` (fp32 ``[N, 1]``) and INT8
    inputs. zeros: int8 ``[G, N]``. group_size: 32, 64 or a multiple of 128; K rounded up to one where G is 1.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[1], dtype=dtype)
    cut = plan_for(x.shape[0], weight.shape[1], x.shape[1], group_size, gpu_of(x.device))
    with on_device(x):
        return multiply(x, x_scale, weight, scales, zeros, channel_scale, bias, group_size, dtype, cut)


@w4a8.register_fake
def _(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channel_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=dtype)
