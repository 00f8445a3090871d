"""Where the time of a calibrated run goes, from what it says about its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from halfbyte.quantization.walk import Progress

PHASES = ("observing", "quantizing", "running")


@dataclass
class CalibrationTimes:
    """Pass it as ``on_progress`` to a run that begins now, and call :meth:`finish` at its end.

    Time up to an event belongs to the phase that the event names, or to the one before if it names none of
    :data:`PHASES`. So a block's reading is part of its ``observing`` (on a GPU of the ``running`` before), and its
    writing of its ``running``, or of the last block's ``quantizing`` (a GPU goes on with the next block meanwhile).
    What comes before the first event, :attr:`start`, is opening, what is outside the blocks, the samples' embedding,
    and the first block's reading with its first sample. What comes after the last event, :attr:`end`, is the
    checkpoint's finish.
    """

    clock: Callable[[], float] = time.perf_counter
    start: float | None = None
    end: float = 0.0
    blocks: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each phase, for every block."""

    def __post_init__(self) -> None:
        self._last = self.clock()
        self._phase = PHASES[0]

    def __call__(self, progress: Progress) -> None:
        seconds = self._lap()
        if not self.blocks:
            self.blocks = [dict.fromkeys(PHASES, 0.0) for _ in range(progress.blocks)]
        if progress.doing in PHASES:
            self._phase = progress.doing
        if self.start is None:
            self.start = seconds
        else:
            self.blocks[progress.block - 1][self._phase] += seconds

    def finish(self) -> None:
        self.end = self._lap()

    @property
    def total(self) -> float:
        """Seconds from the start to the finish."""
        return (self.start or 0.0) + sum(map(self.block, range(len(self.blocks)))) + self.end

    def phase(self, name: str) -> float:
        """Seconds of one phase in all blocks."""
        return sum(block[name] for block in self.blocks)

    def block(self, index: int) -> float:
        """Seconds of one block, in all phases."""
        return sum(self.blocks[index].values())

    @property
    def whole_block(self) -> float | None:
        """Seconds of a block between others, on average: what one more block would take.

        The first block's reading is not counted with it and the last one is not run once more, so none with fewer
        than three blocks.
        """
        between = [self.block(index) for index in range(1, len(self.blocks) - 1)]
        return sum(between) / len(between) if between else None

    def of_model(self, blocks: int) -> float | None:
        """Seconds of the same run over a model with so many blocks; none where these are too few to tell."""
        more = blocks - len(self.blocks)
        if not more:
            return self.total
        return None if self.whole_block is None else self.total + more * self.whole_block

    def _lap(self) -> float:
        now = self.clock()
        seconds, self._last = now - self._last, now
        return seconds
