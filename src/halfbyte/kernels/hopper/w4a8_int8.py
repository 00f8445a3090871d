"""``halfbyte::w4a8_int8_linear``: INT4, in two levels or per channel, x INT8 on Hopper, sums exact."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.grouped import Runs, choose, feature_shape, launches, of_heights
from halfbyte.kernels.hopper.operands import NAMES, of_features, of_tokens, packed, require, written
from halfbyte.kernels.hopper.w4a8_int8_codes import block_format
from halfbyte.kernels.hopper.w4a8_int8_config import EXPERTS, TABLE, W4A8Int8Config


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


@torch.library.custom_op("halfbyte::w4a8_int8_experts", mutates_args=(), device_types="cuda")
def w4a8_int8_experts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sum: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    channel_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    heights: list[int],
    group_size: int | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`w4a8_int8_linear` of each expert's rows by its weight, as ``[R, N]``; rows of nobody are not written.

    x, x_scale, x_sum: for the ``R`` rows in the order of :class:`halfbyte.kernels.routes.Routes`. weight,
    channel_scale, channel_zero, bias: each expert's, ``[E, ...]``. runs, tiles: as routed for tiles of these heights.
    """
    out = x.new_empty((x.shape[0], channel_scale.shape[1]), dtype=out_dtype)
    if x.shape[0]:
        fmt = block_format(group_size)
        for height, of_height in of_heights(runs, tiles, heights, x.shape[0], weight.shape[0]):
            config = choose(EXPERTS, height, of_height, weight, x.shape[1], fmt)
            operands = (x, x_scale, x_sum, weight, channel_scale, channel_zero, bias, out)
            run_w4a8_int8(config, fmt, *operands, of_height)
    return out


@w4a8_int8_experts.register_fake
def _(  # type: ignore[no-untyped-def]
    x, x_scale, x_sum, weight, channel_scale, channel_zero, bias, runs, tiles, heights, group_size, out_dtype
):
    return x.new_empty((x.shape[0], channel_scale.shape[1]), dtype=out_dtype)


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
    runs: Runs | None = None,
) -> None:
    """:func:`w4a8_int8_linear` cut as ``config`` says, into ``out``; with ``runs`` one tile height of
    :func:`w4a8_int8_experts`. Errors: operands of another layout.
    """
    tokens, inputs = x.shape
    features = feature_shape(weight, out, runs)
    require(
        "w4a8_int8_linear",
        (x.dtype == torch.int8 and x.is_contiguous(), "x must be contiguous int8", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        of_tokens("x_scale", x_scale, torch.float32, tokens),
        of_tokens("x_sum", x_sum, torch.int32, tokens),
        of_features("channel_scale", channel_scale, torch.float32, features, out),
        (
            (channel_zero is None) == (fmt.scale is not None),
            "channel_zero must come with whole channels and with these only: weight",
            weight,
        ),
        of_features("channel_zero", channel_zero, torch.int32, features, out),
        packed(weight, x, features, fmt),
        of_features("bias", bias, out.dtype, features, out),
        written(out),
    )
    vectors = (channel_scale, channel_zero, bias)
    for linear, (scales, zeros, biases) in launches(config, fmt, x, weight, out, vectors, runs):
        source = w4a8_int8_source(linear.config, fmt, out.dtype)
        linear.launch(source, linear.weight, scales, zeros, x_scale, x_sum, biases, linear.out)


@cache
def w4a8_int8_source(config: W4A8Int8Config, fmt: BlockFormat, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration."""
    defines = {
        **config.defines(fmt),
        "Total": "int",
        "Out": NAMES[out_dtype],
    }
    return Source.of("w4a8_int8.cu", "w4a8_int8", defines, (config.tokens, "u8", "mma"))
