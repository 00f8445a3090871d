"""``halfbyte::w4a8_linear``: INT4 weights x FP8 activations on Hopper, group scales exact."""

from __future__ import annotations

import ctypes

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.driver import Launch, function, pointer, tensor_map
from halfbyte.kernels.hopper.w4a8_config import W4A8Config, choose_config
from halfbyte.kernels.hopper.weight_layout import INPUTS, ROWS, block_bytes

_SCALES = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "Float"}
_OUTPUTS = {torch.bfloat16: "Bf16", torch.float16: "Half"}
_RASTER = 16  # tiles of tokens that run together, so that weights are read once for them


class _Problem(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in ("tokens", "features", "groups", "blocks_k", "rows64", "sums_pitch", "raster")
    ]


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

    x: E4M3 codes ``[M, K]``, contiguous. x_scale: fp32 ``[M, 1]``. x_sums: fp32 ``[ceil(K / group_size),
    ceil4(M)]``, each token's sum of codes over each group. weight: what ``weight_layout.pack_weight`` made, with
    groups of ``group_size`` inputs (32, 64, 128; a scale per channel is repeated), scales in ``scale_dtype`` and
    zero points or none. bias: in ``out_dtype``.
    """
    out = x.new_empty((x.shape[0], out_features), dtype=out_dtype)
    if x.shape[0]:
        config = choose_config(x.shape[0], out_features, x.shape[1], group_size, weight.shape[2])
        run_w4a8(config, x, x_scale, x_sums, weight, bias, out, group_size, scale_dtype, zero_points)
    return out


@w4a8_linear.register_fake
def _(x, x_scale, x_sums, weight, bias, out_features, group_size, scale_dtype, zero_points, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype)


def run_w4a8(
    config: W4A8Config,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
    scale_dtype: torch.dtype,
    zero_points: bool,
) -> None:
    """:func:`w4a8_linear` cut as ``config`` says, into ``out``. Errors: operands of another dtype or layout."""
    tokens, inputs = x.shape
    features = out.shape[1]
    _check(x, x_scale, x_sums, weight, bias, out, group_size)
    problem = _Problem(
        tokens, features, -(-inputs // group_size), weight.shape[1], weight.shape[0], x_sums.shape[1], _RASTER
    )
    launch = Launch(
        (config.blocks(tokens, features), 1, 1),
        config.threads,
        config.shared_bytes(group_size, weight.shape[2]),
        config.cluster,
    )
    x_map = tensor_map(
        x.data_ptr(), "u8", tokens, inputs, inputs, config.tokens // config.share, INPUTS, True
    )
    source = w4a8_source(config, group_size, scale_dtype, zero_points, out.dtype)
    with torch.cuda.device_of(x):
        function(source, x.device.index)(
            launch,
            [x_map, *(pointer(tensor) for tensor in (x_sums, weight, x_scale, bias, out)), problem],
        )


def w4a8_source(
    config: W4A8Config, group_size: int, scale_dtype: torch.dtype, zero_points: bool, out_dtype: torch.dtype
) -> Source:
    """The kernel for one configuration and kind of weight."""
    defines: dict[str, str | int] = {
        "TOKENS": config.tokens,
        "TILE_ROWS": config.rows,
        "SPLIT": config.split,
        "SHARE": config.share,
        "STAGES": config.stages,
        "BLOCKS_PER_SM": config.blocks_per_sm,
        "GROUP_SIZE": group_size,
        "ZERO_POINTS": int(zero_points),
        "SHARED_BYTES": config.shared_bytes(group_size, block_bytes(group_size, scale_dtype, zero_points)),
        "Scale": _SCALES[scale_dtype],
        "Out": _OUTPUTS[out_dtype],
    }
    columns = min(config.tokens, 64)
    return Source.of("w4a8.cu", "w4a8", defines, (columns, "e4m3", "mma"), (columns, "bf16", "mma_bf16"))


def _check(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_sums: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> None:
    tokens, inputs = x.shape
    wanted = (
        (x.dtype == torch.float8_e4m3fn and x.is_contiguous(), "x must be contiguous float8_e4m3fn", x),
        (inputs % 16 == 0, "x must have a multiple of 16 columns", x),
        (
            x_scale.dtype == torch.float32 and x_scale.numel() == tokens and x_scale.is_contiguous(),
            f"x_scale must be contiguous float32 with one number for each of {tokens} tokens",
            x_scale,
        ),
        (
            x_sums.dtype == torch.float32
            and x_sums.shape == (-(-inputs // group_size), -(-tokens // 4) * 4)
            and x_sums.is_contiguous(),
            f"x_sums must be contiguous float32 [{-(-inputs // group_size)}, {-(-tokens // 4) * 4}]",
            x_sums,
        ),
        (
            weight.dtype == torch.uint8
            and weight.shape[:2] == (-(-out.shape[1] // ROWS), -(-inputs // INPUTS))
            and weight.is_contiguous(),
            f"weight must be packed for {out.shape[1]} x {inputs}",
            weight,
        ),
        (
            bias is None
            or (
                (bias.dtype, bias.shape, bias.device) == (out.dtype, out.shape[1:], out.device)
                and bias.is_contiguous()
            ),
            f"bias must be contiguous with {out.shape[1]} numbers of the dtype of out",
            out if bias is None else bias,
        ),
        (out.dtype in _OUTPUTS and out.shape[1] % 8 == 0, "out must be bfloat16 or float16", out),
    )
    for holds, what, tensor in wanted:
        if not holds:
            raise HalfbyteError(
                f"w4a8_linear: {what}, not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
