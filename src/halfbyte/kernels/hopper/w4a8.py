"""``halfbyte::w4a8_linear``: INT4 weights x FP8 activations on Hopper, group scales exact."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.config import ceil_div
from halfbyte.kernels.hopper.driver import tensor_map
from halfbyte.kernels.hopper.operands import NAMES, OUTPUTS, Linear, is_bias, is_packed, require
from halfbyte.kernels.hopper.w4a8_config import SUMS_AT_ONCE, TABLE, W4A8Config


def block_format(group_size: int, scale: torch.dtype, zero_points: bool) -> BlockFormat:
    """Blocks of :mod:`w4a8_codes`."""
    return BlockFormat(group_size, scale, torch.float16 if zero_points else None)


@torch.library.custom_op("halfbyte::w4a8_linear", mutates_args=(), device_types="cuda")
def w4a8_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zero_points: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``x_scale * (x @ weight.T) + bias`` as ``[M, out_features]`` in bfloat16 or float16.

    x: E4M3 codes ``[M, K]``, contiguous. x_scale: fp32 ``[M, 1]``. x_sums: fp32 ``[M, ceil(K / group_size)]``, each
    token's sum of codes over each group, with rows multiples of 16 bytes apart. weight: blocks with ``w4a8_codes``,
    groups of ``group_size`` inputs (32, 64, 128; a scale per channel is repeated), scales in ``scale_dtype`` and zero
    points or none. bias: in ``out_dtype``.
    """
    out = x.new_empty((x.shape[0], out_features), dtype=out_dtype)
    if x.shape[0]:
        fmt = block_format(group_size, scale_dtype, zero_points)
        config = TABLE.choose(x.shape[0], out_features, x.shape[1], fmt)
        run_w4a8(config, fmt, x, x_scale, x_sums, weight, bias, out)
    return out


@w4a8_linear.register_fake
def _(x, x_scale, x_sums, weight, bias, out_features, group_size, scale_dtype, zero_points, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype)


def run_w4a8(
    config: W4A8Config,
    fmt: BlockFormat,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """:func:`w4a8_linear` cut as ``config`` says, into ``out``. Errors: operands of another dtype or layout."""
    tokens, inputs = x.shape
    sums = (tokens, ceil_div(inputs, fmt.group_size))
    require(
        "w4a8_linear",
        (x.dtype == torch.float8_e4m3fn and x.is_contiguous(), "x must be contiguous float8_e4m3fn", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        (
            x_scale.dtype == torch.float32 and x_scale.numel() == tokens and x_scale.is_contiguous(),
            f"x_scale must be contiguous float32 with one number for each of {tokens} tokens",
            x_scale,
        ),
        (
            x_sums.dtype == torch.float32 and x_sums.shape == sums and _is_copied(x_sums),
            f"x_sums must be float32 {list(sums)} with contiguous rows, each where 16 bytes begin",
            x_sums,
        ),
        (is_packed(weight, x, out, fmt), f"weight must be packed for {out.shape[1]} x {inputs}", weight),
        (
            is_bias(bias, out),
            f"bias must be contiguous with {out.shape[1]} numbers of the dtype of out",
            bias,
        ),
        (
            out.dtype in OUTPUTS and out.shape[1] % 8 == 0,
            "out must be bfloat16 or float16 with a multiple of 8 columns",
            out,
        ),
    )
    linear = Linear(config, fmt, x, weight, out)
    sums_map = tensor_map(
        x_sums.data_ptr(), "f32", *sums, x_sums.stride(0) * 4, config.tokens, SUMS_AT_ONCE, SUMS_AT_ONCE * 4
    )
    linear.launch(w4a8_source(config, fmt, out.dtype), sums_map, weight, x_scale, bias, out)


def _is_copied(sums: torch.Tensor) -> bool:
    """Whether the copy engine can read these rows."""
    return sums.stride(1) == 1 and sums.stride(0) % 4 == 0 and sums.data_ptr() % 16 == 0


@cache
def w4a8_source(config: W4A8Config, fmt: BlockFormat, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration and kind of weight."""
    columns = config.columns
    defines = {
        **config.defines(fmt),
        "AHEAD": int(config.ahead(fmt)),
        "SUMS": config.sums(fmt),
        "PLAIN": int(config.plain(fmt)),
        "Scale": NAMES[fmt.scale],
        "Out": NAMES[out_dtype],
    }
    instructions = (columns, "e4m3", "mma"), (columns, "tf32", "mma_tf32")
    return Source.of("w4a8.cu", "w4a8", defines, *instructions)
