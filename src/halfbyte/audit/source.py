"""Weights of the checkpoint that a quantized one was made from, rows at a time, wherever they lie in it."""

from __future__ import annotations

import numpy as np

from halfbyte.audit.elements import as_array
from halfbyte.audit.raw import raw_bytes
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.models.layout import ModuleInfo

ROUNDING_UNIT = {"F64": 2.0**-24, "F32": 2.0**-24, "BF16": 2.0**-8, "F16": 2.0**-11}
"""Half of the distance between neighbours of a stored dtype, as a share; F64 goes through float32."""
FLOAT_DTYPES = tuple(ROUNDING_UNIT)


class SourceWeight:
    """The weight ``[out, in]`` of one module of an unquantized checkpoint.

    Rows that lie together in the file are read when they are asked for; a transposed matrix or an expert's is read
    once, in its stored dtype.
    """

    def __init__(self, checkpoint: Checkpoint, module: ModuleInfo) -> None:
        self._checkpoint, self._source = checkpoint, module.source
        self._info = checkpoint.info(module.source.tensor)
        self.shape = module.shape
        self._held: np.ndarray | None = None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start:stop``, float32 ``[stop - start, in]``."""
        first, _, step = self._source.rows or (0, self.shape[0], 1)
        low, high = first + start * step, first + (stop - 1) * step + 1
        if self._source.expert is None and not self._source.transposed:
            raw = raw_bytes(self._checkpoint, self._info.name, (low, high)).reshape(high - low, -1)[::step]
        elif self._source.transposed:
            raw = self._matrix()[:, low:high:step]
            return np.ascontiguousarray(self._floats(np.ascontiguousarray(raw)).T)
        else:
            raw = self._matrix()[low:high:step].reshape(stop - start, -1)
        return self._floats(np.ascontiguousarray(raw))

    def _floats(self, raw: np.ndarray) -> np.ndarray:
        """float32 of ``raw``: ``[a, bytes]`` or ``[a, b, bytes of one]``, as ``[a, b]``."""
        found = as_array(raw.reshape(-1), self._info.dtype)
        return found.reshape(raw.shape[0], -1).astype(np.float32, copy=False)

    def _matrix(self) -> np.ndarray:
        """The bytes of the stored matrix, ``[rows, columns, bytes of one]``."""
        if self._held is None:
            expert = self._source.expert
            rows = None if expert is None else (expert, expert + 1)
            raw = raw_bytes(self._checkpoint, self._info.name, rows)
            self._held = raw.reshape(*self._info.shape[-2:], -1)
        return self._held
