"""By what the rows of a weight were multiplied before they were rounded, estimated by least squares."""

from __future__ import annotations

import numpy as np

from halfbyte.audit.written import WrittenRows

# Not one row of a model is further off by chance.
_DEVIATIONS = 6.0
# Rounding is not even where codes are not: E2M1's errors correlate with weights by up to 0.3 of their size.
_UNEVEN = 1 / 3
# Rows with less than this share of their energy in codes that did not saturate use all codes.
_ENOUGH = 0.01


def row_factors(part: WrittenRows, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row, float64 ``[rows]``: the factor, and how far it may be off, as a share of it.

    expected: the same rows as they would have been rounded without factors, float32 ``[rows, in]``.
    Codes at the end of their range are left out: clipped weights would make every factor look too small. Rows that
    are zero say nothing; their factor is one.
    The deviation is that of least squares whose errors need not have one size, as those of 8-bit floats have not, and
    that may hang on a few weights (MacKinnon and White, "Some heteroskedasticity-consistent covariance matrix
    estimators with improved finite sample properties", 1985, HC3).
    """
    meant, written = expected.astype(np.float64), part.values.astype(np.float64)
    counted = meant if part.inner is None else meant * part.inner
    few = _dot(counted, meant) <= _ENOUGH * _dot(meant, meant)
    counted[few] = meant[few]
    energy = _dot(counted, meant)
    silent = (energy == 0) | ~written.any(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(silent, 1.0, _dot(counted, written) / energy)
        left = written - factor[:, None] * meant
        size = np.sqrt(_dot(left * (counted != 0), left) / energy)
        left *= counted / np.maximum(1 - counted * meant / energy[:, None], _ENOUGH)
        deviation = np.sqrt(_dot(left, left)) / energy
        doubt = (_DEVIATIONS * deviation + _UNEVEN * size) / np.abs(factor)
    doubt += part.unit  # a factor near one is lost in rounding, in all weights alike
    return factor, np.where(silent, 0.0, doubt)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.einsum("ij,ij->i", a, b)
    return found
