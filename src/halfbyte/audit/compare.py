"""How far a decoded weight is from its source, and whether that looks like rounding or like damage.

Every algorithm moves weights, so distance alone convicts nobody. But a weight that was rounded to nearest holds the
nearest code everywhere: where most tiles do and a few do not, those few were changed after. And no algorithm
moves all codes of a tile one way by a whole step: then zero points or an offset are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    """Sums over the chunks of one weight."""

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

    def add(self, tiles: Tiles, source: np.ndarray) -> None:
        """Rows of the source, float32 ``[rows, in]``, beside the same rows decoded."""
        self.weights += source.size
        self.source_squares += _squares(source)
        if not np.isfinite(self.source_squares):
            self.source_finite = False
            return
        difference = tiles.weight().reshape(source.shape)
        difference -= source
        self.error_squares += _squares(difference)
        self.largest_error = max(self.largest_error, float(difference.max()), -float(difference.min()))
        self._judge_codes(tiles, source)

    def _judge_codes(self, tiles: Tiles, source: np.ndarray) -> None:
        two_level = tiles.zero is not None and tiles.outer is not None
        wanted = _in_steps(tiles, source, two_level)
        below = tiles.by_tile(np.take(tiles.table.low, tiles.codes))
        below -= wanted
        above = wanted - tiles.by_tile(np.take(tiles.table.high, tiles.codes))
        beyond = np.maximum(below, above, out=below)
        # Integer group scales stand on weights that were rounded once before.
        slack = _EXACT_SLACK + (0.5 / tiles.scale if two_level else 0.0)
        off = beyond > slack
        count = int(np.count_nonzero(off))
        self._tiles += off.shape[0] * off.shape[1]
        self._count_shifted(tiles, wanted)
        if not count:
            return
        self._off += count
        self._tiles_off += int(np.count_nonzero(off.any(axis=2)))
        if self._first_off is None:
            self._first_off = _place(tiles, off)
        far = off if two_level else off & (beyond > slack + np.abs(wanted) * _BF16_SLACK)
        self._far_off += int(np.count_nonzero(far))
        if self._first_far is None and far.any():
            self._first_far = _place(tiles, far)

    def _count_shifted(self, tiles: Tiles, wanted: np.ndarray) -> None:
        if not tiles.table.integer or tiles.width < _SHIFT_WIDTH:
            return
        steps = wanted - tiles.by_tile(tiles.table.value_of(tiles.codes))
        shift = np.clip(steps, -1.5, 1.5, out=steps).mean(axis=2)
        self._tiles_shifted += int(np.count_nonzero(np.abs(shift) > _SHIFTED))

    def damage(self) -> str | None:
        """Why the codes cannot be what an algorithm made of this source; none if they can."""
        if self._tiles and self._tiles_shifted * 2 > self._tiles:
            return f"{self._tiles_shifted} of {self._tiles} tiles are a whole step off in one direction"
        exact = self._off <= _EXACT_SHARE * self.weights
        count, first = (self._off, self._first_off) if exact else (self._far_off, self._first_far)
        rounded_to_nearest = self._tiles_off * 2 <= self._tiles
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
            wanted = tiles.by_tile(source) / (
                tiles.scale if tiles.outer is None else tiles.scale * tiles.outer
            )
    if tiles.zero is not None:
        wanted += tiles.zero
    return wanted


def _place(tiles: Tiles, where: np.ndarray) -> tuple[int, int]:
    row, column = np.unravel_index(int(where.argmax()), tiles.codes.shape)
    return tiles.start + int(row), int(column)


def _squares(values: np.ndarray) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))
