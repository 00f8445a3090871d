"""Tensors that are not quantized and that scales were moved into: one rounding for each move, and nothing else."""

from __future__ import annotations

import numpy as np

from halfbyte.audit.expected import ExpectedWeight, Factors
from halfbyte.audit.raw import values
from halfbyte.audit.source import ROUNDING_UNIT, SourceWeight
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.models.layout import ModuleInfo

_SMALLEST = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149, "F64": 2.0**-149}
# The products themselves, in float32.
_ARITHMETIC = 2.0**-21
_ROWS = 512


def moved_bias(checkpoint: Checkpoint, source: Checkpoint, name: str, factors: Factors) -> str | None:
    """How a bias differs from that of the source times ``factors.rows``; none if roundings explain it."""
    written, before = (values(each, name).astype(np.float32) for each in (checkpoint, source))
    off = _first_off(
        written, before * factors.rows, factors.row_doubt, factors.rows != 1, source.info(name).dtype
    )
    if off is None:
        return None
    found, wanted = written[off], (before * factors.rows)[off]
    return f"element {off} is {found:g}; the source and the scales that moved make it {wanted:g}"


def moved_weight(checkpoint: Checkpoint, info: ModuleInfo, expected: ExpectedWeight) -> str | None:
    """How the weight of a module (``info``: in the source) differs from ``expected``; none if roundings explain it."""
    weight, dtype = SourceWeight(checkpoint, info), checkpoint.info(info.source.tensor).dtype
    for start in range(0, info.out_features, _ROWS):
        stop = min(start + _ROWS, info.out_features)
        written, wanted = weight.rows(start, stop), expected.rows(start, stop)
        doubt, moves = expected.doubt(start, stop), np.full(wanted.shape, expected.factors.moves)
        off = _first_off(written, wanted, np.float32(0) if doubt is None else doubt, moves, dtype)
        if off is not None:
            row, column = divmod(off, info.in_features)
            return (
                f"row {start + row}, column {column} of {info.name} is {written.flat[off]:g}; the source and the "
                f"scales that moved make it {wanted.flat[off]:g}"
            )
    return None


def _first_off(
    written: np.ndarray, wanted: np.ndarray, doubt: np.ndarray | np.float32, moves: np.ndarray, dtype: str
) -> int | None:
    """Number of the first element that ``moves`` roundings to ``dtype`` do not explain."""
    share = (1 + ROUNDING_UNIT[dtype]) ** moves - 1 + np.where(moves, _ARITHMETIC, 0) + doubt
    allowed = np.abs(wanted) * share + moves * _SMALLEST[dtype]
    off = ~(np.abs(written - wanted) <= allowed)
    return int(off.argmax()) if off.any() else None
