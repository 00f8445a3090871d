"""Products of FP8 inputs whose sums stay in the tensor cores: a scale for each output channel and each token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.config import Config
from halfbyte.kernels.hopper.grouped import Runs, feature_shape, launches
from halfbyte.kernels.hopper.operands import of_features, of_tokens, packed, require, written


def run_fp8(
    op: str,
    config: Config,
    fmt: BlockFormat,
    source_of: Callable[[Config, torch.dtype], Source],
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    runs: Runs | None,
) -> None:
    """``channel_scale * (x_scale * (x @ weight.T)) + bias`` cut as ``config`` says, into ``out``; with ``runs`` one
    tile height of experts' rows. source_of: the kernel for a configuration and the dtype of ``out``.

    Errors, which name the op: operands of another layout.
    """
    tokens, inputs = x.shape
    features = feature_shape(weight, out, runs)
    require(
        op,
        (x.dtype == torch.float8_e4m3fn and x.is_contiguous(), "x must be contiguous float8_e4m3fn", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        of_tokens("x_scale", x_scale, torch.float32, tokens),
        of_features("channel_scale", channel_scale, torch.float32, features, out),
        packed(weight, x, features, fmt),
        of_features("bias", bias, out.dtype, features, out),
        written(out),
    )
    for linear, (scales, biases) in launches(config, fmt, x, weight, out, (channel_scale, bias), runs):
        source = source_of(linear.config, out.dtype)  # type: ignore[arg-type]  # a part of the same table's kind
        linear.launch(source, linear.weight, scales, x_scale, biases, linear.out)
