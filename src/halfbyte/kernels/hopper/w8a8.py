"""``halfbyte::w8a8_linear`` and ``w8a8_experts``: FP8 x FP8 on Hopper, a scale for each channel and token."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.fp8_products import run_fp8
from halfbyte.kernels.hopper.grouped import Runs, choose, of_heights
from halfbyte.kernels.hopper.operands import NAMES
from halfbyte.kernels.hopper.w8a8_codes import FORMAT
from halfbyte.kernels.hopper.w8a8_config import EXPERTS, TABLE, W8A8Config


@torch.library.custom_op("halfbyte::w8a8_linear", mutates_args=(), device_types="cuda")
def w8a8_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``channel_scale * (x_scale * (x @ weight.T)) + bias`` as ``[M, N]`` in bfloat16 or float16.

    x: E4M3 codes ``[M, K]``, contiguous. x_scale: fp32 ``[M, 1]``. weight: blocks of ``w8a8_codes``. channel_scale:
    fp32 ``[N]``. bias: in ``out_dtype``.
    """
    out = x.new_empty((x.shape[0], channel_scale.shape[0]), dtype=out_dtype)
    if x.shape[0]:
        config = TABLE.choose(x.shape[0], out.shape[1], x.shape[1], FORMAT)
        run_w8a8(config, x, x_scale, weight, channel_scale, bias, out)
    return out


@w8a8_linear.register_fake
def _(x, x_scale, weight, channel_scale, bias, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], channel_scale.shape[0]), dtype=out_dtype)


@torch.library.custom_op("halfbyte::w8a8_experts", mutates_args=(), device_types="cuda")
def w8a8_experts(
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
    """:func:`w8a8_linear` of each expert's rows by its weight, as ``[R, N]``; rows of nobody are not written.

    x, x_scale: for the ``R`` rows in the order of :class:`halfbyte.kernels.routes.Routes`. weight, channel_scale, bias:
    each expert's, ``[E, ...]``. runs, tiles: as routed for tiles of these heights.
    """
    out = x.new_empty((x.shape[0], channel_scale.shape[1]), dtype=out_dtype)
    if x.shape[0]:
        for height, of_height in of_heights(runs, tiles, heights, x.shape[0], weight.shape[0]):
            config = choose(EXPERTS, height, of_height, weight, x.shape[1], FORMAT)
            run_w8a8(config, x, x_scale, weight, channel_scale, bias, out, of_height)
    return out


@w8a8_experts.register_fake
def _(x, x_scale, weight, channel_scale, bias, runs, tiles, heights, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], channel_scale.shape[1]), dtype=out_dtype)


def run_w8a8(
    config: W8A8Config,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    runs: Runs | None = None,
) -> None:
    """:func:`w8a8_linear` cut as ``config`` says, into ``out``; with ``runs`` one tile height of :func:`w8a8_experts`.
    Errors: operands of another layout.
    """
    operands = (x, x_scale, weight, channel_scale, bias, out)
    run_fp8("w8a8_linear", config, FORMAT, w8a8_source, *operands, runs)


@cache
def w8a8_source(config: W8A8Config, out_dtype: torch.dtype) -> Source:
    """The kernel for one configuration."""
    defines = {**config.defines(FORMAT), "Out": NAMES[out_dtype]}
    return Source.of("w8a8.cu", "w8a8", defines, (config.tokens, "e4m3 from shared memory", "mma_shared"))
