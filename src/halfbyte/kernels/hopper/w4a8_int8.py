"""``halfbyte::w4a8_int8_linear``: INT4, in two levels or per channel, x INT8 on Hopper, sums exact."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.operands import NAMES, OUTPUTS, Features, Linear, is_bias, is_packed, require
from halfbyte.kernels.hopper.w4a8_int8_codes import block_format
from halfbyte.kernels.hopper.w4a8_int8_config import TABLE, W4A8Int8Config


@torch.library.custom_op("halfbyte::w4a8_int8_linear", mutates_args=(), device_types="cuda")
def w4a8_int8_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sum: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    channel_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``channel_scale * (x_scale * (x @ weight.T)) + bias``, multiplied in this order, as ``[M, N]`` in bfloat16 or
    float16.

    x: INT8 codes ``[M, K]``, contiguous. x_scale: fp32 ``[M, 1]``. x_sum: int32 ``[M, 1]``, of each token's codes.
    weight: blocks of ``w4a8_int8_codes``, groups of ``group_size`` (32, 64, 128), or none for one per channel with
    zero points channel_zero, int32 ``[N]``, of codes + 8. channel_scale: fp32 ``[N]``. bias: in ``out_dtype``.
    Sums are exact in int32 and rounded to fp32 once.
    """
    out = x.new_empty((x.shape[0], channel_scale.shape[0]), dtype=out_dtype)
    if x.shape[0]:
        fmt = block_format(group_size)
        config = TABLE.choose(x.shape[0], out.shape[1], x.shape[1], fmt)
        run_w4a8_int8(config, fmt, x, x_scale, x_sum, weight, channel_scale, channel_zero, bias, out)
    return out


@w4a8_int8_linear.register_fake
def _(x, x_scale, x_sum, weight, channel_scale, channel_zero, bias, group_size, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], channel_scale.shape[0]), dtype=out_dtype)


def run_w4a8_int8(
    config: W4A8Int8Config,
    fmt: BlockFormat,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sum: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    channel_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """:func:`w4a8_int8_linear` cut as ``config`` says, into ``out``. Errors: operands of another layout."""
    tokens, inputs = x.shape
    require(
        "w4a8_int8_linear",
        (x.dtype == torch.int8 and x.is_contiguous(), "x must be contiguous int8", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        (
            x_scale.dtype == torch.float32 and x_scale.numel() == tokens and x_scale.is_contiguous(),
            lambda: f"x_scale must be contiguous float32 with one number for each of {tokens} tokens",
            x_scale,
        ),
        (
            x_sum.dtype == torch.int32 and x_sum.numel() == tokens and x_sum.is_contiguous(),
            lambda: f"x_sum must be contiguous int32 with one number for each of {tokens} tokens",
            x_sum,
        ),
        (
            channel_scale.dtype == torch.float32 and channel_scale.is_contiguous(),
            "channel_scale must be contiguous float32",
            channel_scale,
        ),
        (
            _are_zeros(channel_zero, out, fmt),
            lambda: (
                f"channel_zero must be int32 with {out.shape[1]} numbers, for whole channels and for these only"
            ),
            weight if channel_zero is None else channel_zero,
        ),
        (
            is_packed(weight, x, out, fmt),
            lambda: f"weight must be packed for {out.shape[1]} x {inputs}",
            weight,
        ),
        (
            is_bias(bias, out),
            lambda: f"bias must be contiguous with {out.shape[1]} numbers of the dtype of out",
            bias,
        ),
        (
            out.dtype in OUTPUTS and out.shape[1] % 8 == 0 and out.is_contiguous(),
            "out must be contiguous bfloat16 or float16 with a multiple of 8 columns",
            out,
        ),
    )
    features = Features(weight, out, (channel_scale, channel_zero, bias))
    for cut, part in features.launches(config, fmt):
        source, (scales, zeros, biases) = w4a8_int8_source(cut, fmt, out.dtype), part.vectors
        linear = Linear(cut, fmt, x, part.weight, part.out)
        linear.launch(source, part.weight, scales, zeros, x_scale, x_sum, biases, part.out)


def _are_zeros(zeros: torch.Tensor | None, out: torch.Tensor, fmt: BlockFormat) -> bool:
    if zeros is None or fmt.scale is not None:
        return zeros is None and fmt.scale is not None
    return zeros.dtype == torch.int32 and zeros.shape == out.shape[1:] and zeros.is_contiguous()


@cache
def w4a8_int8_source(config: W4A8Int8Config, fmt: BlockFormat, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration."""
    defines = {
        **config.defines(fmt),
        "Total": "int",
        "Out": NAMES[out_dtype],
    }
    return Source.of("w4a8_int8.cu", "w4a8_int8", defines, (config.tokens, "u8", "mma"))
