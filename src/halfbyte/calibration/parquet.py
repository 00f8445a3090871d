"""Parquet files as numbered rows, through pyarrow where that is installed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from halfbyte.calibration.records import ACCEPTED, COLUMNS, meaning
from halfbyte.calibration.rows import Row
from halfbyte.errors import HalfbyteError

ROWS_AT_ONCE = 1024
"""Rows of a row group that are decoded at a time."""


class Parquet:
    """A parquet file; of a row group, only the columns that mean something here are read.

    Errors: no pyarrow, no parquet file, no column that is accepted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            names = file.schema_arrow.names
            groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        if meaning(names) is None:
            raise HalfbyteError(f"{path}: has the columns {', '.join(names)[:200]}; accepted are {ACCEPTED}")
        self._columns = [name for name in names if name in COLUMNS]
        self._starts = list(accumulate(groups, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, rows: Iterable[int]) -> dict[int, Row]:
        wanted: dict[int, list[int]] = defaultdict(list)
        for row in sorted(rows):
            wanted[bisect_right(self._starts, row) - 1].append(row)
        found: dict[int, Row] = {}
        with self._open() as file:
            for group, members in wanted.items():
                found.update(self._read_group(file, group, members))
        return found

    def _read_group(self, file: Any, group: int, rows: list[int]) -> dict[int, Row]:
        found: dict[int, Row] = {}
        start = self._starts[group]
        batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=self._columns)
        try:
            for batch in batches:
                for row in rows:
                    if start <= row < start + batch.num_rows:
                        [columns] = batch.slice(row - start, 1).to_pylist()
                        found[row] = Row(f"{self.path} row {row + 1}", columns)
                start += batch.num_rows
        except (OSError, ValueError) as error:
            raise HalfbyteError(f"{self.path} row group {group + 1}: cannot be read ({error})") from None
        return found

    def _open(self) -> Any:
        try:
            from pyarrow import parquet
        except ImportError:
            raise HalfbyteError(
                f"{self.path}: reading parquet needs pyarrow: pip install halfbyte[parquet]"
            ) from None
        try:
            return parquet.ParquetFile(self.path)
        except ValueError as error:  # pyarrow.ArrowInvalid is one
            raise HalfbyteError(f"{self.path}: is no parquet file ({error})") from None
