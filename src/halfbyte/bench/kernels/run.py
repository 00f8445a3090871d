"""The run: every kernel on every shape and number of rows, in turns, so that all meet the GPU in the same state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from halfbyte.bench.kernels import repack, row_ops
from halfbyte.bench.kernels.contender import Contender, Task
from halfbyte.bench.kernels.operands import Inputs, Operands, Shape
from halfbyte.bench.kernels.peers import Peers
from halfbyte.bench.kernels.request import Request, choose
from halfbyte.bench.kernels.results import Results, figures
from halfbyte.bench.kernels.timing import Replay
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.roofline import Work, ceilings_of

Where = dict[str, Any]

# Products of more rows than this are bound by arithmetic, hence by power.
_SOAKED_ABOVE_ROWS = 256


class Advance(Protocol):
    """Told how many steps are done, and what is at work."""

    def __call__(self, step: float = 1, what: str | None = None) -> None: ...


class _GpuLostError(Exception):
    """A kernel left the GPU in a state in which this process can use it no more."""


@dataclass
class _Attempt:
    failed: bool = False


@dataclass
class _Ready:
    contender: Contender
    task: Task
    error: float
    replay: Replay
    times: list[float] = field(default_factory=list)


def gpu(command: str) -> torch.device:
    """The GPU that ``command`` measures. Errors: there is none."""
    if not torch.cuda.is_available():
        raise HalfbyteError(f"{command} needs a CUDA GPU; torch {torch.__version__} sees none")
    return torch.device("cuda", torch.cuda.current_device())


def compile_all(jobs: Sequence[Callable[[], object]], advance: Advance) -> None:
    """Compilations on all cores. One that fails fails again, and is noted, where what it makes is called."""
    if not jobs:
        return
    advance(0, f"compiling {len(jobs)} kernels of others")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.exception()


class Comparison:
    """One run, planned when it is made. steps: how many its progress counts.

    Errors: no GPU; patterns that mean no kernel; a folder of rivals that is none.
    """

    def __init__(self, request: Request) -> None:
        self._device = gpu("bench kernels")
        self._request = request
        name = torch.cuda.get_device_name(self._device)
        self._ceilings = ceilings_of(name)
        peers = Peers(request.peers)
        self._results = Results(name, peers.versions())
        chosen = choose(request, peers, self._device, self._results)
        contenders = chosen.contenders
        self._linear = [contender for contender in contenders if contender.op not in row_ops.OPS]
        self._row_ops = [contender for contender in contenders if contender.op in row_ops.OPS]
        self._repacked = chosen.repacked
        self._widths = tuple(dict.fromkeys(in_features for _, in_features in request.shapes))
        sizes = len(self._linear) * len(request.shapes) + len(self._row_ops) * len(self._widths)
        self.steps = sizes * len(request.rows) + len(self._repacked) * len(request.shapes)

    def measure(self, advance: Advance) -> Iterator[Results]:
        """Yields all there is so far after each shape, and in the end.

        Kernels that cannot take part or fail are noted, and the others go on. Row: what
        :func:`~halfbyte.bench.kernels.results.figures` says, with ``rel_err`` against float64.
        """
        self._advance = advance
        try:
            self._compile_ahead()
            for shape in self._request.shapes:
                self._measure_shape(shape)
                yield self._results
            for width in self._widths if self._row_ops else ():
                self._measure_width(width)
        except _GpuLostError as error:
            self._results.miss("all that would have followed", str(error))
        yield self._results

    def _compile_ahead(self) -> None:
        """All that can be compiled before operands exist, on all cores."""
        jobs: list[Callable[[], object]] = []
        for contender in self._linear:
            if contender.compile is not None:
                try:
                    jobs += contender.compile(self._request.shapes, self._request.rows)
                except Exception:
                    continue  # what is wrong here shows again, and is noted, when the contender is loaded
        compile_all(jobs, self._advance)

    def _measure_shape(self, shape: Shape) -> None:
        if not self._linear and not self._repacked:
            return
        where = {"N": shape[0], "K": shape[1]}
        with self._noting("all kernels", **where) as attempt:
            operands = Operands(shape, max(self._request.rows), self._device)
        if attempt.failed:
            self._advance(len(self._linear) * len(self._request.rows) + len(self._repacked))
            return
        self._measure_all(self._linear, operands, where)
        for case in self._repacked:
            self._measure_repack(operands, case, {**where, "M": None})

    def _measure_width(self, width: int) -> None:
        where = {"N": None, "K": width}
        with self._noting("all ops on rows", **where) as attempt:
            inputs = Inputs(width, max(self._request.rows), self._device)
        if attempt.failed:
            self._advance(len(self._row_ops) * len(self._request.rows))
            return
        self._measure_all(self._row_ops, inputs, where)

    @torch.no_grad()
    def _measure_all(self, contenders: Sequence[Contender], operands: Inputs, where: Where) -> None:
        loaded: list[tuple[Contender, Callable[[int], Task]]] = []
        for contender in contenders:
            self._advance(0, contender.name)
            with self._noting(contender.name, **_identity(contender), **where) as attempt:
                loaded.append((contender, contender.load(operands)))
            if attempt.failed:
                self._advance(len(self._request.rows))
        for rows in self._request.rows:
            self._measure_rows(loaded, rows, {**where, "M": rows})
        del loaded
        torch.cuda.empty_cache()

    def _measure_rows(
        self, loaded: Sequence[tuple[Contender, Callable[[int], Task]]], rows: int, where: Where
    ) -> None:
        ready: list[_Ready] = []
        for contender, task_for in loaded:
            with self._noting(contender.name, **_identity(contender), **where) as attempt:
                task = task_for(rows)
                error = task.check()
                soak = rows > _SOAKED_ABOVE_ROWS and task.work.operations > 0
                ready.append(_Ready(contender, task, error, Replay(task.calls, soak)))
            if attempt.failed:
                self._advance(1)
        for _ in range(self._request.passes):
            for one in list(ready):
                with self._noting(one.contender.name, **_identity(one.contender), **where) as attempt:
                    one.times.append(one.replay.one_pass())
                if attempt.failed:
                    ready.remove(one)
                self._advance(1 / self._request.passes, one.contender.name)
        for one in ready:
            self._add(
                one.contender.name, {**_identity(one.contender), **where}, one.task.work, one.times, one.error
            )

    @torch.no_grad()
    def _measure_repack(self, operands: Operands, case: repack.Repacking, where: Where) -> None:
        name, scheme = case.kernel.name, case.scheme
        group_size = scheme.weights.group_size
        identity = {"op": repack.OP, "scheme": scheme.name, "group_size": group_size, "inputs": case.inputs}
        with self._noting(name, **identity, **where):
            work, times = repack.measure(operands, case, self._request.passes)
            self._add(name, {**identity, **where}, work, times, 0.0)
        self._advance(1, f"repack for {name}")

    def _add(self, kernel: str, what: Where, work: Work, times: list[float], error: float) -> None:
        numbers = figures(work, times, self._ceilings)
        self._results.rows.append({"kernel": kernel, **what, **numbers, "rel_err": float(f"{error:.3g}")})

    @contextmanager
    def _noting(self, kernel: str, **where: Any) -> Iterator[_Attempt]:
        """Lets nothing of what follows stop the run but a GPU that is lost; whatever it is, it is noted.

        Other people's code runs here, and kernels that may be wrong.
        """
        attempt = _Attempt()
        try:
            yield attempt
        except Exception as error:
            attempt.failed = True
            self._results.miss(kernel, error, **where)
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise _GpuLostError(f"{kernel} left a GPU that this process cannot use: {lost}") from lost


def _identity(contender: Contender) -> Where:
    return {
        "op": contender.op,
        "scheme": contender.scheme,
        "group_size": contender.group_size,
        "inputs": contender.inputs,
    }
