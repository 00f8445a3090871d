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


def test_a_worker_has_one_torch_thread() -> None:
    seen: list[int] = []
    for _ in range(2):
        for_each(lambda i: seen.append(torch.get_num_threads()), range(8), CPU)
    assert set(seen) == {1}


def test_workers_take_over_inference_mode() -> None:
    with torch.inference_mode():
        made = torch.zeros(4)
        for_each(lambda i: made[i].add_(1), range(4), CPU)
        assert made.sum() == 4
    made = torch.zeros(4)
    for_each(lambda i: made[i].add_(1), range(4), CPU)
    assert not made.is_inference()


def test_pieces_may_be_given_from_any_thread() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: for_each(seen.append, range(5), CPU))
    thread.start()
    thread.join()
    assert sorted(seen) == list(range(5))
