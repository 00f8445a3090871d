"""``halfbyte::w4a8_fp8_scales_linear``: W4A8 in the numbers of vLLM's kernel, group scales in FP8."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.grouped import Runs, choose, feature_shape, launches, of_heights
from halfbyte.kernels.hopper.operands import NAMES, of_features, of_tokens, packed, require, written
from halfbyte.kernels.hopper.w4a8_fp8_scales_codes import FORMAT
from halfbyte.kernels.hopper.w4a8_fp8_scales_config import EXPERTS, TABLE, W4A8Fp8ScalesConfig


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


@torch.library.custom_op("halfbyte::w4a8_fp8_scales_experts", mutates_args=(), device_types="cuda")
def w4a8_fp8_scales_experts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    heights: list[int],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`w4a8_fp8_scales_linear` of each expert's rows by its weight, as ``[R, N]``; rows of nobody are not
    written.

    x, x_scale: for the ``R`` rows in the order of :class:`halfbyte.kernels.routes.Routes`. weight, channel_scale, bias:
    each expert's, ``[E, ...]``. runs, tiles: as routed for tiles of these heights.
    """
    out = x.new_empty((x.shape[0], channel_scale.shape[1]), dtype=out_dtype)
    if x.shape[0]:
        for height, of_height in of_heights(runs, tiles, heights, x.shape[0], weight.shape[0]):
            config = choose(EXPERTS, height, of_height, weight, x.shape[1], FORMAT)
            run_w4a8_fp8_scales(config, x, x_scale, weight, channel_scale, bias, out, of_height)
    return out


@w4a8_fp8_scales_experts.register_fake
def _(x, x_scale, weight, channel_scale, bias, runs, tiles, heights, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], channel_scale.shape[1]), dtype=out_dtype)


def run_w4a8_fp8_scales(
    config: W4A8Fp8ScalesConfig,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    runs: Runs | None = None,
) -> None:
    """:func:`w4a8_fp8_scales_linear` cut as ``config`` says, into ``out``; with ``runs`` one tile height of
    :func:`w4a8_fp8_scales_experts`. Errors: operands of another layout.
    """
    tokens, inputs = x.shape
    features = feature_shape(weight, out, runs)
    require(
        "w4a8_fp8_scales_linear",
        (x.dtype == torch.float8_e4m3fn and x.is_contiguous(), "x must be contiguous float8_e4m3fn", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        of_tokens("x_scale", x_scale, torch.float32, tokens),
        of_features("channel_scale", channel_scale, torch.float32, features, out),
        packed(weight, x, features, FORMAT),
        of_features("bias", bias, out.dtype, features, out),
        written(out),
    )
    for linear, (scales, biases) in launches(config, FORMAT, x, weight, out, (channel_scale, bias), runs):
        source = w4a8_fp8_scales_source(linear.config, out.dtype)
        linear.launch(source, linear.weight, scales, x_scale, biases, linear.out)


@cache
def w4a8_fp8_scales_source(config: W4A8Fp8ScalesConfig, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration."""
    defines = {**config.defines(FORMAT), "Out": NAMES[out_dtype]}
    return Source.of("w4a8_fp8_scales.cu", "w4a8_fp8_scales", defines, (config.tokens, "e4m3", "mma"))
