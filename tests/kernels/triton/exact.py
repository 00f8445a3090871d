"""fp32 arithmetic in numpy that rounds once, as GPUs do."""

from __future__ import annotations

import numpy as np


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` of fp32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which a second rounding does not see
    (Boldo and Melquiond, IEEE Trans. Comput. 57, 2008).
    """
    product = np.multiply(x, y, dtype=np.float64)
    addend = np.asarray(z, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    away = np.where((error < 0) == (total < 0), 1, -1)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)
