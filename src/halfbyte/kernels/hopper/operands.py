"""What the ops have in common: their operands' checks, the kernel's description of a problem, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.blocks import INPUTS, ROWS, BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.config import TileConfig, ceil_div
from halfbyte.kernels.hopper.driver import Launch, function

NAMES = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "Float"}
"""The types of ``hopper.cuh`` by dtype."""
OUTPUTS = (torch.bfloat16, torch.float16)

_RASTER = 16  # tiles of tokens that run together, so that weights are read once for them


class Problem(ctypes.Structure):
    """``struct Problem`` of ``linear.cuh``."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("tokens", "features", "groups", "blocks_k", "rows64", "sums_pitch", "raster")
    ]

    @staticmethod
    def of(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, fmt: BlockFormat, pitch: int = 0
    ) -> Problem:
        groups = ceil_div(x.shape[1], fmt.group_size)
        return Problem(x.shape[0], out.shape[1], groups, weight.shape[1], weight.shape[0], pitch, _RASTER)


def launch(
    source: Source, config: TileConfig, fmt: BlockFormat, out: torch.Tensor, arguments: Sequence[Any]
) -> None:
    """Run the kernel for ``out [M, N]`` on the current stream."""
    shape = Launch(
        (config.blocks(*out.shape), 1, 1), config.threads, config.shared_bytes(fmt), config.cluster
    )
    with torch.cuda.device_of(out):
        function(source, out.device.index)(shape, arguments)


def require(op: str, *conditions: tuple[bool, str, torch.Tensor | None]) -> None:
    """Errors: the first condition that does not hold, with the tensor it is about."""
    for holds, what, tensor in conditions:
        if not holds and tensor is not None:
            raise HalfbyteError(
                f"{op}: {what}, not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )


def is_packed(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor, fmt: BlockFormat) -> bool:
    """Whether ``weight`` has the blocks for these inputs and outputs."""
    blocks = (ceil_div(out.shape[1], ROWS), ceil_div(x.shape[1], INPUTS), fmt.nbytes)
    return weight.dtype == torch.uint8 and weight.shape == blocks and weight.is_contiguous()


def is_bias(bias: torch.Tensor | None, out: torch.Tensor) -> bool:
    """Whether ``bias`` is none or has a number of the right kind for each output feature."""
    if bias is None:
        return True
    return (bias.dtype, bias.shape, bias.device) == (
        out.dtype,
        out.shape[1:],
        out.device,
    ) and bias.is_contiguous()
