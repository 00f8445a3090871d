"""The values of stored scales: their range, and what must never be among them. numpy, no torch."""

from __future__ import annotations

import numpy as np

from halfbyte.audit.elements import STORED_ELEMENTS, float_table
from halfbyte.audit.inspection import ScaleRange
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint

_SEVERAL = 8


def read_scales(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """Values of a scale tensor as stored; 8-bit floats as what they stand for, U8 as powers of two (E8M0)."""
    raw = checkpoint.numpy(info.name)
    element = STORED_ELEMENTS.get(info.dtype, "e8m0" if info.dtype == "U8" else None)
    return float_table(element)[raw] if element else raw


def scale_range(values: np.ndarray) -> ScaleRange | None:
    """Range of the finite values; none if there are none."""
    if values.size == 0:
        return None
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        finite = values[np.isfinite(values)]
        if finite.size == 0:
            return None
        low, high = float(finite.min()), float(finite.max())
    return ScaleRange(low, high)


def scale_faults(values: np.ndarray) -> list[str]:
    """What is wrong with scales, in words: NaN, Inf, zero, negative. Empty when all is well."""
    if values.size == 0:
        return ["no scales"]
    low, high = values.min(), values.max()
    if low > 0 and high < np.inf:  # a NaN anywhere makes both comparisons false
        return []
    counts = {
        "NaN": np.isnan(values),
        "Inf": np.isinf(values),
        "zero": values == 0,
        "negative": values < 0,
    }
    return [
        f"{int(bad.sum())} of {values.size} scales {'are' if bad.sum() > 1 else 'is'} {what} (first at {_first(bad)})"
        for what, bad in counts.items()
        if bad.any()
    ]


def all_equal(values: np.ndarray, dtype: str) -> bool:
    """Whether several scales of a stored ``dtype`` are all the same: trained weights do not do that.

    Scales with few distinct values, such as powers of two, may well agree.
    """
    return (
        dtype in ("BF16", "F16", "F32") and values.size >= _SEVERAL and bool((values == values.flat[0]).all())
    )


def _first(bad: np.ndarray) -> list[int]:
    return [int(index) for index in np.unravel_index(int(bad.argmax()), bad.shape)]
