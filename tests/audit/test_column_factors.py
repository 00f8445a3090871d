from __future__ import annotations

import numpy as np
import pytest

from halfbyte.audit.column_factors import ColumnFactors

ROWS, COLUMNS, STEP = 96, 64, 0.1


def _odd(
    factors: dict[int, float], sizes: dict[int, float], doubt: float = 0.0, error: float = 0.1
) -> tuple[int, float] | None:
    """What is found in normal weights of size 0.3 (or ``sizes``), rounded to steps, whose columns were multiplied."""
    draws = np.random.default_rng(0)
    size = np.full(COLUMNS, 0.3)
    size[list(sizes)] = list(sizes.values())
    expected = (draws.standard_normal((ROWS, COLUMNS)) * size).astype(np.float32)
    column = np.ones(COLUMNS)
    column[list(factors)] = list(factors.values())
    written = (np.round(expected * column / STEP) * STEP).astype(np.float32)
    sums = ColumnFactors(np.full(COLUMNS, doubt))
    step = np.full((1, 4, 1), STEP, np.float32)
    for start in range(0, ROWS, 40):
        rows = slice(start, start + 40)
        sums.add(written[rows] - expected[rows], expected[rows], step)
    return sums.odd(error)


def test_rounding_is_nothing_odd() -> None:
    assert _odd({}, {}) is None


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.6, 4.0])
def test_an_odd_column_is_named(factor: float) -> None:
    found = _odd({7: factor}, {})
    assert found is not None
    assert found[0] == 7
    assert found[1] == pytest.approx(factor, rel=0.05)


def test_the_worst_of_several() -> None:
    found = _odd({7: 1.6, 20: 3.0}, {})
    assert found is not None
    assert found[0] == 20


@pytest.mark.parametrize("factor", [0.85, 1.2])
def test_what_clipping_or_feedback_may_do(factor: float) -> None:
    assert _odd({7: factor}, {}) is None
    assert _odd({7: factor}, {}, error=0.001) is not None


def test_columns_that_round_to_zero_say_nothing() -> None:
    assert _odd({}, {7: 0.01, 8: 0.0}) is None


def test_doubt_is_allowed_for() -> None:
    assert _odd({7: 2.0}, {}, doubt=1.0) is None
