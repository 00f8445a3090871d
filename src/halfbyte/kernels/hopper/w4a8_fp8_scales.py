"""``halfbyte::w4a8_fp8_scales_linear``: W4A8 in the numbers of vLLM's kernel, group scales in FP8."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.operands import NAMES, OUTPUTS, Features, Linear, is_bias, is_packed, require
from halfbyte.kernels.hopper.w4a8_fp8_scales_codes import FORMAT
from halfbyte.kernels.hopper.w4a8_fp8_scales_config import TABLE, W4A8Fp8ScalesConfig


@torch.library.custom_op("halfbyte::w4a8_fp8_scales_linear", mutates_args=(), device_types="cuda")
def w4a8_fp8_scales_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``channel_scale * (x_scale * (x @ weight.T)) + bias``, multiplied in this order, as ``[M, N]`` in bfloat16 or
    float16.

    x: E4M3 codes ``[M, K]``, contiguous. x_scale: fp32 ``[M, 1]``. weight: blocks of ``w4a8_fp8_scales_codes``, groups
    of 128. channel_scale: fp32 ``[N]``. bias: in ``out_dtype``. Where K is not split (more than 256 tokens; more than
    4,224 features for 129 to 256, 8,448 for 33 to 128, 16,896 for fewer), every bit is that of vLLM's kernel; else sums
    are added up in another order.
    """
    out = x.new_empty((x.shape[0], channel_scale.shape[0]), dtype=out_dtype)
    if x.shape[0]:
        config = TABLE.choose(x.shape[0], out.shape[1], x.shape[1], FORMAT)
        run_w4a8_fp8_scales(config, x, x_scale, weight, channel_scale, bias, out)
    return out


@w4a8_fp8_scales_linear.register_fake
def _(x, x_scale, weight, channel_scale, bias, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], channel_scale.shape[0]), dtype=out_dtype)


def run_w4a8_fp8_scales(
    config: W4A8Fp8ScalesConfig,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """:func:`w4a8_fp8_scales_linear` cut as ``config`` says, into ``out``. Errors: operands of another layout."""
    tokens, inputs = x.shape
    require(
        "w4a8_fp8_scales_linear",
        (x.dtype == torch.float8_e4m3fn and x.is_contiguous(), "x must be contiguous float8_e4m3fn", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        (
            x_scale.dtype == torch.float32 and x_scale.numel() == tokens and x_scale.is_contiguous(),
            lambda: f"x_scale must be contiguous float32 with one number for each of {tokens} tokens",
            x_scale,
        ),
        (
            channel_scale.dtype == torch.float32 and channel_scale.is_contiguous(),
            "channel_scale must be contiguous float32",
            channel_scale,
        ),
        (
            is_packed(weight, x, out, FORMAT),
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
    for cut, part in Features(weight, out, (channel_scale, bias)).launches(config, FORMAT):
        source, (scales, biases) = w4a8_fp8_scales_source(cut, out.dtype), part.vectors
        linear = Linear(cut, FORMAT, x, part.weight, part.out)
        linear.launch(source, part.weight, scales, x_scale, biases, part.out)


@cache
def w4a8_fp8_scales_source(config: W4A8Fp8ScalesConfig, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration."""
    defines = {**config.defines(FORMAT), "Out": NAMES[out_dtype]}
    return Source.of("w4a8_fp8_scales.cu", "w4a8_fp8_scales", defines, (config.tokens, "e4m3", "mma"))
