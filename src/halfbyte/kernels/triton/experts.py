# ruff: noqa: N803, N806
"""Before and after a mixture's experts, on the GPU: tokens to rows, quantized or plain, and rows back to tokens.

``torch.ops.halfbyte``: ``route_quantize_fp8``, ``route_quantize_int8``, ``route_rows``, ``combine_experts``. Rows are
in the order of :class:`halfbyte.kernels.routes.Routes`; those of nobody are not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.triton.row_math import (
    divided,
    fp8_sums,
    int8_codes,
    largest_magnitude,
    part_of_row,
    scale_for,
    store_sums,
    sums_of_row,
    tile_columns,
    widened,
)
from halfbyte.kernels.triton.rows import (
    INT8_GROUP,
    LARGEST_TILE,
    check_fp8,
    check_rows,
    cut_rows,
    fp8_outputs,
    int8_outputs,
    on_device,
    row_options,
)

_TILE = 2048


@triton.jit
def route_kernel(
    x: tl.tensor,
    place: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of one token, into its rows."""
    token, columns = part_of_row(TILE, PDL)
    values = tl.load(x + token * x_stride + columns, mask=columns < COLUMNS)
    for slot in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + slot).to(tl.int64)
        tl.store(out + row * COLUMNS + columns, values, mask=(columns < COLUMNS) & (row >= 0))


@triton.jit
def route_quantize_kernel(
    x: tl.tensor,
    place: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One token, quantized once, into its rows: E4M3 codes and the groups' sums, or INT8 codes and the row's sum."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = x.dtype.element_ty
    IS_INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    groups = tl.arange(0, GROUPS)
    columns = tile_columns(GROUPS, GROUP)
    values = widened(tl.load(x + token * x_stride + columns, mask=columns < COLUMNS, other=0.0))
    scale = scale_for(largest_magnitude(values), 127.0 if IS_INT8 else 448.0)
    if IS_INT8:
        tile = int8_codes(values, scale, DTYPE)
        total = tl.sum(tile.to(tl.int32))
    else:
        tile = divided(values, scale, DTYPE).to(tl.float8e4nv)
    for slot in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + slot).to(tl.int64)
        there = row >= 0
        tl.store(codes + row * COLUMNS + columns, tile, mask=(columns < COLUMNS) & there)
        tl.store(scales + row, scale, mask=there)
        if slot == 0 and not IS_INT8:
            # Before the first store, ptxas 12.8 would widen half of the codes from another register.
            total = fp8_sums(tile)
        if IS_INT8:
            tl.store(sums + row, total, mask=there)
        else:
            of_row = sums_of_row(sums, row, GROUP, COLUMNS)
            store_sums(of_row, groups, total, (groups * GROUP < COLUMNS) & there)


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
    x: torch.Tensor, place: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens ``[M, K]`` of bfloat16, float16 or float32 as rows ``[R, K]`` of E4M3 codes, fp32 scales, sums.

    place: int32 ``[M, top_k]``, the rows that each token goes to, all different; -1 for none. R is ``M * top_k``.
    group_size: of the sums.
    """
    _check("route_quantize_fp8", x, place)
    check_fp8("route_quantize_fp8", x, group_size)
    outputs = fp8_outputs(x, group_size, place.numel())
    _quantize(x, place, outputs, group_size)
    return outputs


@torch.library.custom_op("halfbyte::route_quantize_int8", mutates_args=())
def route_quantize_int8(
    x: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as INT8 codes, with the sum of each row's."""
    _check("route_quantize_int8", x, place)
    outputs = int8_outputs(x, place.numel())
    _quantize(x, place, outputs, INT8_GROUP)
    return outputs


@torch.library.custom_op("halfbyte::route_rows", mutates_args=())
def route_rows(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The same as they are."""
    _check("route_rows", x, place)
    out = x.new_empty(place.numel(), x.shape[1])
    if len(x):
        grid, options = cut_rows(x, _TILE)
        with on_device(x):
            route_kernel[grid](
                x, place, out, x.stride(0), COLUMNS=x.shape[1], TOP_K=place.shape[1], **options
            )
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
    x: torch.Tensor, place: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return fp8_outputs(x, group_size, place.numel())


@route_quantize_int8.register_fake
def _(x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return int8_outputs(x, place.numel())


@route_rows.register_fake
def _(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return x.new_empty(place.numel(), x.shape[1])


@combine_experts.register_fake
def _(rows: torch.Tensor, place: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(place), rows.shape[1])


def _check(op: str, x: torch.Tensor, place: torch.Tensor) -> None:
    """Errors: what the kernels do not take."""
    check_rows(op, x)
    if place.dtype != torch.int32 or place.shape[:-1] != x.shape[:1] or not place.is_contiguous():
        kind = str(place.dtype).removeprefix("torch.")
        raise HalfbyteError(
            f"{op} takes contiguous int32 places [{len(x)}, top_k], not {kind} {list(place.shape)}"
        )
    if x.shape[1] > LARGEST_TILE[x.element_size()]:
        raise HalfbyteError(f"{op} takes at most {LARGEST_TILE[x.element_size()]} columns, not {x.shape[1]}")


def _quantize(
    x: torch.Tensor,
    place: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group_size: int,
) -> None:
    rows, columns = x.shape
    if rows == 0:
        return
    groups = triton.next_power_of_2(-(-columns // group_size))
    with on_device(x):
        route_quantize_kernel[(rows,)](
            x,
            place,
            *outputs,
            x.stride(0),
            COLUMNS=columns,
            GROUPS=groups,
            GROUP=group_size,
            TOP_K=place.shape[1],
            **row_options(x, groups * group_size),
        )
