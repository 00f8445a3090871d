"""Independent pieces of work on as many threads as torch would use, each of them with one torch thread.

Elementwise passes over cache-sized pieces are short. Splitting every pass over threads makes each one wait for the
slowest, which costs little on an idle machine and a factor of ten on a busy one; whole pieces never wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def for_each(function: Callable[[Piece], None], pieces: Iterable[Piece], device: torch.device) -> None:
    """Calls ``function`` with every piece, in any order; pieces must not overlap in what they write.

    Off the CPU, or with one torch thread, in turn. Errors: the first one that ``function`` raises.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        for piece in pieces:
            function(piece)
        return
    inference = torch.is_inference_mode_enabled()

    def call(piece: Piece) -> None:
        # Modes belong to a thread; tensors made under the caller's could not be written without it.
        with torch.inference_mode(inference):
            function(piece)

    for _ in _workers(threads).map(call, pieces):
        pass


@lru_cache(maxsize=1)
def _workers(threads: int) -> ThreadPoolExecutor:
    all_started = threading.Barrier(threads + 1)

    def start() -> None:
        # torch sets a thread up at its first use, and would then take back what was set before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="halfbyte", initializer=start)
    for _ in range(threads):
        pool.submit(lambda: None)
    all_started.wait()
    # A thread's setting is also the default of threads and libraries that have none yet: put it back.
    torch.set_num_threads(threads)
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)
