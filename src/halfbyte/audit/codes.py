"""The codes of an element type as tables: what each stands for, and which reals round to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from halfbyte.audit.elements import float_table
from halfbyte.formats.spec import INTEGER_BITS


@dataclass(frozen=True)
class CodeTable:
    """Indexed by the stored code (uint8), float32 each.

    value: what the code stands for, NaN where no such code may be stored.
    low, high: the reals that have no nearer code; infinite at the ends, where values saturate.
    partial: some codes may not be stored.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    integer: bool
    partial: bool

    def value_of(self, codes: np.ndarray) -> np.ndarray:
        """float32 values in the shape of ``codes``."""
        return lookup(self.value, codes)


@lru_cache(maxsize=32)
def code_table(element: str, signed_bytes: bool = False) -> CodeTable:
    """Codes of ``element``. Integers count from ``-2**(bits-1)`` upwards as code 0, 1, ...

    signed_bytes: integers are two's complement bytes instead; bytes outside their range are NaN.
    """
    if element not in INTEGER_BITS:
        table = float_table(element)
        return _with_bounds(table, integer=False)
    half = 1 << (INTEGER_BITS[element] - 1)
    if not signed_bytes:
        return _with_bounds(np.arange(-half, half, dtype=np.float32), integer=True)
    integers = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    allowed = (integers >= -half) & (integers < half)
    return _with_bounds(np.where(allowed, integers, np.float32(np.nan)), integer=True)


def lookup(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """``table[codes]``, several times as fast; codes beyond the table, which no unpacking gives, would wrap."""
    return np.take(table, codes, mode="wrap")


def _with_bounds(table: np.ndarray, integer: bool) -> CodeTable:
    levels = np.unique(table[np.isfinite(table)])
    middles = (levels[1:] + levels[:-1]) / 2
    place = np.searchsorted(levels, np.where(np.isfinite(table), table, levels[0]))
    low = np.concatenate(([-np.inf], middles))[place].astype(np.float32)
    high = np.concatenate((middles, [np.inf]))[place].astype(np.float32)
    return CodeTable(table, low, high, integer, partial=not np.isfinite(table).all())
