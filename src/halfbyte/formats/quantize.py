"""Round to nearest, and THE reference meaning of a quantized tensor: what all files and kernels are held to."""

from __future__ import annotations

import torch

from halfbyte.formats import qoq
from halfbyte.formats.floats import FLOAT8_DTYPES, decode_element, encode_e2m1
from halfbyte.formats.grid import Grid, Ranges, choose_grid, divisors
from halfbyte.formats.integer import encode_integer_
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.ranges import as_float
from halfbyte.formats.scales import scale_values
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling


def quantize(weight: torch.Tensor, fmt: TensorFormat, *, ratio: float | torch.Tensor = 1.0) -> QuantizedTensor:
    """A weight ``[..., out, in]`` of any float dtype in ``fmt``, rounded to nearest in fp32, ties to even.

    ratio: positive; the share of each tile's range that its scale covers, broadcastable to the scales' shape.
        Values beyond it saturate.
    ``fmt.scale`` must be settled. Scales are rounded to their dtype before codes are chosen, and are finite and
    positive even for tiles of zeros. Leading axes are a stack: each weight is quantized as it would be alone.
    Errors: NaN or Inf (NonFiniteError), shapes that ``fmt`` cannot divide, formats that have no rule.
    """
    grid = choose_grid(Ranges.of(weight, fmt), fmt, ratio)
    return encode(weight, fmt, grid)


def encode(weight: torch.Tensor, fmt: TensorFormat, grid: Grid) -> QuantizedTensor:
    """A finite weight ``[..., out, in]`` rounded onto a grid chosen before, by :func:`choose_grid` or otherwise."""
    tiling = Tiling.of(tuple(weight.shape), fmt)
    tiles = tiling.tiles(as_float(weight))
    two_level = fmt.scale == "int8"
    divisor = tiling.per_tile(scale_values(grid.scales) if two_level else divisors(grid))
    zero_points = None if grid.zero_points is None else tiling.per_tile(grid.zero_points)
    codes = torch.empty(tiles.shape, dtype=_code_dtype(fmt), device=weight.device)
    # One chunk at a time goes through all passes while it is in the cache.
    for down, rows in tiling.chunks():
        values = tiles[down, rows].to(torch.float32, copy=True)
        if two_level:
            assert grid.outer_scales is not None
            qoq.level_one_(values, grid.outer_scales.reshape(-1, 1, 1, 1)[down])
        values.div_(divisor[down])
        if fmt.is_integer:
            values = encode_integer_(values, fmt, None if zero_points is None else zero_points[down])
        elif fmt.element == "e2m1":
            values = encode_e2m1(values)
        else:
            values.clamp_(-fmt.max_value, fmt.max_value)
        codes[down, rows] = values.to(codes.dtype)
    return QuantizedTensor(fmt, tiling.restore(codes), grid.scales, grid.zero_points, grid.outer_scales)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``(code - zero_point) * scale * outer_scale``, from left to right in fp32, then rounded to ``dtype``.

    Returns: ``[..., out, in]``, the shape of the weight that was quantized. NaN codes and scales show as NaN.
    """
    tiling = Tiling.of(q.shape, q.format)
    values = tiling.tiles(decode_element(q.codes, q.format.element))
    if q.zero_points is not None:
        values = values - tiling.per_tile(q.zero_points)
    values = values * tiling.per_tile(scale_values(q.scales))
    if q.outer_scales is not None:
        values = values * tiling.per_tile(q.outer_scales.broadcast_to(q.scales.shape))
    return tiling.restore(values).to(dtype)


def _code_dtype(fmt: TensorFormat) -> torch.dtype:
    if fmt.is_integer:
        return torch.int8
    return FLOAT8_DTYPES.get(fmt.element, torch.uint8)
