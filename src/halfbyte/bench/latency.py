"""End to end: the time to the first token, the time of each one after it, and how much of that is matrix products."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch

from halfbyte.bench.record import Row
from halfbyte.errors import HalfbyteError

_ROUNDS = 3


class Run(Protocol):
    """A batch of prompts in front of a model, its kernels compiled and its graphs captured."""

    def read(self) -> None:
        """The prompts, up to their first new tokens."""
        ...

    def step(self) -> None:
        """One more token each."""
        ...

    def linears(self) -> None:
        """All linear layers that a step runs, and nothing else."""
        ...


class Model(Protocol):
    """A model of one scheme on one device. engine, kernels: what runs it, for the record."""

    engine: str
    device: torch.device

    @property
    def kernels(self) -> str: ...

    def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> Run: ...


def bench_latency(
    build: Callable[[str], Model],
    schemes: Sequence[str],
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
) -> Iterator[Row]:
    """One row for each scheme and batch. build: a model of a scheme's name; one exists at a time.

    ``ttft_ms``: median time from the prompts to their first new tokens. ``tpot_ms``: median time of a step; on a
    GPU between events on it, so that it is the GPU's. ``gemm_ms``: the same for a step's linear layers alone, the
    head included; ``gemm_share`` of a step. ``memory_gb``: the most that was allocated on the GPU.
    Errors: more than the GPU's memory holds.
    """
    for scheme in schemes:
        with _room_for(f"scheme {scheme}"):
            model = build(scheme)
        for batch in batches:
            with _room_for(f"scheme {scheme} with batch {batch}"):
                row = _row(model, scheme, batch, prompt_tokens, new_tokens)
            yield row
        # Models refer to themselves; the next one needs the room.
        del model
        gc.collect()


@contextmanager
def _room_for(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HalfbyteError(f"{what} does not fit into the GPU's memory: {error}") from error


def _row(model: Model, scheme: str, batch: int, prompt_tokens: int, new_tokens: int) -> Row:
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    run = model.run(batch, prompt_tokens, new_tokens)
    firsts, steps = [], []
    for round_ in range(_ROUNDS + 1):
        first = _seconds(run.read, model.device) * 1e3
        times = _laps(run.step, new_tokens - 1, model.device)
        if round_:  # the first one warms up
            firsts.append(first)
            steps += times
    linears = _laps(run.linears, new_tokens - 1, model.device)
    tpot, gemm = statistics.median(steps), statistics.median(linears)
    row: Row = {
        "op": "latency",
        "engine": model.engine,
        "scheme": scheme,
        "kernel": model.kernels,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "ttft_ms": round(statistics.median(firsts), 3),
        "tpot_ms": round(tpot, 4),
        "tokens_per_s": round(batch * 1e3 / tpot, 1),
        "gemm_ms": round(gemm, 4),
        "gemm_share": round(gemm / tpot, 3),
    }
    if on_gpu:
        row["memory_gb"] = round(torch.cuda.max_memory_allocated(model.device) / 1e9, 2)
    return row


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Of one call, until the device is done."""
    _finish(device)
    started = time.perf_counter()
    call()
    _finish(device)
    return time.perf_counter() - started


def _laps(call: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of ``count`` calls in a row; on a GPU, of its own time."""
    if device.type != "cuda":
        return [_seconds(call, device) * 1e3 for _ in range(count)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    _finish(device)
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
