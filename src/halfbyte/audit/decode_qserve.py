"""QServe's weights turned back into numbers, from docs/formats.md alone: an independent decoder, in numpy.

Two levels: ``(code * s2_scales + s2_zeros) * s1_scales``, its inner part a byte; per channel ``code * s1_scales -
s1_szeros``, what QServe's kernel computes. Both are said in the terms of :class:`Tiles`, with zero points that need not
be whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halfbyte.audit.codes import code_table
from halfbyte.audit.decode import Tiles
from halfbyte.audit.modules import StoredModule
from halfbyte.audit.raw import raw_bytes, values
from halfbyte.checkpoint.reader import Checkpoint

_TILE = 32
_TILE_BYTES = _TILE * _TILE // 2
_CHUNK_ELEMENTS = 1 << 17


def _places() -> tuple[np.ndarray, np.ndarray]:
    """Byte of a tile and half of that byte (0: low) of its code ``[row, column]``."""
    row, column = np.arange(_TILE)[:, None], np.arange(_TILE)[None, :]
    lane = row % 8 * 4 + column % 16 // 4
    byte = lane * 16 + column // 16 * 8 + row % 16 // 8 * 4 + column % 4
    return byte, np.broadcast_to(row // 16, byte.shape)


def _group_places(rows: int) -> np.ndarray:
    """Column of a stored ``[groups, out]`` in which each output feature's number lies."""
    feature = np.arange(rows)
    return feature // _TILE * _TILE + feature % 8 * 4 + feature % _TILE // 8


class QServeDecoder:
    """One weight, decoded chunk by chunk, as :class:`halfbyte.audit.decode.WeightDecoder` does it for other forms.

    scales: values of all scale tensors by leaf, in the files' order. fault: after :meth:`chunks`, the rule that was
    broken and how, or none.
    """

    def __init__(self, checkpoint: Checkpoint, module: StoredModule) -> None:
        self._checkpoint, self._module = checkpoint, module
        rows, columns = module.stored.shape
        self.shape = rows, columns
        self.fault: tuple[str, str] | None = None
        self._table = code_table("int4")
        self._channels = self._read("s1_scales").reshape(-1)
        self.scales = {"s1_scales": self._channels}
        if "s2_scales" in module.parts:
            self.scales["s2_scales"] = self._read("s2_scales")

    def chunks(self) -> Iterator[Tiles]:
        """All rows in order."""
        rows, columns = self.shape
        step = max(1, _CHUNK_ELEMENTS // (columns * _TILE)) * _TILE
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            codes = self._codes(start, stop)
            yield self._two_levels(start, codes) if "s2_scales" in self.scales else self._one(start, codes)

    def _read(self, leaf: str) -> np.ndarray:
        return values(self._checkpoint, self._module.parts[leaf].name).astype(np.float32)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """uint8 ``[rows, in]``."""
        columns = self.shape[1]
        raw = raw_bytes(self._checkpoint, self._module.parts["qweight"].name, (start, stop))
        tiles = raw.reshape((stop - start) // _TILE, columns // _TILE, _TILE_BYTES)
        byte, half = _places()
        codes = tiles[:, :, byte] >> (4 * half).astype(np.uint8) & np.uint8(15)
        return np.ascontiguousarray(codes.swapaxes(1, 2)).reshape(stop - start, columns)

    def _one(self, start: int, codes: np.ndarray) -> Tiles:
        span = slice(start, start + len(codes))
        scale = self._channels[span].reshape(-1, 1, 1)
        product = self._read("s1_szeros").reshape(-1)[span].reshape(-1, 1, 1)
        # fp16 rounds it by half its spacing: up to 0.004 of a step for zero point 15.
        doubt = np.spacing(np.abs(product).astype(np.float16)).astype(np.float32) / 2 / scale
        zero = product / scale - np.float32(8)
        return Tiles(start, codes, self._table, scale, zero, None, self.shape[1], doubt)

    def _two_levels(self, start: int, codes: np.ndarray) -> Tiles:
        rows, columns = self.shape
        places = _group_places(rows)[start : start + len(codes)]
        scale, offset = (self._read(leaf)[:, places].T[:, :, None] for leaf in ("s2_scales", "s2_zeros"))
        width = columns // scale.shape[1]
        products = codes.reshape(len(codes), -1, width) * scale
        # The kernel adds bytes modulo 256, so an offset below -128 is stored 256 higher.
        low, high = products.min(2, keepdims=True), products.max(2, keepdims=True)
        offset = np.where((high + offset > 127) & (low + offset - 256 >= -128), offset - 256, offset)
        outside = (low + offset < -128) | (high + offset > 127)
        if self.fault is None and outside.any():
            row, group, _ = (int(index) for index in np.argwhere(outside)[0])
            found = products[row, group].max() + offset[row, group, 0]
            text = f"row {start + row}, group {group}: {found:g} is a value of level one; accepted: those of INT8"
            self.fault = "level one", text
        outer = self._channels[start : start + len(codes)].reshape(-1, 1, 1)
        zero = (-offset / scale - 8).astype(np.float32)
        return Tiles(start, codes, self._table, scale, zero, outer, width)
