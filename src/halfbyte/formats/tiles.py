"""A weight seen as a grid of tiles, one tile per scale, without moving its elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import TensorFormat

# fp32 elements that one thread works on at a time: they stay in its core's second-level cache.
CPU_CHUNK = 1 << 18
# On other devices: enough that a launch is not what takes the time.
LAUNCH_CHUNK = 1 << 26


@dataclass(frozen=True)
class Tiling:
    """Shape ``[down, rows, across, columns]`` of a tensor whose tile ``[d, :, a, :]`` shares a scale.

    ``down`` also counts the leading axes, so a stack of weights is tiled as its members are.
    padded: rows and columns of one weight, filled up to whole tiles (ragged blocks only).
    """

    shape: tuple[int, ...]
    down: int
    rows: int
    across: int
    columns: int
    padded: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, ...], fmt: TensorFormat) -> Tiling:
        """Tiling of a weight ``[..., out, in]`` in ``fmt``.

        Errors: fewer than two axes, no rows or columns, a group size that does not divide ``in``.
        """
        if len(shape) < 2 or 0 in shape[-2:]:
            raise HalfbyteError(
                f"a weight {list(shape)} cannot be tiled; accepted: [..., out, in], both above 0"
            )
        *lead, down, across = fmt.scale_shape(shape)
        stack = 1
        for size in lead:
            stack *= size
        rows, columns = shape[-2:]
        if fmt.block_shape is not None:
            tile_rows, tile_columns = fmt.block_shape
            padded = (down * tile_rows, across * tile_columns)
        else:
            tile_rows, tile_columns = rows if fmt.granularity == "tensor" else 1, columns // across
            padded = (rows, columns)
        return cls(tuple(shape), stack * down, tile_rows, across, tile_columns, padded)

    def tiles(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as ``[down, rows, across, columns]``: a view where it is contiguous and no block is ragged."""
        rows, columns = self.shape[-2:]
        if (rows, columns) != self.padded:
            padded = tensor.new_zeros(*self.shape[:-2], *self.padded)
            padded[..., :rows, :columns] = tensor
            tensor = padded
        return tensor.reshape(self.down, self.rows, self.across, self.columns)

    def per_tile(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales (or anything shaped like them) as ``[down, 1, across, 1]``, to stand beside :meth:`tiles`."""
        return scales.reshape(self.down, 1, self.across, 1)

    def restore(self, tiles: torch.Tensor) -> torch.Tensor:
        """The tensor ``[..., out, in]`` of its tiles, without padding."""
        rows, columns = self.shape[-2:]
        whole = tiles.reshape(*self.shape[:-2], *self.padded)
        return whole if (rows, columns) == self.padded else whole[..., :rows, :columns].contiguous()

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Slices over ``down`` and ``rows`` of what fits a cache of the CPU, or is worth a launch on another device."""
        row = self.across * self.columns
        chunk = CPU_CHUNK if device.type == "cpu" else LAUNCH_CHUNK
        if self.rows * row <= chunk:
            step = chunk // (self.rows * row)
            for start in range(0, self.down, step):
                yield slice(start, min(start + step, self.down)), slice(0, self.rows)
            return
        step = max(1, chunk // row)
        for down in range(self.down):
            for start in range(0, self.rows, step):
                yield slice(down, down + 1), slice(start, min(start + step, self.rows))

    def bands(self, device: torch.device) -> Iterator[list[tuple[slice, slice]]]:
        """The chunks, those of the same tiles together: what is gathered per tile has one writer."""
        for _, chunks in groupby(self.chunks(device), key=lambda chunk: chunk[0].start):
            yield list(chunks)
