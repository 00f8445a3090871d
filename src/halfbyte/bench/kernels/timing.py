"""Times of GPU work: a CUDA graph of many calls that take turns over copies of their operands, replayed.

A graph leaves out what Python costs and keeps the gaps between launches, as a captured model has them. The copies
together are larger than the second-level cache, so each call reads its weight from memory, as in a model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from halfbyte.kernels.capture import garbage_kept

Call = Callable[[], object]

_REST_SECONDS = 0.3
_SOAK_SECONDS = 0.3
_WAKE_SECONDS = 0.04
_CACHES = 3
_GRAPH_MS = 1.0
_LIGHT_MS, _HEAVY_MS = 20.0, 60.0
_FEWEST_REPLAYS, _MOST_REPLAYS = 10, 100


def rotation(nbytes: int, cache: int) -> int:
    """How many copies of ``nbytes`` exceed three times ``cache`` bytes together; at least two."""
    return max(2, _CACHES * cache // max(nbytes, 1) + 1)


def turns(turn_ms: float) -> int:
    """How often a graph goes through all copies to last a millisecond, so that its own start does not count."""
    return max(1, math.ceil(_GRAPH_MS / turn_ms))


def replays(graph_ms: float, soak: bool) -> int:
    """How many replays of a graph of ``graph_ms`` one pass takes the median of."""
    wanted = math.ceil((_HEAVY_MS if soak else _LIGHT_MS) / graph_ms)
    return min(_MOST_REPLAYS, max(_FEWEST_REPLAYS, wanted))


class Replay:
    """One captured graph, to be timed in as many passes as one likes.

    calls: one per copy of the operands; each is made once outside of the graph first, so that kernels compile
    and workspaces exist. Each pass begins with 0.3 s of rest, so that a kernel does not pay for the heat and the power
    of the one before it, up to 15 % where 256 rows are multiplied. soak: then it runs for 0.3 s, until the power limit
    holds, without which large products look 7 to 20 % too fast.
    """

    def __init__(self, calls: Sequence[Call], soak: bool) -> None:
        self._soak = soak
        self._calls = tuple(calls)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in self._calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        self._turns = 1
        self._graph = self._capture()
        self._graph.replay()
        self._ms = statistics.median(self._replay(3))
        if turns(self._ms) > 1:
            self._turns = turns(self._ms)
            self._graph = self._capture()
            self._ms = statistics.median(self._replay(3))

    def one_pass(self) -> float:
        """Microseconds of one call: the median over the replays of one pass."""
        time.sleep(_REST_SECONDS)
        before = _SOAK_SECONDS if self._soak else _WAKE_SECONDS
        for _ in range(math.ceil(before * 1e3 / self._ms)):
            self._graph.replay()
        times = self._replay(replays(self._ms, self._soak))
        return statistics.median(times) * 1e3 / (self._turns * len(self._calls))

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with garbage_kept(), torch.cuda.graph(graph):
            for _ in range(self._turns):
                for call in self._calls:
                    call()
        return graph

    def _replay(self, count: int) -> list[float]:
        """Milliseconds of each of ``count`` replays in a row."""
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        for start, stop in marks:
            start.record()
            self._graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in marks]
