"""Round to nearest, and THE reference meaning of a quantized tensor: what all files and kernels are held to."""

from __future__ import annotations

import torch

from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.parallel import for_each
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.ranges import as_float
from halfbyte.formats.rounding import code_dtype, decode_tiles, encode_tiles_
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling


def quantize(
    weight: torch.Tensor,
    fmt: TensorFormat,
    *,
    ratio: float | torch.Tensor = 1.0,
    elsewhere: float = 0.0,
) -> QuantizedTensor:
    """A weight ``[..., out, in]`` of any float dtype in ``fmt``, rounded to nearest in fp32, ties to even.

    ratio: positive; the share of each tile's range that its scale covers, broadcastable to the scales' shape.
        Values beyond it saturate.
    elsewhere: largest magnitude of other weights that share the outer scale per tensor.
    ``fmt.scale`` must be settled. Scales are rounded to their dtype before codes are chosen, and are finite and
    positive even for tiles of zeros. Leading axes are a stack: each weight is quantized as it would be alone.
    Errors: NaN or Inf (NonFiniteError), shapes that ``fmt`` cannot divide, formats that have no rule.
    """
    return encode(weight, fmt, choose_grid(Ranges.of(weight, fmt, elsewhere), fmt, ratio))


def encode(weight: torch.Tensor, fmt: TensorFormat, grid: Grid) -> QuantizedTensor:
    """A finite weight ``[..., out, in]`` rounded onto a grid that :func:`choose_grid` or an algorithm chose."""
    tiling = Tiling.of(tuple(weight.shape), fmt)
    tiles, tile_grid = tiling.tiles(as_float(weight)), grid.per_tile(tiling)
    codes = torch.empty(tiles.shape, dtype=code_dtype(fmt), device=weight.device)

    def encode_chunk(chunk: tuple[slice, slice]) -> None:
        """All passes over one chunk while it is in the cache."""
        down, rows = chunk
        values = tiles[down, rows].to(torch.float32, copy=True)
        codes[down, rows] = encode_tiles_(values, fmt, tile_grid[down])

    for_each(encode_chunk, tiling.chunks(weight.device), weight.device)
    return QuantizedTensor(fmt, tiling.restore(codes), grid.scales, grid.zero_points, grid.outer_scales)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``(code - zero_point) * scale * outer_scale``, from left to right in fp32, then rounded to ``dtype``.

    Returns: ``[..., out, in]``, the shape of the weight that was quantized. NaN codes and scales show as NaN.
    """
    tiling = Tiling.of(q.shape, q.format)
    tiles, grid = tiling.tiles(q.codes), Grid(q.scales, q.zero_points, q.outer_scales).per_tile(tiling)
    values = torch.empty(tiles.shape, dtype=dtype, device=q.codes.device)

    def decode_chunk(chunk: tuple[slice, slice]) -> None:
        down, rows = chunk
        values[down, rows] = decode_tiles(tiles[down, rows], q.format, grid[down]).to(dtype)

    for_each(decode_chunk, tiling.chunks(q.codes.device), q.codes.device)
    return tiling.restore(values)
