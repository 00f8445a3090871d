"""Rounding tiles onto their grid, and back: the arithmetic of every format, on one chunk of tiles at a time."""

from __future__ import annotations

import torch

from halfbyte.formats import qoq
from halfbyte.formats.floats import FLOAT8_DTYPES, decode_e2m1, encode_e2m1
from halfbyte.formats.grid import TileGrid
from halfbyte.formats.integer import encode_integer_
from halfbyte.formats.spec import TensorFormat


def code_dtype(fmt: TensorFormat) -> torch.dtype:
    """dtype of ``QuantizedTensor.codes``."""
    return torch.int8 if fmt.is_integer else FLOAT8_DTYPES.get(fmt.element, torch.uint8)


def encode_tiles_(values: torch.Tensor, fmt: TensorFormat, grid: TileGrid) -> torch.Tensor:
    """Codes of fp32 tiles ``[down, rows, across, columns]``, which are overwritten."""
    divisor = grid.scales
    if grid.outer_scales is not None:
        if fmt.scale == "int8":
            qoq.level_one_(values, grid.outer_scales)
        else:
            divisor = divisor * grid.outer_scales
    # A division: multiplying by the reciprocal rounds twice and moves ties.
    values.div_(divisor)
    if fmt.is_integer:
        return encode_integer_(values, fmt, grid.zero_points).to(torch.int8)
    if fmt.element == "e2m1":
        return encode_e2m1(values)
    return values.clamp_(-fmt.max_value, fmt.max_value).to(code_dtype(fmt))


def decode_tiles(codes: torch.Tensor, fmt: TensorFormat, grid: TileGrid) -> torch.Tensor:
    """``(code - zero_point) * scale * outer_scale`` of tiles of codes, from left to right in fp32."""
    values = decode_e2m1(codes) if fmt.element == "e2m1" else codes.to(torch.float32)
    if grid.zero_points is not None:
        values.sub_(grid.zero_points)
    values.mul_(grid.scales)
    return values if grid.outer_scales is None else values.mul_(grid.outer_scales)
