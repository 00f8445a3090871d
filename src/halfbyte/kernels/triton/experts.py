# ruff: noqa: N803
"""Before and after a mixture's experts, on the GPU: tokens to rows, quantized or plain, and rows back to tokens.

``torch.ops.halfbyte``: ``route_quantize_fp8``, ``route_quantize_int8``, ``route_rows``, ``combine_experts``. Rows are
in the order of :class:`halfbyte.kernels.routes.Routes`; those of nobody are not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.triton.activations import quantize_rows
from halfbyte.kernels.triton.row_math import part_of_row, widened
from halfbyte.kernels.triton.rows import (
    INT8_GROUP,
    check_fp8,
    check_rows,
    cut_rows,
    fp8_outputs,
    int8_outputs,
    on_device,
)

_TILE = 2048


@triton.jit
def route_kernel(
    x: tl.tensor,
    origin: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of one row: its token's."""
    row, columns = part_of_row(TILE, PDL)
    choice = tl.load(origin + row)
    if choice >= 0:
        values = tl.load(x + (choice // TOP_K).to(tl.int64) * x_stride + columns, mask=columns < COLUMNS)
        tl.store(out + row * COLUMNS + columns, values, mask=columns < COLUMNS)


@triton.jit
def combine_kernel(
    rows: tl.tensor,
    place: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of one token: its rows times its shares, added up in fp32 in the order of its choices."""
    token, columns = part_of_row(TILE, PDL)
    total = tl.zeros((TILE,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + slot).to(tl.int64)
        share = tl.load(shares + token * TOP_K + slot).to(tl.float32)
        mask = (columns < COLUMNS) & (row >= 0)
        values = widened(tl.load(rows + row * COLUMNS + columns, mask=mask, other=0.0))
        total = tl.where(row >= 0, tl.fma(values, share, total), total)
    tl.store(out + token * COLUMNS + columns, total.to(out.dtype.element_ty), mask=columns < COLUMNS)


@torch.library.custom_op("halfbyte::route_quantize_fp8", mutates_args=())
def route_quantize_fp8(
    x: torch.Tensor, origin: torch.Tensor, top_k: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens ``[M, K]`` of bfloat16, float16 or float32 as rows ``[R, K]`` of E4M3 codes, fp32 scales, sums.

    origin: int32 ``[R]``: row r is of token ``origin[r] // top_k``. group_size: of the sums.
    """
    _check("route_quantize_fp8", x, origin)
    check_fp8("route_quantize_fp8", x, group_size)
    outputs = fp8_outputs(x, group_size, len(origin))
    quantize_rows(x, None, outputs, group_size, None, origin, top_k)
    return outputs


@torch.library.custom_op("halfbyte::route_quantize_int8", mutates_args=())
def route_quantize_int8(
    x: torch.Tensor, origin: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as INT8 codes, with the sum of each row's."""
    _check("route_quantize_int8", x, origin)
    outputs = int8_outputs(x, len(origin))
    quantize_rows(x, None, outputs, INT8_GROUP, None, origin, top_k)
    return outputs


@torch.library.custom_op("halfbyte::route_rows", mutates_args=())
def route_rows(x: torch.Tensor, origin: torch.Tensor, top_k: int) -> torch.Tensor:
    """The same as they are."""
    _check("route_rows", x, origin)
    out = x.new_empty(len(origin), x.shape[1])
    if len(origin):
        grid, options = cut_rows(out, _TILE)
        with on_device(x):
            route_kernel[grid](x, origin, out, x.stride(0), COLUMNS=x.shape[1], TOP_K=top_k, **options)
    return out


@torch.library.custom_op("halfbyte::combine_experts", mutates_args=())
def combine_experts(rows: torch.Tensor, place: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """``[M, K]``: for each token the sum of its rows of ``[R, K]`` times its ``shares [M, top_k]``, rounded once.

    place: int32 ``[M, top_k]``, the row of each choice; -1 adds nothing. The same bits every time.
    """
    check_rows("combine_experts", rows)
    if place.dtype != torch.int32 or place.shape != shares.shape or not rows.is_contiguous():
        raise HalfbyteError(
            "combine_experts takes contiguous rows, int32 places and as many shares, not "
            f"{str(place.dtype).removeprefix('torch.')} {list(place.shape)} and {list(shares.shape)}"
        )
    out = rows.new_empty(len(place), rows.shape[1])
    if len(place):
        grid, options = cut_rows(out, _TILE)
        with on_device(rows):
            combine_kernel[grid](
                rows,
                place.contiguous(),
                shares.contiguous(),
                out,
                COLUMNS=rows.shape[1],
                TOP_K=place.shape[1],
                **options,
            )
    return out


@route_quantize_fp8.register_fake
def _(
    x: torch.Tensor, origin: torch.Tensor, top_k: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return fp8_outputs(x, group_size, len(origin))


@route_quantize_int8.register_fake
def _(x: torch.Tensor, origin: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return int8_outputs(x, len(origin))


@route_rows.register_fake
def _(x: torch.Tensor, origin: torch.Tensor, top_k: int) -> torch.Tensor:
    return x.new_empty(len(origin), x.shape[1])


@combine_experts.register_fake
def _(rows: torch.Tensor, place: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(place), rows.shape[1])


def _check(op: str, x: torch.Tensor, origin: torch.Tensor) -> None:
    check_rows(op, x)
    if origin.dtype != torch.int32 or origin.dim() != 1 or not origin.is_contiguous():
        kind = str(origin.dtype).removeprefix("torch.")
        raise HalfbyteError(f"{op} takes contiguous int32 origins [R], not {kind} {list(origin.shape)}")
