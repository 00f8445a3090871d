# ruff: noqa: N803, N806
"""Inputs of quantized layers in 8 bits with a scale per token, on the GPU: plain, or after a gated activation.

``torch.ops.halfbyte``: ``quantize_fp8_per_token``, ``silu_and_mul_quantize_fp8``, ``gelu_tanh_and_mul_quantize_fp8``,
the same three for ``int8``; without quantization ``silu_and_mul`` and ``gelu_tanh_and_mul``. Codes and scales are those
of :mod:`halfbyte.formats.activations`, bit for bit.

E4M3 ops also give ``sums``, fp32 ``[M, ceil(K / group_size)]``: ``sums[m, g]`` is the sum of the codes' values
(without the scale) of token ``m`` in group ``g``, which weights with zero points need; its rows are multiples of 16
bytes apart. INT8 ops give the sum of all codes of a token, int32 ``[M, 1]``. A token that holds NaN or Inf gets the
scale NaN, and no other token changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from halfbyte.kernels.triton.row_math import (
    ASSEMBLY,
    largest_magnitude,
    part_of_row,
    rounded,
    scale_for,
    store_fp8,
    store_int8,
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

# Where nothing is asked of a whole row, programs share it in parts of this many values.
_GATED_TILE = 2048


@triton.jit
def _activated(values: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """SiLU, or GELU by its tanh formula: 0.5 * (1 + tanh(u)) is the logistic function of 2 * u."""
    if ACTIVATION == "silu":
        exponents = values * -1.0
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        exponents = values * (-1.5957691216057308 - 0.07135481282734652 * values * values)
    if ASSEMBLY:
        return libdevice.fast_dividef(values, 1.0 + libdevice.fast_expf(exponents))
    return values / (1.0 + tl.exp(exponents))


@triton.jit
def _read(
    x: tl.tensor, up: tl.tensor, columns: tl.tensor, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """A tile of the values to quantize. x, up: the row."""
    values = widened(tl.load(x + columns, mask=columns < COLUMNS, other=0.0))
    if ACTIVATION is not None:
        factors = widened(tl.load(up + columns, mask=columns < COLUMNS, other=0.0))
        DTYPE: tl.constexpr = x.dtype.element_ty
        values = rounded(rounded(_activated(values, ACTIVATION), DTYPE) * factors, DTYPE)
    return values


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    up: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    up_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row, in tiles of ``GROUPS`` groups: E4M3 codes and the groups' sums, or INT8 codes and the row's sum."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * COLUMNS
    if ACTIVATION is not None:
        up += row * up_stride
    DTYPE: tl.constexpr = x.dtype.element_ty
    IS_INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    groups = tl.arange(0, GROUPS)
    columns = tile_columns(GROUPS, GROUP)

    values = _read(x, up, columns, COLUMNS, ACTIVATION)
    magnitude = largest_magnitude(values)
    for tile in tl.static_range(1, TILES):
        values = _read(x, up, columns + tile * GROUPS * GROUP, COLUMNS, ACTIVATION)
        magnitude = tl.maximum(magnitude, largest_magnitude(values))
    scale = scale_for(magnitude, 127.0 if IS_INT8 else 448.0)
    tl.store(scales + row, scale)
    total = 0

    for step in tl.static_range(TILES):
        # Backwards, since the last tile is at hand.
        first = (TILES - 1 - step) * GROUPS
        if step > 0:
            values = _read(x, up, columns + first * GROUP, COLUMNS, ACTIVATION)
        if IS_INT8:
            total += store_int8(values, scale, codes, columns + first * GROUP, COLUMNS, DTYPE)
        else:
            here = groups + first
            store_fp8(
                values,
                scale,
                codes,
                sums_of_row(sums, row, GROUP, COLUMNS),
                here,
                columns + first * GROUP,
                GROUP,
                COLUMNS,
                DTYPE,
            )
    if IS_INT8:
        tl.store(sums + row, total)


@triton.jit
def gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A part of one row of the activated gate times ``up``."""
    row, columns = part_of_row(TILE, PDL)
    values = _read(gate + row * gate_stride, up + row * up_stride, columns, COLUMNS, ACTIVATION)
    tl.store(out + row * COLUMNS + columns, values.to(out.dtype.element_ty), mask=columns < COLUMNS)


@torch.library.custom_op("halfbyte::silu_and_mul", mutates_args=())
def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, both ``[M, K]``, each step rounded to their dtype."""
    return _gated("silu_and_mul", gate, up, "silu")


@torch.library.custom_op("halfbyte::gelu_tanh_and_mul", mutates_args=())
def gelu_tanh_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate, approximate="tanh") * up``, both ``[M, K]``, each step rounded to their dtype."""
    return _gated("gelu_tanh_and_mul", gate, up, "gelu_tanh")


@torch.library.custom_op("halfbyte::quantize_fp8_per_token", mutates_args=())
def quantize_fp8_per_token(
    x: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``[M, K]`` of bfloat16, float16 or float32 as E4M3 codes ``[M, K]``, fp32 scales ``[M, 1]``, sums."""
    check_rows("quantize_fp8_per_token", x)
    return _quantized_fp8("quantize_fp8_per_token", x, None, group_size, None)


@torch.library.custom_op("halfbyte::silu_and_mul_quantize_fp8", mutates_args=())
def silu_and_mul_quantize_fp8(
    gate: torch.Tensor, up: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``silu_and_mul`` gives, as E4M3 codes, scales and sums."""
    check_rows("silu_and_mul_quantize_fp8", gate, up)
    return _quantized_fp8("silu_and_mul_quantize_fp8", gate, up, group_size, "silu")


@torch.library.custom_op("halfbyte::gelu_tanh_and_mul_quantize_fp8", mutates_args=())
def gelu_tanh_and_mul_quantize_fp8(
    gate: torch.Tensor, up: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``gelu_tanh_and_mul`` gives, as E4M3 codes, scales and sums."""
    check_rows("gelu_tanh_and_mul_quantize_fp8", gate, up)
    return _quantized_fp8("gelu_tanh_and_mul_quantize_fp8", gate, up, group_size, "gelu_tanh")


@torch.library.custom_op("halfbyte::quantize_int8_per_token", mutates_args=())
def quantize_int8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``[M, K]`` as INT8 codes in [-127, 127] (0 in a row with NaN or Inf), fp32 scales ``[M, 1]``, sums."""
    check_rows("quantize_int8_per_token", x)
    return _quantized_int8(x, None, None)


@torch.library.custom_op("halfbyte::silu_and_mul_quantize_int8", mutates_args=())
def silu_and_mul_quantize_int8(
    gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``silu_and_mul`` gives, as INT8 codes, scales and sums."""
    check_rows("silu_and_mul_quantize_int8", gate, up)
    return _quantized_int8(gate, up, "silu")


@torch.library.custom_op("halfbyte::gelu_tanh_and_mul_quantize_int8", mutates_args=())
def gelu_tanh_and_mul_quantize_int8(
    gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``gelu_tanh_and_mul`` gives, as INT8 codes, scales and sums."""
    check_rows("gelu_tanh_and_mul_quantize_int8", gate, up)
    return _quantized_int8(gate, up, "gelu_tanh")


@silu_and_mul.register_fake
@gelu_tanh_and_mul.register_fake
def _gated_output(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@quantize_fp8_per_token.register_fake
def _(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return fp8_outputs(x, group_size)


@silu_and_mul_quantize_fp8.register_fake
@gelu_tanh_and_mul_quantize_fp8.register_fake
def _(
    gate: torch.Tensor, up: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return fp8_outputs(gate, group_size)


@quantize_int8_per_token.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return int8_outputs(x)


@silu_and_mul_quantize_int8.register_fake
@gelu_tanh_and_mul_quantize_int8.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return int8_outputs(gate)


def _gated(op: str, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    check_rows(op, gate, up)
    out = _gated_output(gate, up)
    if gate.shape[0]:
        grid, options = cut_rows(gate, _GATED_TILE)
        with on_device(gate):
            gated_kernel[grid](
                gate,
                up,
                out,
                gate.stride(0),
                up.stride(0),
                COLUMNS=gate.shape[1],
                ACTIVATION=activation,
                **options,
            )
    return out


def _quantized_fp8(
    op: str, x: torch.Tensor, up: torch.Tensor | None, group_size: int, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_fp8(op, x, group_size)
    codes, scales, sums = fp8_outputs(x, group_size)
    _launch(x, up, codes, scales, sums, group_size, activation)
    return codes, scales, sums


def _quantized_int8(
    x: torch.Tensor, up: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, sums = int8_outputs(x)
    _launch(x, up, codes, scales, sums, INT8_GROUP, activation)
    return codes, scales, sums


def _launch(
    x: torch.Tensor,
    up: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    group_size: int,
    activation: str | None,
) -> None:
    rows, columns = x.shape
    if rows == 0:
        return
    tile = min(triton.next_power_of_2(-(-columns // group_size)) * group_size, LARGEST_TILE[x.element_size()])
    with on_device(x):
        quantize_kernel[(rows,)](
            x,
            up,
            codes,
            scales,
            sums,
            x.stride(0),
            0 if up is None else up.stride(0),
            COLUMNS=columns,
            GROUPS=tile // group_size,
            GROUP=group_size,
            TILES=-(-columns // tile),
            ACTIVATION=activation,
            **row_options(x, tile),
        )
