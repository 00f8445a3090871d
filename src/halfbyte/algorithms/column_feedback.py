"""Rounding a few columns one after the other, each one's error passed on to those behind it."""

from __future__ import annotations

import torch

from halfbyte.formats.columns import Columns, GridColumns
from halfbyte.formats.vllm_rounding import VLLM_W4A8, VllmColumns
from halfbyte.kernels.fused import triton_ops


def round_with_feedback(
    columns: Columns, values: torch.Tensor, left: torch.Tensor, shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of n columns, in order, and their errors, fp32: both ``[..., out, n]``.

    values: what is rounded, fp32 ``[..., out, n]``, with the errors of all columns before these; overwritten.
    left: the weights themselves, from which errors are counted; overwritten. shares: fp32 ``[n, n]`` or
    ``[..., n, n]``: above the diagonal what column j passes on of its error to column k.
    """
    found = _on_gpu(columns, values, left, shares) if values.is_cuda else None
    if found is not None:
        return found
    for i, column in enumerate(columns.each()):
        _, decoded = column.round(values[..., i : i + 1])
        error = left[..., i : i + 1].sub_(decoded)
        values[..., i + 1 :].addcmul_(error, shares[..., i : i + 1, i + 1 :])
    return columns.round(values)[0], left


def _on_gpu(
    columns: Columns, values: torch.Tensor, left: torch.Tensor, shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same in one launch; none for numbers that no kernel knows."""
    ops = triton_ops()
    if ops is None:
        return None
    shape = values.shape
    weights = [_members(part, 2).contiguous() for part in (values, left, shares)]
    if isinstance(columns, VllmColumns):
        tables = [_members(part, 3) for part in (columns.numbers, columns.bounds)]
        codes, errors = ops.round_to_numbers_with_feedback(
            weights[0], weights[1], *tables, weights[2], VLLM_W4A8.qmin
        )
    elif isinstance(columns, GridColumns) and columns.fmt.is_integer:
        fmt, grid = columns.fmt, columns.grid
        scales, zero_points, outer = (
            None if part is None else _members(part, 2)
            for part in (grid.scales, grid.zero_points, grid.outer_scales)
        )
        codes, errors = ops.round_integers_with_feedback(
            weights[0],
            weights[1],
            scales,
            zero_points,
            outer,
            weights[2],
            fmt.qmin,
            fmt.qmax,
            fmt.scale == "int8",
        )
    else:
        return None
    return codes.view(shape), errors.view(shape)


def _members(part: torch.Tensor, axes: int) -> torch.Tensor:
    """``part`` with all axes before the last ``axes`` as one."""
    return part.reshape(-1, *part.shape[-axes:])
