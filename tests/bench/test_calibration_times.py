from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from halfbyte.bench.calibration_times import CalibrationTimes
from halfbyte.quantization.walk import Progress


def timed(blocks: int, laps: Iterable[tuple[int, str, float]], end: float) -> CalibrationTimes:
    """Times of a run that says (block, what it is doing) after so many seconds each, and ends after ``end`` more."""
    events = list(laps)

    def clock() -> Iterator[float]:
        now = 100.0
        yield now
        for _, _, seconds in events:
            now += seconds
            yield now
        yield now + end

    ticks = clock()
    times = CalibrationTimes(lambda: next(ticks))
    for block, doing, _ in events:
        times(Progress(0.5, block, blocks, doing))
    times.finish()
    return times


def walk(*scale: float) -> list[tuple[int, str, float]]:
    """Two samples through blocks, whose first seconds are 1, 2, 4, ... times a block's scale."""
    laps = []
    for block, unit in enumerate(scale, 1):
        phases = ["observing", "observing", "quantizing", "running", "running"]
        phases = phases[:3] if block == len(scale) else phases
        laps += [(block, doing, unit * 2**number) for number, doing in enumerate(phases)]
        laps.append((block, "written", unit * 32))
    return laps


def test_time_belongs_to_what_is_said_at_its_end() -> None:
    times = timed(2, walk(1, 100), end=7)
    assert times.start == 1
    assert times.blocks == [
        {"observing": 2, "quantizing": 4, "running": 8 + 16 + 32},
        {"observing": 100 + 200, "quantizing": 400 + 3200, "running": 0},
    ]
    assert times.end == 7
    assert times.total == 1 + 2 + 4 + 56 + 3900 + 7
    assert [times.phase(name) for name in ("observing", "quantizing", "running")] == [302, 3604, 56]


def test_a_model_with_more_blocks_takes_as_much_more_as_blocks_between_others_do() -> None:
    times = timed(4, walk(1000, 1, 3, 1000), end=0)
    between = (1 * 63 + 3 * 63) / 2
    assert times.whole_block == between
    assert times.of_model(10) == pytest.approx(times.total + 6 * between)
    assert times.of_model(4) == times.total


def test_the_first_and_the_last_block_do_not_tell() -> None:
    times = timed(2, walk(1, 1), end=0)
    assert times.whole_block is None
    assert times.of_model(3) is None
    assert times.of_model(2) == times.total


def test_a_run_that_says_nothing_has_a_total() -> None:
    times = timed(1, [], end=5)
    assert (times.start, times.total, times.of_model(0)) == (None, 5, 5)
