from __future__ import annotations

import threading

import pytest
import torch

from halfbyte.formats.parallel import for_each

CPU = torch.device("cpu")


def test_every_piece_is_seen_once() -> None:
    seen = torch.zeros(100)
    for_each(lambda i: seen[i].add_(1), range(100), CPU)
    assert torch.equal(seen, torch.ones(100))


def test_the_first_error_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        for_each(lambda i: 1 / i, [1, 0, 2], CPU)


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    for_each(lambda i: None, range(4), CPU)
    assert torch.get_num_threads() == before


def test_pieces_may_be_given_from_any_thread() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: for_each(seen.append, range(5), CPU))
    thread.start()
    thread.join()
    assert sorted(seen) == list(range(5))
