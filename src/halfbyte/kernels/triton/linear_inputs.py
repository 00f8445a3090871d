# ruff: noqa: N803, N806
"""Inputs in 8 bits other than with a scale per token: with one for all, given or found, or one for every 128 of them.

Codes and scales are those of :mod:`halfbyte.formats.activations`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.triton.activations import quantize_fp8_per_token, quantize_int8_per_token
from halfbyte.kernels.triton.linear_conditions import name_of
from halfbyte.kernels.triton.row_math import is_finite, largest_magnitude, magnitude_bits, scale_for, widened
from halfbyte.kernels.triton.rows import check_rows, on_device, row_options, tile_for

_GROUP = 128
_GROUPS_OF_A_PROGRAM = 8
_VALUES_OF_A_PROGRAM = 1024
_LARGEST_TILE = 8192


@triton.jit
def largest_of_rows_kernel(
    x: tl.tensor,
    largest: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Raises ``largest``, a magnitude's bits, to that of one row, unless the row holds NaN or Inf."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x += tl.program_id(0).to(tl.int64) * stride
    columns = tl.arange(0, TILE)
    magnitude = largest_magnitude(widened(tl.load(x + columns, mask=columns < COLUMNS, other=0.0)))
    for first in tl.static_range(TILE, COLUMNS, TILE):
        values = tl.load(x + first + columns, mask=first + columns < COLUMNS, other=0.0)
        magnitude = tl.maximum(magnitude, largest_magnitude(widened(values)))
    if is_finite(magnitude):
        tl.atomic_max(largest, magnitude)


@triton.jit(do_not_specialize=["count"])
def quantize_by_scale_kernel(
    x: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    count: tl.tensor,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """``count`` values divided by one scale, rounded to nearest, saturated: E4M3, or INT8 with NaN as 0.

    largest: bits of the largest magnitude, from which the scale is computed, which is stored. None: ``scale`` is read.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    IS_INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    if largest is None:
        divisor = tl.load(scale)
    else:
        divisor = scale_for(tl.load(largest), 127.0 if IS_INT8 else 448.0)
        if tl.program_id(0) == 0:
            tl.store(scale, divisor)
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    quotients = tl.math.div_rn(values, divisor)
    if IS_INT8:
        limited = tl.minimum(tl.maximum(tl.where(quotients == quotients, quotients, 0.0), -127.0), 127.0)
        # Added to such a number, 1.5 * 2^23 leaves the nearest integer, ties to even.
        tl.store(codes + at, ((limited + 12582912.0) - 12582912.0).to(tl.int8), mask=at < count)
    else:
        limited = tl.clamp(quotients, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + at, limited.to(tl.float8e4nv), mask=at < count)


@triton.jit(do_not_specialize=["rows"])
def quantize_groups_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """A row's ``GROUPS`` groups as E4M3 codes, and their scales, to ``scales[group, row]``."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    magnitudes = tl.max(magnitude_bits(values), axis=1)
    scale = scale_for(magnitudes, 448.0)
    quotients = tl.math.div_rn(values, scale[:, None])
    tl.store(codes + row * columns + at, quotients.to(tl.float8e4nv), mask=at < columns)
    tl.store(scales + groups.to(tl.int64) * rows + row, scale, mask=groups * GROUP < columns)


@torch.library.custom_op("halfbyte::quantize_by_scale", mutates_args=())
def quantize_by_scale(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inputs ``[M, K]`` of any float dtype, by one fp32 scale ``[1]``, as codes in ``dtype``: E4M3 or INT8."""
    _check("quantize_by_scale", x, dtype)
    codes = x.new_empty(x.shape, dtype=dtype)
    if x.shape[0]:
        _divide(x, None, scale, codes)
    return codes


@torch.library.custom_op("halfbyte::quantize_per_tensor", mutates_args=())
def quantize_per_tensor(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[M, K]`` of any float dtype as codes in ``dtype``, E4M3 or INT8, and one fp32 scale ``[1]``.

    Rows that hold NaN or Inf do not count for the scale.
    """
    _check("quantize_per_tensor", x, dtype)
    codes = x.new_empty(x.shape, dtype=dtype)
    room = x.new_zeros(2, dtype=torch.float32)
    scale, largest = room[:1], room[1:].view(torch.int32)
    rows, columns = x.shape
    if rows:
        tile = tile_for(columns, _LARGEST_TILE)
        with on_device(x):
            largest_of_rows_kernel[(rows,)](
                x, largest, x.stride(0), COLUMNS=columns, TILE=tile, **row_options(x, tile)
            )
    _divide(x, largest, scale, codes)
    return codes, scale


def _check(op: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    check_rows(op, x)
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        raise HalfbyteError(f"{op} makes codes in float8_e4m3fn or int8, not in {name_of(dtype)}")


def _divide(x: torch.Tensor, largest: torch.Tensor | None, scale: torch.Tensor, codes: torch.Tensor) -> None:
    """By :func:`quantize_by_scale_kernel`. Of no rows, the scale alone is stored."""
    programs = max(1, triton.cdiv(x.numel(), _VALUES_OF_A_PROGRAM))
    with on_device(x):
        quantize_by_scale_kernel[(programs,)](
            x.contiguous(),
            largest,
            scale,
            codes,
            x.numel(),
            VALUES=_VALUES_OF_A_PROGRAM,
            **row_options(x, _VALUES_OF_A_PROGRAM, programs),
        )


@torch.library.custom_op("halfbyte::quantize_fp8_per_group", mutates_args=())
def quantize_fp8_per_group(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[M, K]`` of any float dtype as E4M3 codes ``[M, K]`` and, transposed, fp32 scales ``[K / 128, M]``.

    K is a multiple of 128. A group that holds NaN or Inf gets the scale NaN, and no other changes.
    """
    check_rows("quantize_fp8_per_group", x)
    if x.shape[1] % _GROUP:
        raise HalfbyteError(
            f"quantize_fp8_per_group takes rows of a multiple of {_GROUP} values, not of {x.shape[1]}"
        )
    codes, scales = _group_outputs(x)
    rows, columns = x.shape
    if rows:
        with on_device(x):
            grid = (rows, triton.cdiv(columns, _GROUP * _GROUPS_OF_A_PROGRAM))
            quantize_groups_kernel[grid](
                x, codes, scales, rows, columns, x.stride(0), GROUP=_GROUP, GROUPS=_GROUPS_OF_A_PROGRAM
            )
    return codes, scales


@quantize_by_scale.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@quantize_per_tensor.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(1, dtype=torch.float32)


@quantize_fp8_per_group.register_fake
def _group_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(x.shape[1] // _GROUP, x.shape[0], dtype=torch.float32),
    )


def quantized_inputs(
    x: torch.Tensor, fmt: ActivationFormat, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[M, K]`` as E4M3 or INT8 codes ``[M, K]`` and fp32 scales by the format's granularity.

    input_scale: fp32 ``[1]`` of static formats.
    Scales: ``[M, 1]`` (token), ``[1]`` (tensor), or ``[K / 128, M]`` (groups of 128, E4M3 only).
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if fmt.granularity == "group":
        return quantize_fp8_per_group(x)
    if fmt.granularity == "tensor":
        dtype = torch.int8 if fmt.element == "int8" else torch.float8_e4m3fn
        if input_scale is None:
            return quantize_per_tensor(x, dtype)
        return quantize_by_scale(x, input_scale, dtype), input_scale
    if fmt.element == "int8":
        codes, scale, _ = quantize_int8_per_token(x)
    else:
        codes, scale, _ = quantize_fp8_per_token(x, _GROUP)
    return codes, scale
