"""``halfbyte::w4a16_linear``: INT4 weights x BF16 or FP16 activations on Hopper."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.grouped import Runs, choose, feature_shape, launches, of_heights
from halfbyte.kernels.hopper.operands import NAMES, OUTPUTS, of_features, packed, require, written
from halfbyte.kernels.hopper.w4a16_config import W4A16Config, experts_table_for, table_for


def block_format(group_size: int, scale: torch.dtype, zero_points: bool, dtype: torch.dtype) -> BlockFormat:
    """Blocks of :mod:`w4a16_codes` for activations of ``dtype``."""
    return BlockFormat(group_size, scale, dtype if zero_points else None)


@torch.library.custom_op("halfbyte::w4a16_linear", mutates_args=(), device_types="cuda")
def w4a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zero_points: bool,
) -> torch.Tensor:
    """``x @ weight.T + bias`` as ``[M, out_features]`` in the dtype of ``x``, bfloat16 or float16.

    x: ``[M, K]``, contiguous. weight: blocks with ``w4a16_codes``, groups of ``group_size`` inputs (32, 64, 128; a
    scale per channel is repeated), scales in ``scale_dtype`` and zero points or none. bias: in the dtype of ``x``.

    Group scales are exact, applied to fp32 sums. But where scales and ``x`` are bfloat16, each weight is rounded to
    bfloat16 once for many tokens: as ``w4a16_config.ROUNDED`` says, for 65 to 128 tokens where features are more than
    16,896, for 129 to 256 more than 25,344, for 257 to 1,024 more than 6,144, and for any more tokens.
    """
    out = x.new_empty((x.shape[0], out_features))
    if x.shape[0]:
        fmt = block_format(group_size, scale_dtype, zero_points, x.dtype)
        config = table_for(fmt, x.dtype).choose(x.shape[0], out_features, x.shape[1], fmt)
        run_w4a16(config, fmt, x, weight, bias, out)
    return out


@w4a16_linear.register_fake
def _(x, weight, bias, out_features, group_size, scale_dtype, zero_points):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], out_features))


@torch.library.custom_op("halfbyte::w4a16_experts", mutates_args=(), device_types="cuda")
def w4a16_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    heights: list[int],
    out_features: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zero_points: bool,
) -> torch.Tensor:
    """:func:`w4a16_linear` of each expert's rows by its weight, as ``[R, out_features]``, scales exact; rows of nobody
    are not written.

    x: ``R`` rows in the order of :class:`halfbyte.kernels.routes.Routes`. weight, bias: each expert's, ``[E, ...]``.
    runs, tiles: as routed for tiles of these heights.
    """
    out = x.new_empty((x.shape[0], out_features))
    if x.shape[0]:
        fmt = block_format(group_size, scale_dtype, zero_points, x.dtype)
        table = experts_table_for(fmt, x.dtype)
        for height, of_height in of_heights(runs, tiles, heights, x.shape[0], weight.shape[0]):
            config = choose(table, height, of_height, weight, x.shape[1], fmt)
            run_w4a16(config, fmt, x, weight, bias, out, of_height)
    return out


@w4a16_experts.register_fake
def _(x, weight, bias, runs, tiles, heights, out_features, group_size, scale_dtype, zero_points):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], out_features))


def run_w4a16(
    config: W4A16Config,
    fmt: BlockFormat,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    runs: Runs | None = None,
) -> None:
    """:func:`w4a16_linear` cut as ``config`` says, into ``out``; with ``runs`` one tile height of
    :func:`w4a16_experts`. Errors: operands of another dtype or layout.
    """
    inputs = x.shape[1]
    features = feature_shape(weight, out, runs)
    require(
        "w4a16_linear",
        (x.dtype in OUTPUTS and x.is_contiguous(), "x must be contiguous bfloat16 or float16", x),
        (inputs % 8 == 0, "x must have a multiple of 8 columns", x),
        packed(weight, x, features, fmt),
        of_features("bias", bias, out.dtype, features, out),
        (out.dtype == x.dtype, "out must be of the dtype of x", out),
        written(out),
    )
    for linear, (biases,) in launches(config, fmt, x, weight, out, (bias,), runs):
        linear.launch(w4a16_source(linear.config, fmt, out.dtype), linear.weight, biases, linear.out)


@cache
def w4a16_source(config: W4A16Config, fmt: BlockFormat, dtype: torch.dtype) -> Source:
    """The kernel for one configuration and kind of weight."""
    assert fmt.scale is not None
    defines = {
        **config.defines(fmt),
        "ROUNDED": int(config.rounded),
        "TIGHT": int(config.tight),
        "Scale": NAMES[fmt.scale],
        "Out": NAMES[dtype],
    }
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    return Source.of("w4a16.cu", "w4a16", defines, (config.columns, kind, "mma"))
