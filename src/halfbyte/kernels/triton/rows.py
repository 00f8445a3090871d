"""Launching the kernels that take one program per row: what they accept, their outputs and their threads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import triton

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.quantized_inputs import sums_pitch

INT8_GROUP = 128
"""Of the tiles in which rows become INT8, which have no groups."""
LARGEST_TILE = {2: 32768, 4: 16384}
"""Values of a row that a program holds at a time, by bytes of a value. Longer rows are read twice."""


def check_rows(op: str, *inputs: torch.Tensor) -> None:
    """Errors: rows that no kernel here takes, with what is accepted. All inputs must be alike."""
    first = inputs[0]
    if first.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise HalfbyteError(f"{op} runs on a CUDA device, not on {first.device.type}")
    if first.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise HalfbyteError(f"{op} takes bfloat16, float16 or float32, not {_name(first)}")
    for x in inputs:
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise HalfbyteError(
                f"{op} takes inputs of one shape, dtype and device, not {described(first)} with {described(x)}"
            )
        if x.dim() != 2 or x.shape[1] == 0 or (x.stride(1) != 1 and x.shape[1] > 1):
            raise HalfbyteError(
                f"{op} takes rows of at least one value, each contiguous: [M, K] with strides [any, 1], "
                f"not {described(x)} with strides {list(x.stride())}"
            )


def check_fp8(op: str, x: torch.Tensor, group_size: int) -> None:
    """Errors: a group size that no weight has; a GPU that does not know E4M3."""
    if group_size not in (32, 64, 128):
        raise HalfbyteError(f"{op} sums groups of 32, 64 or 128 values, not of {group_size}")
    if x.device.type == "cuda" and _capability(x.device) < (8, 9):
        raise HalfbyteError(f"{op} needs a GPU of compute capability 8.9 or higher, for E4M3")


def fp8_outputs(
    x: torch.Tensor, group_size: int, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for E4M3 codes ``[M, K]``, fp32 scales ``[M, 1]`` and sums ``[M, ceil(K / group_size)]``.

    Rows of sums begin at multiples of 16 bytes, where the copy engine of a Hopper GPU can read them. rows: M, if not
    those of ``x``.
    """
    columns = x.shape[1]
    rows = x.shape[0] if rows is None else rows
    groups = -(-columns // group_size)
    return (
        x.new_empty(rows, columns, dtype=torch.float8_e4m3fn),
        x.new_empty(rows, 1, dtype=torch.float32),
        x.new_empty(rows, sums_pitch(groups), dtype=torch.float32)[:, :groups],
    )


def int8_outputs(x: torch.Tensor, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for INT8 codes ``[M, K]``, fp32 scales ``[M, 1]`` and the rows' sums, int32 ``[M, 1]``.

    rows: M, if not those of ``x``.
    """
    rows = x.shape[0] if rows is None else rows
    return (
        x.new_empty(rows, x.shape[1], dtype=torch.int8),
        x.new_empty(rows, 1, dtype=torch.float32),
        x.new_empty(rows, 1, dtype=torch.int32),
    )


def row_options(x: torch.Tensor, tile: int, programs: int | None = None) -> dict[str, Any]:
    """Launch options and constants for programs that hold ``tile`` values of ``x`` at a time.

    programs: how many there are; one for each row. Where there are some for all multiprocessors and more, a thread
    holds 16 values, and up to 32 of a long row, where the registers of a multiprocessor could otherwise not hold the
    next row too. Of fewer it holds less, so that more of a row is on its way from memory at once (measured on an H200).
    """
    overlap, warp = _overlaps(x.device), 32
    programs = x.shape[0] if programs is None else programs
    if programs > 512:
        warps = max(min(16, tile // (16 * warp)), tile // (32 * warp))
    elif programs > 128:
        warps = max(min(16, tile // (8 * warp)), tile // (32 * warp))
    else:
        warps = min(32, tile // ((4 if programs > 32 else 8) * warp))
    return {
        "num_warps": max(1, warps),
        "PDL": overlap,
        "launch_pdl": overlap,
    }


def tile_for(columns: int, largest: int) -> int:
    """Values for one program: all ``columns``, or up to ``largest``; at least two, which some instructions take."""
    return min(max(2, triton.next_power_of_2(columns)), largest)


def cut_rows(x: torch.Tensor, largest: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid (rows, parts of a row) and ``TILE`` with the options, for programs of up to ``largest`` values."""
    rows, columns = x.shape
    tile = tile_for(columns, largest)
    parts = triton.cdiv(columns, tile)
    return (rows, parts), {"TILE": tile, **row_options(x, tile, rows * parts)}


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Within it kernels run on the device of ``x``, whichever is current."""
    return torch.cuda.device_of(x)


def _overlaps(device: torch.device) -> bool:
    """Whether kernels start before the one in front of them has ended (programmatic dependent launch)."""
    return device.type == "cuda" and _capability(device) >= (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def described(x: torch.Tensor) -> str:
    return f"{_name(x)} {list(x.shape)} on {x.device}"
