"""Strips of a compact weight as fp32, in as few passes as torch needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from halfbyte.formats.floats import decode_e2m1
from halfbyte.formats.scales import scale_values
from halfbyte.formats.spec import TensorFormat
from halfbyte.kernels.inputs import decode_codes
from halfbyte.kernels.nibbles import e2m1_values
from halfbyte.kernels.storage import strips, unpack_codes


def float_strips(
    tensors: Mapping[str, torch.Tensor], fmt: TensorFormat, in_features: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """``(code - zero_point) * scale * outer_scale`` of a compact weight: rows, and fp32 ``[rows, in]``."""
    for rows, strip in strips(tensors, fmt, in_features):
        yield rows, _scaled(_codes(strip["codes"], fmt, in_features), strip, fmt)


def _scaled(values: torch.Tensor, strip: Mapping[str, torch.Tensor], fmt: TensorFormat) -> torch.Tensor:
    """Codes in fp32 (overwritten) with zero points and scales applied."""
    scales = scale_values(strip["scales"])
    if "outer" in strip:
        scales = scales * strip["outer"]
    if fmt.block_shape is not None:
        tall, wide = fmt.block_shape
        scales = scales.repeat_interleave(tall, 0)[: values.shape[0]]
        if values.shape[1] % wide:
            return values.mul_(scales.repeat_interleave(wide, 1)[:, : values.shape[1]])
    groups = values.view(values.shape[0], scales.shape[1], -1)
    if "zeros" in strip:
        groups.sub_(strip["zeros"].unsqueeze(-1))
    groups.mul_(scales.unsqueeze(-1))
    return values


def _codes(codes: torch.Tensor, fmt: TensorFormat, in_features: int) -> torch.Tensor:
    """Compact codes of some rows, fp32 ``[rows, in]``, new memory."""
    if fmt.element == "e2m1" and codes.device.type == "cpu" and codes.shape[1] != in_features:
        return e2m1_values(codes, in_features)
    codes = unpack_codes(codes, fmt, in_features)
    return decode_e2m1(codes) if fmt.element == "e2m1" else decode_codes(codes)
