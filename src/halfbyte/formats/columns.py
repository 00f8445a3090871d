"""Rounding a weight onto its grid a few columns at a time, as algorithms need that change what is left to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import torch

from halfbyte.formats.grid import Grid, TileGrid
from halfbyte.formats.rounding import decode_tiles, encode_tiles_
from halfbyte.formats.scales import scale_values
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.tiles import Tiling


class Columns(Protocol):
    """Some columns of a weight's grid, n of them."""

    def round(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of values (fp32 ``[..., out, n]``, left alone), and what they decode to, fp32 of that shape."""

    def each(self) -> Sequence[Columns]:
        """The columns one by one."""


class Rounding(Protocol):
    """A weight's grid, column by column; ``grid`` is what its codes are stored with."""

    @property
    def grid(self) -> Grid: ...

    def at(self, columns: torch.Tensor | slice) -> Columns:
        """The given columns: int64 ``[n]``, ``[..., n]`` if they differ between members of a stack, or a slice."""


def take_columns(tensor: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns of ``[..., out, in]``, any order, as ``[..., out, n]``: int64 ``[n]``, or ``[..., n]`` per member."""
    if columns.ndim == 1:
        return tensor.index_select(-1, columns)
    return torch.take_along_dim(tensor, columns.unsqueeze(-2), -1)


def put_columns_(tensor: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Puts ``values`` ``[..., out, n]`` into columns of ``[..., out, in]``, named as for :func:`take_columns`."""
    if columns.ndim == 1:
        tensor.index_copy_(-1, columns, values)
    else:
        tensor.scatter_(-1, columns.unsqueeze(-2).expand(values.shape), values)


@dataclass(frozen=True)
class ColumnRounding:
    """Rounds to nearest as :func:`halfbyte.formats.quantize.encode` does, bit for bit, whatever the columns.

    per_row: fp32, each part ``[..., out or 1, tiles or 1]``. tile_of: int64 ``[in]``, a column's tile.
    """

    fmt: TensorFormat
    grid: Grid
    per_row: TileGrid
    tile_of: torch.Tensor

    @classmethod
    def of(cls, fmt: TensorFormat, grid: Grid, shape: Sequence[int]) -> ColumnRounding:
        """For a weight of shape ``[..., out, in]``.

        Errors: a shape that ``fmt`` cannot tile.
        """
        tiling = Tiling.of(tuple(shape), fmt)
        rows, columns = shape[-2:]

        def per_row(part: torch.Tensor) -> torch.Tensor:
            if fmt.block_shape is None:
                return part
            return part.repeat_interleave(fmt.block_shape[0], -2)[..., :rows, :]

        zero_points, outer = grid.zero_points, grid.outer_scales
        return cls(
            fmt,
            grid,
            TileGrid(
                per_row(scale_values(grid.scales)),
                None if zero_points is None else per_row(zero_points.float()),
                None if outer is None else outer.float(),
            ),
            torch.arange(columns, device=grid.scales.device) // tiling.columns,
        )

    def at(self, columns: torch.Tensor | slice) -> GridColumns:
        """See :class:`Rounding`."""
        tiles = self.tile_of[columns]

        def taken(part: torch.Tensor) -> torch.Tensor:
            if part.shape[-1] == 1:
                return part.expand(*part.shape[:-1], tiles.shape[-1])
            return take_columns(part, tiles)

        scales, zero_points = self.per_row.scales, self.per_row.zero_points
        return GridColumns(
            self.fmt,
            TileGrid(
                taken(scales),
                None if zero_points is None else taken(zero_points),
                self.per_row.outer_scales,
            ),
        )

    def round(self, values: torch.Tensor, columns: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of values (fp32 ``[..., out, n]``) that stand in the given columns, and what they decode to, fp32."""
        return self.at(columns).round(values)


@dataclass(frozen=True)
class GridColumns:
    """Columns of a grid, fp32: scales and zero points ``[..., out or 1, n]``, outer scales ``[..., out or 1, 1]``."""

    fmt: TensorFormat
    grid: TileGrid

    def round(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Columns`."""
        codes = encode_tiles_(values.clone(), self.fmt, self.grid)
        return codes, decode_tiles(codes, self.fmt, self.grid)

    def each(self) -> list[GridColumns]:
        """See :class:`Columns`."""
        scales = self.grid.scales.split(1, -1)
        zero_points = repeat(None) if self.grid.zero_points is None else self.grid.zero_points.split(1, -1)
        return [
            GridColumns(self.fmt, TileGrid(scale, zero_point, self.grid.outer_scales))
            for scale, zero_point in zip(scales, zero_points, strict=False)
        ]
