"""Python's garbage collector and captures of CUDA graphs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from halfbyte.kernels.capture import garbage_kept


class Cycle:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_goes_before_and_stays_within() -> None:
    before = weakref.ref(Cycle())
    with garbage_kept():
        assert before() is None
        within = weakref.ref(Cycle())
        for _ in range(3 * gc.get_threshold()[0]):
            Cycle()
        assert within() is not None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="within"), garbage_kept():
        raise ValueError("within")
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_graph_that_is_garbage_does_not_break_the_next_capture() -> None:
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    old = Cycle()
    old.graph = torch.cuda.CUDAGraph()  # type: ignore[attr-defined]
    with torch.cuda.graph(old.graph):  # type: ignore[attr-defined]
        x + 1
    del old
    graph = torch.cuda.CUDAGraph()
    with garbage_kept(), torch.cuda.graph(graph):
        garbage = [Cycle() for _ in range(5000)]
        y = x + 2
    del garbage
    graph.replay()
    assert y.tolist() == [3.0] * 8
