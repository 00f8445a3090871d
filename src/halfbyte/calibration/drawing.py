"""Drawing: all rows of all sources, in an order that a seed decides, few of them in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from halfbyte.calibration.rows import Row
from halfbyte.calibration.sources import Source
from halfbyte.errors import HalfbyteError

ROWS_AT_ONCE = 64


def draw(sources: Sequence[tuple[Path, Source]], seed: int) -> Iterator[Row]:
    """Every row once, except blank ones; every order is equally likely, whichever file a row is in.

    Memory: 8 bytes for each row, and ``ROWS_AT_ONCE`` rows. Errors: those of the sources.
    """
    starts = list(accumulate((len(source) for _, source in sources), initial=0))
    order = torch.randperm(starts[-1], generator=torch.Generator().manual_seed(seed))
    for numbers in order.split(ROWS_AT_ONCE):
        places = [(file := bisect_right(starts, n) - 1, n - starts[file]) for n in numbers.tolist()]
        wanted: dict[int, list[int]] = defaultdict(list)
        for file, row in places:
            wanted[file].append(row)
        found = {file: _read(*sources[file], rows) for file, rows in wanted.items()}
        yield from (found[file][row] for file, row in places if row in found[file])


def _read(path: Path, source: Source, rows: list[int]) -> dict[int, Row]:
    try:
        return source.read(rows)
    except OSError as error:
        raise HalfbyteError(f"{path}: cannot be read ({error.strerror or error})") from None
