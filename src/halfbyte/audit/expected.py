"""What a weight of the source is once scales were moved into it and out of it: what was rounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfbyte.audit.column_factors import ColumnFactors
from halfbyte.audit.source import SourceWeight


@dataclass(frozen=True)
class ChannelScales:
    """The scales of one fold, float32 ``[channels]``; producers were divided by them, consumers multiplied.

    doubt: how far each may be off, as a share of it; 0 where it is known exactly.
    """

    values: np.ndarray
    doubt: np.ndarray


@dataclass(frozen=True)
class Factors:
    """What a weight ``[out, in]`` of the source was multiplied with: ``rows`` float32 ``[out]``, ``columns`` ``[in]``.

    row_doubt, column_doubt: how far these may be off, as a share. moves: how many folds changed the weight.
    """

    rows: np.ndarray
    columns: np.ndarray
    row_doubt: np.ndarray
    column_doubt: np.ndarray
    moves: int = 0

    @staticmethod
    def ones(shape: tuple[int, int]) -> Factors:
        """A weight that nothing was moved into."""
        (rows, columns), one, zero = shape, np.float32(1), np.float32(0)
        return Factors(
            np.broadcast_to(one, rows),
            np.broadcast_to(one, columns),
            np.broadcast_to(zero, rows),
            np.broadcast_to(zero, columns),
        )

    def read(self, scales: ChannelScales, width: int, repeats: int) -> Factors:
        """After a fold whose channels the columns read, ``[channels / width, repeats, width]``."""

        def spread(channels: np.ndarray) -> np.ndarray:
            return np.repeat(channels.reshape(-1, 1, width), repeats, axis=1).reshape(-1)

        columns = self.columns * spread(scales.values)
        doubt = self.column_doubt + spread(scales.doubt)
        return Factors(self.rows, columns, self.row_doubt, doubt, self.moves + 1)

    def put_out(self, scales: ChannelScales, index: np.ndarray) -> Factors:
        """After a fold whose channels are the rows ``index``."""
        rows, doubt = self.rows.copy(), self.row_doubt.copy()
        rows[index] /= scales.values
        doubt[index] += scales.doubt
        return Factors(rows, self.columns, doubt, self.column_doubt, self.moves + 1)

    @property
    def read_scales(self) -> bool:
        """Whether any column was multiplied."""
        return bool((self.columns != 1).any())

    @property
    def estimated(self) -> bool:
        """Whether some of them are not known exactly."""
        return bool(self.row_doubt.any() or self.column_doubt.any())


class ExpectedWeight:
    """A weight of the source times its factors, rows at a time."""

    def __init__(self, source: SourceWeight, factors: Factors) -> None:
        self._source, self.factors = source, factors

    @property
    def columns(self) -> ColumnFactors | None:
        """For a comparison of columns, if scales were moved into them."""
        return ColumnFactors(self.factors.column_doubt) if self.factors.read_scales else None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start:stop``, float32 ``[stop - start, in]``."""
        found = self._source.rows(start, stop)
        if self.factors.moves:
            found = found * self.factors.columns
            found *= self.factors.rows[start:stop, None]
        return found

    def doubt(self, start: int, stop: int) -> np.ndarray | None:
        """How far rows ``start:stop`` may be off, as a share of each weight; none where they are exact."""
        if not self.factors.estimated:
            return None
        return self.factors.row_doubt[start:stop, None] + self.factors.column_doubt
