"""``halfbyte::w4a8_linear``: INT4 weights x FP8 activations on Hopper, group scales exact."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.config import ceil_div
from halfbyte.kernels.hopper.driver import tensor_map
from halfbyte.kernels.hopper.grouped import Runs, choose, feature_shape, launches, of_heights
from halfbyte.kernels.hopper.operands import NAMES, of_features, of_tokens, packed, require, written
from halfbyte.kernels.hopper.w4a8_codes import block_format
from halfbyte.kernels.hopper.w4a8_config import SUMS_AT_ONCE, W4A8Config, experts_table_for, table_for


@torch.library.custom_op("halfbyte::w4a8_linear", mutates_args=(), device_types="cuda")
def w4a8_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    row_factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    group_size: int,
    zero_points: bool,
    fp16_sums: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``x_scale * (x @ weight.T) + bias`` as ``[M, out_features]`` in bfloat16 or float16.

    x: E4M3 codes ``[M, K]``, contiguous. x_scale: fp32 ``[M, 1]``. x_sums: fp32 ``[M, ceil(K / group_size)]``, each
    token's sum of codes over each group, with rows multiples of 16 bytes apart. weight: blocks with ``w4a8_codes``,
    groups of ``group_size`` inputs (32, 64, 128; a scale per channel is repeated) and zero points or none; scales in
    fp16 with fp32 ``row_factors [out_features]``, or in fp32 without. bias: in ``out_dtype``. fp16_sums: sums may be
    kept in fp16 where that is faster and ``out_dtype`` coarser.
    """
    out = x.new_empty((x.shape[0], out_features), dtype=out_dtype)
    if x.shape[0]:
        fmt = block_format(group_size, row_factors is not None, zero_points)
        table = table_for(out_dtype, x.shape[1], fmt, fp16_sums)
        config = table.choose(x.shape[0], out_features, x.shape[1], fmt)
        run_w4a8(config, fmt, x, x_scale, x_sums, weight, row_factors, bias, out)
    return out


@w4a8_linear.register_fake
def _(  # type: ignore[no-untyped-def]
    x, x_scale, x_sums, weight, row_factors, bias, out_features, group_size, zero_points, fp16_sums, out_dtype
):
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype)


@torch.library.custom_op("halfbyte::w4a8_experts", mutates_args=(), device_types="cuda")
def w4a8_experts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    row_factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    heights: list[int],
    out_features: int,
    group_size: int,
    zero_points: bool,
    fp16_sums: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`w4a8_linear` of each expert's rows by its weight, as ``[R, out_features]``; rows of nobody are not
    written.

    x, x_scale, x_sums: for the ``R`` rows in the order of :class:`halfbyte.kernels.routes.Routes`. weight, row_factors,
    bias: each expert's, ``[E, ...]``. runs, tiles: as routed for tiles of these heights.
    """
    out = x.new_empty((x.shape[0], out_features), dtype=out_dtype)
    if x.shape[0]:
        fmt = block_format(group_size, row_factors is not None, zero_points)
        table = experts_table_for(out_dtype, x.shape[1], fmt, fp16_sums)
        for height, of_height in of_heights(runs, tiles, heights, x.shape[0], weight.shape[0]):
            config = choose(table, height, of_height, weight, x.shape[1], fmt)
            run_w4a8(config, fmt, x, x_scale, x_sums, weight, row_factors, bias, out, of_height)
    return out


@w4a8_experts.register_fake
def _(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    x_sums,
    weight,
    row_factors,
    bias,
    runs,
    tiles,
    heights,
    out_features,
    group_size,
    zero_points,
    fp16_sums,
    out_dtype,
):
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype)


def run_w4a8(
    config: W4A8Config,
    fmt: BlockFormat,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    row_factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    runs: Runs | None = None,
) -> None:
    """:func:`w4a8_linear` cut as ``config`` says, into ``out``; with ``runs`` one tile height of :func:`w4a8_experts`.
    Errors: operands of another dtype or layout.
    """
    tokens, inputs = x.shape
    sums = (tokens, ceil_div(inputs, fmt.group_size))
    features = feature_shape(weight, out, runs)
    require(
        "w4a8_linear",
        (x.dtype == torch.float8_e4m3fn and x.is_contiguous(), "x must be contiguous float8_e4m3fn", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        of_tokens("x_scale", x_scale, torch.float32, tokens),
        (
            x_sums.dtype == torch.float32 and x_sums.shape == sums and _is_copied(x_sums),
            lambda: f"x_sums must be float32 {list(sums)} with contiguous rows, each where 16 bytes begin",
            x_sums,
        ),
        packed(weight, x, features, fmt),
        (
            (row_factors is None) == (fmt.scale != torch.float16),
            "row_factors must come with fp16 scales and only with them: weight",
            weight,
        ),
        of_features("row_factors", row_factors, torch.float32, features, out),
        of_features("bias", bias, out.dtype, features, out),
        written(out),
    )
    for linear, (factors, biases) in launches(config, fmt, x, weight, out, (row_factors, bias), runs):
        box = linear.config.tokens, SUMS_AT_ONCE, SUMS_AT_ONCE * 4
        sums_map = tensor_map(x_sums.data_ptr(), "f32", *x_sums.shape, x_sums.stride(0) * 4, *box)
        source = w4a8_source(linear.config, fmt, out.dtype)
        linear.launch(source, sums_map, linear.weight, x_scale, factors, biases, linear.out)


def _is_copied(sums: torch.Tensor) -> bool:
    """Whether the copy engine can read these rows."""
    return sums.stride(1) == 1 and sums.stride(0) % 4 == 0 and sums.data_ptr() % 16 == 0


@cache
def w4a8_source(config: W4A8Config, fmt: BlockFormat, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration and kind of weight."""
    columns = config.columns
    assert fmt.scale is not None
    defines = {
        **config.defines(fmt),
        "AHEAD": int(config.ahead(fmt)),
        "SUMS": config.sums(fmt),
        "PLAIN": int(config.plain(fmt)),
        "FP16_SUMS": int(config.fp16_sums),
        "NORMALIZED": int(fmt.scale == torch.float16),
        "Scale": NAMES[fmt.scale],
        "Out": NAMES[out_dtype],
    }
    instructions = (
        (columns, "e4m3 in fp16" if config.fp16_sums else "e4m3", "mma"),
        (columns, "tf32", "mma_tf32"),
    )
    return Source.of("w4a8.cu", "w4a8", defines, *instructions)
