# ruff: noqa: N803, N806, SIM300
"""8-bit weights on any GPU: INT8 times INT8, E4M3 times E4M3, and INT8 times BF16 or FP16 inputs.

- INT8: sums are int32 and exact; the scales of tokens and channels come at the end.
- E4M3: Hopper's tensor cores add in fewer bits than fp32, so after every 128 inputs their sum is added to the
  total in fp32. There scales of 128 x 128 weights and 1 x 128 inputs come in; others wait for the end.
- INT8 times 16-bit inputs: codes are integers of 8 bits, which BF16 and FP16 hold exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.triton.linear_decode import int8_to_floats
from halfbyte.kernels.triton.linear_parts import add_parts, store_part, store_result, tile_origin, which
from halfbyte.kernels.triton.linear_plan import MANY, Gpu, Plan, Tile, gpu_of, plan, tile_for
from halfbyte.kernels.triton.rows import on_device

# Inputs that a block reads at a time, and that share a scale in blocks.
STEP = 128

# By the most tokens that a tile is for.
TILES = {
    16: Tile(tokens=16, rows=64, warps=4, stages=5, resident=3),
    32: Tile(tokens=32, rows=64, warps=4, stages=5, resident=3),
    64: Tile(tokens=64, rows=64, warps=4, stages=4, resident=2),
    MANY: Tile(tokens=128, rows=128, warps=8, stages=4, resident=1),
}


@triton.jit(do_not_specialize=["tokens", "steps"])
def w8_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    stride: tl.tensor,
    steps: tl.tensor,
    BLOCKS: tl.constexpr,
    X_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """x ``[tokens, inputs]``, weight ``[rows, stride]``.

    BLOCKS: x_scale ``[inputs / 128, tokens]`` and scale ``[rows / 128, inputs / 128]`` belong to blocks.
    WHOLE: inputs are a multiple of 128. SPLIT: ``steps`` steps of 128 inputs from ``program_id(1)`` on are
    added up and left in ``parts``.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    FP8: tl.constexpr = DTYPE == tl.float8e4nv
    SUMS: tl.constexpr = tl.int32 if DTYPE == tl.int8 else tl.float32
    first_token, first_row = tile_origin(tokens, rows, TOKENS, ROWS)
    m = first_token + tl.arange(0, TOKENS)
    n = first_row + tl.arange(0, ROWS)
    # Tokens and rows past the end repeat the last one; what they give is not stored.
    token = tl.minimum(m, tokens - 1)
    x_row = token.to(tl.int64) * inputs
    row = tl.minimum(n, rows - 1).to(tl.int64) * stride
    within = tl.arange(0, 128)
    all_steps = tl.cdiv(inputs, 128)
    total = tl.zeros([ROWS, TOKENS], SUMS)
    begin = tl.program_id(1) * steps
    for step in range(begin, tl.minimum(begin + steps, all_steps)):
        k = step * 128 + within
        x_source = x_ptr + x_row[None, :] + k[:, None]
        source = weight_ptr + row[:, None] + k[None, :]
        if WHOLE:
            x = tl.load(x_source)
            weight = tl.load(source)
        else:
            x = tl.load(x_source, mask=k[:, None] < inputs, other=0.0)
            weight = tl.load(source, mask=k[None, :] < inputs, other=0.0)
        if FP8:
            partial = tl.dot(weight, x)
            if BLOCKS:
                scale = tl.load(scale_ptr + first_row // 128 * all_steps + step).to(tl.float32)
                partial *= scale * tl.load(x_scale_ptr + tl.cast(step, tl.int64) * tokens + token)[None, :]
            total += partial
        else:
            if DTYPE != tl.int8:
                weight = int8_to_floats(weight, DTYPE)
            total = tl.dot(weight, x, total, out_dtype=SUMS)
    if SPLIT:
        store_part(total, m, n, parts_ptr, tokens, rows)
    else:
        store_result(
            total, m, n, out_ptr, x_scale_ptr, scale_ptr, bias_ptr, tokens, rows, X_SCALE, SCALE, BIAS
        )


def plan_for(tokens: int, rows: int, inputs: int, dtype: torch.dtype, gpu: Gpu) -> Plan:
    """How a product of ``[tokens, inputs]`` in ``dtype`` and ``[rows, inputs]`` is cut up."""
    tile = tile_for(TILES, tokens)
    return plan(
        tile, tokens, rows, -(-inputs // STEP), (tile.rows + tile.tokens * dtype.itemsize) * STEP, gpu
    )


def multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: bool,
    dtype: torch.dtype,
    cut: Plan,
) -> torch.Tensor:
    """What :func:`w8` computes, cut up in a given way."""
    x = x.contiguous()
    tokens, inputs = x.shape
    rows = weight.shape[0]
    tile = cut.tile
    out = x.new_empty(tokens, rows, dtype=dtype)
    part_dtype = torch.int32 if x.dtype == torch.int8 else torch.float32
    parts = x.new_empty(cut.splits, tokens, rows, dtype=part_dtype) if cut.splits > 1 else None
    last_x_scale, last_scale = (None, None) if blocks else (x_scale, scale)
    w8_kernel[(triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows), cut.splits)](
        x,
        x_scale,
        weight,
        scale,
        bias,
        out,
        parts,
        tokens,
        rows,
        inputs,
        weight.stride(0),
        cut.steps,
        BLOCKS=blocks,
        X_SCALE=which(last_x_scale),
        SCALE=which(last_scale),
        BIAS=bias is not None,
        WHOLE=inputs % STEP == 0,
        SPLIT=parts is not None,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts is not None:
        add_parts(parts, out, last_x_scale, last_scale, bias)
    return out


@torch.library.custom_op("halfbyte::triton_w8", mutates_args=())
def w8(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Inputs ``[M, K]`` times an 8-bit weight, ``[M, N]`` in ``dtype``; M may be 0.

    x: INT8 or E4M3 codes with ``x_scale`` (fp32 ``[M, 1]`` or ``[1]``; ``[K / 128, M]`` with ``blocks``), or bf16
    or fp16 without. weight: INT8 or, for E4M3 inputs, E4M3, rows contiguous and as long as K or longer. scale:
    bf16, fp16 or fp32 ``[N, 1]`` or ``[1, 1]``; ``[ceil(N / 128), K / 128]`` with ``blocks`` (E4M3 only).
    """
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0], dtype=dtype)
    cut = plan_for(x.shape[0], weight.shape[0], x.shape[1], x.dtype, gpu_of(x.device))
    with on_device(x):
        return multiply(x, x_scale, weight, scale, bias, blocks, dtype, cut)


@w8.register_fake
def _(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
