# ruff: noqa: N803
"""What the portable GEMM kernels have in common: their tiles, the way out, and sums that were split along K.

Results are computed transposed, ``[rows of the weight, tokens]``: the weight is then the operand that Hopper
can take from registers, where it was decoded, and few tokens waste the least.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Blocks that run at the same time share as many tiles of tokens as this, and so find the weight in the L2.
TOKEN_TILES_TOGETHER: tl.constexpr = tl.constexpr(8)


@triton.jit
def tile_origin(
    tokens: tl.tensor, rows: tl.tensor, TOKENS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """First token and first row of this block's tile."""
    token_tiles = tl.cdiv(tokens, TOKENS)
    row_tiles = tl.cdiv(rows, ROWS)
    block = tl.program_id(0)
    band = block // (TOKEN_TILES_TOGETHER * row_tiles)
    within = block % (TOKEN_TILES_TOGETHER * row_tiles)
    height = tl.minimum(token_tiles - band * TOKEN_TILES_TOGETHER, TOKEN_TILES_TOGETHER)
    token_tile = band * TOKEN_TILES_TOGETHER + within % height
    return token_tile * TOKENS, (within // height) * ROWS


@triton.jit
def store_result(
    sums: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    out_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """``sums [rows, tokens] * w_scale * x_scale + bias`` in fp32, rounded once, to ``out[m, n]``.

    X_SCALE, W_SCALE: scales along the axis ("each"), a single one ("one") or none ("none").
    """
    result = sums.to(tl.float32)
    inside = (n[:, None] < rows) & (m[None, :] < tokens)
    if W_SCALE == "each":
        result *= tl.load(w_scale_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    elif W_SCALE == "one":
        result *= tl.load(w_scale_ptr).to(tl.float32)
    if X_SCALE == "each":
        result *= tl.load(x_scale_ptr + m, mask=m < tokens, other=0.0)[None, :]
    elif X_SCALE == "one":
        result *= tl.load(x_scale_ptr)
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + m[None, :].to(tl.int64) * rows + n[:, None]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_part(
    sums: tl.tensor, m: tl.tensor, n: tl.tensor, parts_ptr: tl.tensor, tokens: tl.tensor, rows: tl.tensor
) -> None:
    """This block's share of the sums, to ``parts[split, m, n]``, in its order."""
    first = tl.program_id(1).to(tl.int64) * tokens
    target = parts_ptr + (first + m[None, :]) * rows + n[:, None]
    tl.store(target, sums, mask=(n[:, None] < rows) & (m[None, :] < tokens))


@triton.jit(do_not_specialize=["tokens"])
def _add_parts_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    SPLITS: tl.constexpr,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = (n[:, None] < rows) & (m[None, :] < tokens)
    source = parts_ptr + m[None, :].to(tl.int64) * rows + n[:, None]
    sums = tl.load(source, mask=inside, other=0)
    for _ in tl.static_range(1, SPLITS):
        source += tl.cast(tokens, tl.int64) * rows
        sums += tl.load(source, mask=inside, other=0)
    store_result(
        sums, m, n, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, tokens, rows, X_SCALE, W_SCALE, BIAS
    )


def add_parts(
    parts: torch.Tensor,
    out: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Parts ``[splits, M, N]`` of sums (fp32 or int32), added in their order, scaled and rounded into ``out``."""
    splits, tokens, rows = parts.shape
    grid = (triton.cdiv(rows, 128), triton.cdiv(tokens, 4))
    _add_parts_kernel[grid](
        parts,
        out,
        x_scale,
        w_scale,
        bias,
        tokens,
        rows,
        SPLITS=splits,
        X_SCALE=which(x_scale),
        W_SCALE=which(w_scale),
        BIAS=bias is not None,
        TOKENS=4,
        ROWS=128,
        num_warps=4,
    )


def which(scale: torch.Tensor | None) -> str:
    """What :func:`store_result` calls such a scale."""
    if scale is None:
        return "none"
    return "one" if scale.numel() == 1 else "each"
