# ruff: noqa: N803
"""The way out of a product of 8-bit codes that was computed without scales: those of tokens and channels, a bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.triton.linear_conditions import name_of
from halfbyte.kernels.triton.row_math import part_of_row
from halfbyte.kernels.triton.rows import check_rows, cut_rows, described, on_device

# Small, so that even one token's columns occupy several multiprocessors.
_LARGEST_TILE = 1024


@triton.jit(do_not_specialize=["token_stride"])
def scale_product_kernel(
    product: tl.tensor,
    token_scale: tl.tensor,
    channel_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of one row. token_stride: 0 where all rows share a scale."""
    row, columns = part_of_row(TILE, PDL)
    inside = columns < COLUMNS
    values = tl.load(product + row * COLUMNS + columns, mask=inside, other=0.0)
    # Products of E4M3 codes lie between 2^-18 and some 2^32, so times a weight's scale from 2^-108 to 2^95 they stay
    # normal fp32 numbers. The scales of tokens come last: they go as far as fp32 does, and both scales multiplied
    # first could vanish or overflow too.
    values *= tl.load(channel_scale + columns, mask=inside, other=0.0)
    values *= tl.load(token_scale + row * token_stride)
    if bias is not None:
        values += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + columns, values.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("halfbyte::scale_product", mutates_args=())
def scale_product(
    product: torch.Tensor,
    token_scale: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``product * token_scale * channel_scale + bias``, ``[M, N]``, in fp32, rounded once to ``dtype``; M may be 0.

    product: fp32 ``[M, N]``. token_scale: fp32 ``[M, 1]`` or ``[1]``. channel_scale: fp32 ``[1, N]``. bias: ``[N]`` in
    ``dtype``, or none. dtype: bfloat16 or float16.
    """
    check_rows("scale_product", product)
    _check_scales(product, token_scale, channel_scale)
    _check_result(product, bias, dtype)
    out = product.new_empty(product.shape, dtype=dtype)
    if product.shape[0]:
        grid, options = cut_rows(product, _LARGEST_TILE)
        with on_device(product):
            scale_product_kernel[grid](
                product.contiguous(),
                token_scale.contiguous(),
                channel_scale.contiguous(),
                None if bias is None else bias.contiguous(),
                out,
                0 if token_scale.numel() == 1 else 1,
                COLUMNS=product.shape[1],
                **options,
            )
    return out


@scale_product.register_fake
def _(
    product: torch.Tensor,
    token_scale: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return product.new_empty(product.shape, dtype=dtype)


def _check_scales(product: torch.Tensor, token_scale: torch.Tensor, channel_scale: torch.Tensor) -> None:
    rows, columns = product.shape
    if (
        {product.dtype, token_scale.dtype, channel_scale.dtype} != {torch.float32}
        or token_scale.numel() not in (1, rows)
        or channel_scale.numel() != columns
    ):
        raise HalfbyteError(
            "scale_product takes a product [M, N], scales of tokens [M, 1] or [1] and scales of channels [1, N], all "
            f"float32, not {described(product)}, {described(token_scale)} and {described(channel_scale)}"
        )


def _check_result(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise HalfbyteError(f"scale_product rounds to bfloat16 or float16, not to {name_of(dtype)}")
    if bias is not None and (bias.shape != product.shape[1:] or bias.dtype != dtype):
        raise HalfbyteError(
            f"scale_product takes a bias [{product.shape[1]}] in {name_of(dtype)} here, not {described(bias)}"
        )
