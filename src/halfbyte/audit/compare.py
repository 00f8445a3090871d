"""How far a decoded weight is from its source, and whether that looks like rounding or like damage.

Every algorithm moves weights, so distance alone convicts nobody. But a weight that was rounded to nearest holds the
nearest code everywhere: where most tiles do and a few do not, those few were changed after. And no algorithm
moves all codes of a tile one way by a whole step: then zero points or an offset are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfbyte.audit.codes import lookup
from halfbyte.audit.column_factors import ColumnFactors
from halfbyte.audit.decode import Tiles

# fp32 division leaves this much of a step in doubt.
_EXACT_SLACK = 1e-3
# Tools that divide in bf16 are off by this share of the quotient.
_BF16_SLACK = 2.0**-8
_EXACT_SHARE = 1e-3
_SHIFTED = 0.75
# A mean over fewer weights can reach a whole step by chance.
_SHIFT_WIDTH = 16
# The protective range of two-level weights (QServe, section 4.1).
_LEVEL_ONE_LIMIT = 119


@dataclass
class Comparison:
    """Sums over the chunks of one weight. columns: for a weight whose columns scales were moved into."""

    columns: ColumnFactors | None = None
    source_squares: float = 0.0
    error_squares: float = 0.0
    largest_error: float = 0.0
    weights: int = 0
    source_finite: bool = True
    _tiles: int = 0
    _tiles_off: int = 0
    _tiles_shifted: int = 0
    _off: int = 0
    _far_off: int = 0
    _first_off: tuple[int, int] | None = None
    _first_far: tuple[int, int] | None = None

    @property
    def relative_error(self) -> float:
        """Norm of the difference over the norm of the source; 0 for two zero weights."""
        if not self.error_squares:
            return 0.0
        return (
            float(np.sqrt(self.error_squares / self.source_squares)) if self.source_squares else float("inf")
        )

    def add(self, tiles: Tiles, source: np.ndarray, doubt: np.ndarray | None = None) -> None:
        """Rows of the source, float32 ``[rows, in]``, beside the same rows decoded.

        doubt: how far each of them may be from what was really rounded, as a share of it; none where they are it.
        """
        self.weights += source.size
        self.source_squares += _squares(source)
        if not np.isfinite(self.source_squares):
            self.source_finite = False
            return
        value = tiles.by_tile(tiles.table.value_of(tiles.codes))
        self._judge_codes(tiles, value, source, doubt)
        difference = tiles.scaled(value).reshape(source.shape)
        difference -= source
        if self.columns:
            self.columns.add(difference, source, tiles.step)
        self.error_squares += _squares(difference)
        self.largest_error = max(self.largest_error, float(difference.max()), -float(difference.min()))

    def _judge_codes(
        self, tiles: Tiles, value: np.ndarray, source: np.ndarray, doubt: np.ndarray | None
    ) -> None:
        two_level = tiles.zero is not None and tiles.outer is not None
        wanted = _in_steps(tiles, source, two_level)
        self._tiles += value.shape[0] * value.shape[1]
        # Integer group scales stand on weights that were rounded once before.
        slack = _EXACT_SLACK + tiles.zero_doubt + (0.5 / tiles.scale if two_level else 0.0)
        table = tiles.table
        if table.integer:
            steps = wanted - value
            suspects = np.abs(steps) > 0.5 + slack
            if tiles.width >= _SHIFT_WIDTH:
                shift = np.clip(steps, -1.5, 1.5, out=steps).mean(axis=2)
                self._tiles_shifted += int(np.count_nonzero(np.abs(shift) > _SHIFTED))
        else:
            suspects = wanted < tiles.by_tile(lookup(table.low, tiles.codes)) - slack
            suspects |= wanted > tiles.by_tile(lookup(table.high, tiles.codes)) + slack
        at = np.flatnonzero(suspects)
        if at.size:
            slacks = np.broadcast_to(slack, value.shape).reshape(-1)[at]
            if doubt is not None:
                zero = 0 if tiles.zero is None else tiles.zero
                slacks += np.abs(wanted - zero).reshape(-1)[at] * doubt.reshape(-1)[at]
            self._count_off(tiles, wanted.reshape(-1)[at], slacks, at)

    def _count_off(self, tiles: Tiles, wanted: np.ndarray, slack: np.ndarray, at: np.ndarray) -> None:
        """Weights number ``at`` of the chunk may hold a code that is not the nearest; at the ends codes saturate."""
        codes = tiles.codes.reshape(-1)[at]
        beyond = np.maximum(lookup(tiles.table.low, codes) - wanted, wanted - lookup(tiles.table.high, codes))
        off = beyond > slack
        far = beyond > slack + np.abs(wanted) * _BF16_SLACK
        self._off += int(np.count_nonzero(off))
        self._far_off += int(np.count_nonzero(far))
        self._tiles_off += len(np.unique(at[off] // tiles.width))
        if self._first_off is None and off.any():
            self._first_off = tiles.place(int(at[off][0]))
        if self._first_far is None and far.any():
            self._first_far = tiles.place(int(at[far][0]))

    def damage(self, nearest: bool = True) -> str | None:
        """Why the codes cannot be what an algorithm made of this source; none if they can.

        nearest: whether it may be one that gives the nearest codes.
        """
        if self._tiles and self._tiles_shifted * 2 > self._tiles:
            return f"{self._tiles_shifted} of {self._tiles} tiles are a whole step off in one direction"
        if self.columns and (odd := self.columns.odd(self.relative_error)):
            column, factor = odd
            return (
                f"column {column} is {factor:.3g} times what the scales that moved make of the source's: "
                "it is damaged, or the norm or rows that these were moved out of"
            )
        exact = self._off <= _EXACT_SHARE * self.weights
        count, first = (self._off, self._first_off) if exact else (self._far_off, self._first_far)
        rounded_to_nearest = nearest and self._tiles_off * 2 <= self._tiles
        if count and first and rounded_to_nearest:
            row, column = first
            return (
                f"{count} of {self.weights} codes are not the nearest to the source, while all others are "
                f"(first at row {row}, column {column})"
            )
        return None


def _in_steps(tiles: Tiles, source: np.ndarray, two_level: bool) -> np.ndarray:
    """The source in units of codes, ``[rows, n, width]``: what rounding to the nearest code started from."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if two_level:
            wanted = tiles.by_tile(source) / tiles.outer
            np.clip(wanted, -_LEVEL_ONE_LIMIT, _LEVEL_ONE_LIMIT, out=wanted)
            wanted /= tiles.scale
        else:
            wanted = tiles.by_tile(source) / tiles.step
    if tiles.zero is not None:
        wanted += tiles.zero
    return wanted


def _squares(values: np.ndarray) -> float:
    """Sum of squares; in float64 where float32 overflows, so that only NaN and Inf make it infinite."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
    return total if np.isfinite(total) else float(np.dot(flat.astype(np.float64), flat))
