"""Stored weights turned back into numbers, rows at a time, from the format definitions alone.

An independent decoder: it shares no code with ``formats/`` or with the decoders of ``checkpoint/``, so that one
mistake cannot hide in both. Sources: compressed-tensors 0.17's format definitions, docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from halfbyte.audit.codes import CodeTable, code_table
from halfbyte.audit.elements import float_table, padding_is_zero, unpack_nibbles, unpack_words
from halfbyte.audit.modules import StoredModule
from halfbyte.audit.raw import raw_bytes, values
from halfbyte.audit.stored import QSERVE_LAYOUT, W4AFP8_LAYOUT
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.formats.spec import TensorFormat

DECODED_LAYOUTS = frozenset(
    {
        *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "fp8", "fp8-block"),
        *("mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "two-level-pack-quantized"),
        *(QSERVE_LAYOUT, W4AFP8_LAYOUT),
    }
)
# A chunk goes through a dozen passes, so it should stay in the cache.
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Tiles:
    """Some rows of a weight: ``codes`` ``[rows, in]`` and what they are multiplied with.

    A row falls into ``n`` tiles of equal width that share their numbers: ``scale``, ``zero`` (none: 0) and
    ``outer`` (none: 1) are float32 and broadcast over ``[rows, n, width]``. A weight is
    ``(value - zero) * scale * outer``.
    zero_doubt: by which share of a step ``zero`` was rounded after codes were chosen, broadcast as it is.
    """

    start: int
    codes: np.ndarray
    table: CodeTable
    scale: np.ndarray
    zero: np.ndarray | None
    outer: np.ndarray | None
    width: int
    zero_doubt: np.ndarray | float = 0.0

    def by_tile(self, rows: np.ndarray) -> np.ndarray:
        """``[rows, in]`` as ``[rows, n, width]``."""
        return rows.reshape(rows.shape[0], -1, self.width)

    def forbidden(self) -> tuple[int, int] | None:
        """Row and column of the first code that stands for no finite number (NaN bytes of E4M3, ...), or none."""
        if not self.table.partial:
            return None
        bad = ~np.isfinite(self.table.value_of(self.codes))
        if not bad.any():
            return None
        return self.place(int(bad.argmax()))

    def place(self, number: int) -> tuple[int, int]:
        """Row and column in the whole weight of the chunk's weight with this number."""
        row, column = divmod(number, self.codes.shape[1])
        return self.start + row, column

    @property
    def step(self) -> np.ndarray:
        """What a code of one is worth, in the shape of the scales."""
        return self.scale if self.outer is None else self.scale * self.outer

    def scaled(self, value: np.ndarray) -> np.ndarray:
        """What codes that stand for ``value``, float32 ``[rows, n, width]``, are worth here. May reuse ``value``."""
        found = value if self.zero is None else np.subtract(value, self.zero, out=value)
        found *= self.scale
        if self.outer is not None:
            found *= self.outer
        return found


def undecodable(module: StoredModule) -> str | None:
    """Why values of a quantized weight are not read here, or none."""
    stored = module.stored
    permuted = "weight_g_idx" in module.parts
    if stored.layout in DECODED_LAYOUTS and len(stored.shape) == 2 and not permuted:
        return None
    order = " in permuted groups" if permuted else ""
    return f"{stored.layout} {list(stored.shape)}{order} is not decoded here, so its values are not checked"


def read_scale(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """Values of a stored scale, float32 in its shape; unsigned bytes are powers of two (E8M0)."""
    found = values(checkpoint, info.name)
    return float_table("e8m0")[found] if info.dtype == "U8" else found.astype(np.float32)


class WeightDecoder:
    """One quantized weight of a checkpoint, decoded chunk by chunk. Scales are held, codes are streamed.

    scales: values of all scale tensors by leaf, as they multiply; zero points are not among them.
    """

    def __init__(self, checkpoint: Checkpoint, module: StoredModule) -> None:
        assert module.stored.format is not None
        self._checkpoint, self._module = checkpoint, module
        self._format: TensorFormat = module.stored.format
        self.shape = self._stored_shape()
        self.scales = {leaf: self._multiplier(leaf) for leaf in module.parts if leaf in _SCALES}
        self._outer = self._outer_scale()
        self._zeros = self._zero_points()
        self.padding_is_zero = True
        signed_bytes = (
            module.stored.layout in ("int-quantized", "naive-quantized") and self._format.is_integer
        )
        self._table = code_table(self._format.element, signed_bytes)
        self._main = next(leaf for leaf in ("weight_scale", "weight_scale_inv") if leaf in self.scales)

    @property
    def fault(self) -> tuple[str, str] | None:
        """After :meth:`chunks`: the rule that was broken and how, or none."""
        return None if self.padding_is_zero else ("padding", "bits that belong to no code are not zero")

    def chunks(self) -> Iterator[Tiles]:
        """All rows in order."""
        rows, columns = self.shape
        step = max(1, _CHUNK_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            yield self._tiles(start, min(rows, start + step))

    def _name(self, leaf: str) -> str:
        return self._module.parts[leaf].name

    def _stored_shape(self) -> tuple[int, int]:
        if "weight_shape" in self._module.parts:
            rows, columns = (
                int(size) for size in values(self._checkpoint, self._name("weight_shape")).reshape(-1)
            )
            return rows, columns
        rows, columns = self._module.stored.shape
        return rows, columns

    def _multiplier(self, leaf: str) -> np.ndarray:
        """A scale as what codes are multiplied with: NVFP4's global scale is stored as what they are divided by."""
        found = read_scale(self._checkpoint, self._module.parts[leaf])
        if leaf != "weight_global_scale":
            return found
        with np.errstate(divide="ignore"):
            return np.float32(1) / found

    def _outer_scale(self) -> np.ndarray | None:
        for leaf in ("weight_global_scale", "weight_channel_scale"):
            if leaf in self.scales:
                return self.scales[leaf].reshape(-1, 1, 1)
        return None

    def _zero_points(self) -> np.ndarray | None:
        """float32 ``[out, groups]``, counted as the table counts codes."""
        info = self._module.parts.get("weight_zero_point")
        if info is None:
            return None
        stored = values(self._checkpoint, info.name)
        if info.dtype != "I32":
            return stored.reshape(self.shape[0], -1).astype(np.float32)
        bits = self._format.bits
        codes = unpack_words(np.ascontiguousarray(stored.T), bits, self.shape[0]).T
        return codes.astype(np.float32) - (1 << (bits - 1))

    def _codes(self, start: int, stop: int) -> np.ndarray:
        info = self._module.parts[self._module.stored.codes]
        raw = raw_bytes(self._checkpoint, info.name, (start, stop)).reshape(stop - start, -1)
        if info.dtype == "I32":
            words = raw.view("<i4")
            if not padding_is_zero(words, self._format.bits, self.shape[1]):
                self.padding_is_zero = False
            return unpack_words(words, self._format.bits, self.shape[1])
        if self._format.element == "e2m1":
            return unpack_nibbles(raw)
        if self._module.stored.layout == W4AFP8_LAYOUT:
            # In two's complement; the table counts from the smallest code.
            return unpack_nibbles(raw) ^ np.uint8(8)
        return raw

    def _tiles(self, start: int, stop: int) -> Tiles:
        scale, width = self._tile_scales(start, stop)
        zero, outer = self._zeros, self._outer
        if zero is not None:
            zero = zero[start:stop, :, None]
        if outer is not None and outer.shape[0] > 1:
            outer = outer[start:stop]
        return Tiles(start, self._codes(start, stop), self._table, scale, zero, outer, width)

    def _tile_scales(self, start: int, stop: int) -> tuple[np.ndarray, int]:
        """Scales of the rows, ``[rows or 1, n, 1]``, and the width of a tile."""
        scale, columns = self.scales[self._main], self.shape[1]
        if self._format.granularity == "tensor":
            return scale.reshape(1, 1, 1), columns
        if self._format.granularity != "block":
            scale = scale.reshape(self.shape[0], -1)
            return scale[start:stop, :, None], columns // scale.shape[1]
        assert self._format.block_shape is not None
        height, width = self._format.block_shape
        scale = scale[np.arange(start, stop) // height]
        if columns % width:
            return np.repeat(scale, width, axis=1)[:, :columns, None], 1
        return scale[:, :, None], width


_SCALES = frozenset({"weight_scale", "weight_scale_inv", "weight_global_scale", "weight_channel_scale"})
