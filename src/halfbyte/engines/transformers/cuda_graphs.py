"""A decoding step as one CUDA graph: launched whole, so that its time is its kernels' and not Python's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from halfbyte.kernels.capture import garbage_kept

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedStep:
    """Launches a graph. It holds the step that the graph was made of, whose memory the graph reads and writes."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``step`` as a graph, or as it is, with one warning that says why, where no graph can be made of it.

    It runs twice before it is captured: what it allocates, compiles and repacks the first time is then in place. The
    random state is left as it was, so that draws are those of steps that were never captured.
    """
    try:
        return CapturedStep(_capture(step, device), step)
    except RuntimeError as error:  # what torch raises for waiting, and CUDA for whatever it cannot record
        _warn(str(error).strip().splitlines()[0])
        return step


def _capture(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(device), _random_state_kept(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            with _waiting_refused():
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with garbage_kept(), torch.cuda.graph(graph):
            step()
    return graph


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    state = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(state, device)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Within it torch raises where it would wait for the device; a capture that fails halfway is worse to leave."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@lru_cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    logger.warning("Decoding runs without a CUDA graph, kernel by kernel: %s", reason)
