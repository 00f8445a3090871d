# ruff: noqa: N803, N806
"""RMSNorm on the GPU, with the residual sum before it and the quantization after it in the same kernel.

``torch.ops.halfbyte``: ``rms_norm``, ``add_rms_norm``, ``rms_norm_quantize_fp8``, ``add_rms_norm_quantize_fp8``,
``rms_norm_quantize_int8``, ``add_rms_norm_quantize_int8``.
The numbers are those of Llama's RMSNorm in transformers: the sum of squares and its root in fp32, the normed
values rounded to the model's dtype, then the product with the weight, rounded again.

With quantization nothing is rounded in between: a row's RMS divides all its values alike, so it goes into the scale,
and codes are those of the row times the weight in fp32. So squares are summed while the largest value is looked for.
Codes, scales and sums are as in :mod:`halfbyte.kernels.triton.activations`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.triton.row_math import (
    rounded,
    scale_for,
    squares_and_largest_magnitude,
    store_fp8,
    store_int8,
    sums_of_row,
    tile_columns,
    widened,
)
from halfbyte.kernels.triton.rows import (
    INT8_GROUP,
    check_fp8,
    check_rows,
    described,
    fp8_outputs,
    int8_outputs,
    on_device,
    row_options,
)

# A row stays in the registers of one program.
_LARGEST_ROW = 16384
_PLAIN_GROUP = 128


@triton.jit(do_not_specialize=["eps"])
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    hidden: tl.tensor,
    normed: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row. Without ``residual`` there is no ``hidden``; there is ``normed``, or codes, scales and sums."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    groups = tl.arange(0, GROUPS)
    columns = tile_columns(GROUPS, GROUP)
    inside = columns < COLUMNS
    # No kernel in front of this one writes weights, so they need not wait for it.
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    values = widened(tl.load(x + row * x_stride + columns, mask=inside, other=0.0))
    if residual is not None:
        stream = widened(tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0))
        values = rounded(values + stream, DTYPE)
        tl.store(hidden + row * COLUMNS + columns, values.to(DTYPE), mask=inside)
    if sums is None:
        root = tl.rsqrt(tl.sum(values * values) * (1.0 / COLUMNS) + eps)
        values = rounded(rounded(values * root, DTYPE) * widened(factors), DTYPE)
        tl.store(normed + row * COLUMNS + columns, values.to(DTYPE), mask=inside)
    else:
        IS_INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
        weighted = values * widened(factors)
        squares, magnitude = squares_and_largest_magnitude(values, weighted)
        scale = scale_for(magnitude, 127.0 if IS_INT8 else 448.0)
        tl.store(scales + row, scale * tl.rsqrt(squares * (1.0 / COLUMNS) + eps))
        codes += row * COLUMNS
        if IS_INT8:
            tl.store(sums + row, store_int8(weighted, scale, codes, columns, COLUMNS, tl.float32))
        else:
            store_fp8(
                weighted,
                scale,
                codes,
                sums_of_row(sums, row, GROUP, COLUMNS),
                groups,
                columns,
                GROUP,
                COLUMNS,
                tl.float32,
            )


@torch.library.custom_op("halfbyte::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the rows of ``[M, K]``, in the dtype of x, which the weight ``[K]`` shares."""
    _check("rms_norm", weight, x)
    normed = _rows_like(x)
    _launch(x, None, weight, eps, _PLAIN_GROUP, normed=normed)
    return normed


@torch.library.custom_op("halfbyte::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of ``hidden = x + residual``. Returns: what ``rms_norm`` does, and hidden."""
    _check("add_rms_norm", weight, x, residual)
    normed, hidden = _rows_like(x), _rows_like(x)
    _launch(x, residual, weight, eps, _PLAIN_GROUP, hidden=hidden, normed=normed)
    return normed, hidden


@torch.library.custom_op("halfbyte::rms_norm_quantize_fp8", mutates_args=())
def rms_norm_quantize_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm as E4M3 codes ``[M, K]``, fp32 scales ``[M, 1]`` and sums per group, without rounding in between."""
    _check("rms_norm_quantize_fp8", weight, x)
    check_fp8("rms_norm_quantize_fp8", x, group_size)
    outputs = fp8_outputs(x, group_size)
    _launch(x, None, weight, eps, group_size, quantized=outputs)
    return outputs


@torch.library.custom_op("halfbyte::add_rms_norm_quantize_fp8", mutates_args=())
def add_rms_norm_quantize_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rms_norm_quantize_fp8`` of ``hidden = x + residual``. Returns: codes, scales, sums, and hidden."""
    _check("add_rms_norm_quantize_fp8", weight, x, residual)
    check_fp8("add_rms_norm_quantize_fp8", x, group_size)
    outputs = fp8_outputs(x, group_size)
    hidden = _rows_like(x)
    _launch(x, residual, weight, eps, group_size, hidden=hidden, quantized=outputs)
    return *outputs, hidden


@torch.library.custom_op("halfbyte::rms_norm_quantize_int8", mutates_args=())
def rms_norm_quantize_int8(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm as INT8 codes ``[M, K]``, fp32 scales ``[M, 1]`` and the rows' sums, without rounding in between."""
    _check("rms_norm_quantize_int8", weight, x)
    outputs = int8_outputs(x)
    _launch(x, None, weight, eps, INT8_GROUP, quantized=outputs)
    return outputs


@torch.library.custom_op("halfbyte::add_rms_norm_quantize_int8", mutates_args=())
def add_rms_norm_quantize_int8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rms_norm_quantize_int8`` of ``hidden = x + residual``. Returns: codes, scales, sums, and hidden."""
    _check("add_rms_norm_quantize_int8", weight, x, residual)
    outputs, hidden = int8_outputs(x), _rows_like(x)
    _launch(x, residual, weight, eps, INT8_GROUP, hidden=hidden, quantized=outputs)
    return *outputs, hidden


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _rows_like(x)


@add_rms_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows_like(x), _rows_like(x)


@rms_norm_quantize_fp8.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return fp8_outputs(x, group_size)


@add_rms_norm_quantize_fp8.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return *fp8_outputs(x, group_size), _rows_like(x)


@rms_norm_quantize_int8.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return int8_outputs(x)


@add_rms_norm_quantize_int8.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return *int8_outputs(x), _rows_like(x)


def _rows_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check(op: str, weight: torch.Tensor, *rows: torch.Tensor) -> None:
    check_rows(op, *rows)
    x = rows[0]
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or weight.device != x.device:
        raise HalfbyteError(
            f"{op} takes a weight of {x.shape[1]} values in the dtype and on the device of its rows, "
            f"not {described(weight)} for {described(x)}"
        )
    if not weight.is_contiguous():
        raise HalfbyteError(f"{op} takes a contiguous weight, not one with stride {weight.stride(0)}")
    if x.shape[1] > _LARGEST_ROW:
        raise HalfbyteError(f"{op} takes rows of at most {_LARGEST_ROW} values, not of {x.shape[1]}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    *,
    hidden: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    quantized: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    rows, columns = x.shape
    if rows == 0:
        return
    codes, scales, sums = quantized or (None, None, None)
    groups = triton.next_power_of_2(-(-columns // group_size))
    with on_device(x):
        norm_kernel[(rows,)](
            x,
            residual,
            weight,
            hidden,
            normed,
            codes,
            scales,
            sums,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            COLUMNS=columns,
            GROUPS=groups,
            GROUP=group_size,
            **row_options(x, groups * group_size),
        )
