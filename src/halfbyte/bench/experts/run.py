"""The run: every kernel on every mixture's products, with the same tokens for the same experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

import torch

from halfbyte.bench.experts import ours, rivals
from halfbyte.bench.experts.block import Block
from halfbyte.bench.experts.contender import Contender, Loaded, relative_error
from halfbyte.bench.experts.mixtures import BLOCK, GEMMS, MIXTURES, ROUTINGS, TOKENS, known
from halfbyte.bench.experts.operands import Stack
from halfbyte.bench.kernels.peers import Peers
from halfbyte.bench.kernels.results import Results
from halfbyte.bench.kernels.run import compile_all, gpu
from halfbyte.bench.kernels.timing import Call, Replay
from halfbyte.errors import HalfbyteError
from halfbyte.matching import matches

_ROUTINGS_A_LOOP = 8
_SOAKED_ABOVE_TOKENS = 256


@dataclass(frozen=True)
class Request:
    """What to measure. kernels: names or shell patterns; empty for all. passes: timings of each; the fastest counts.

    Errors: names that are not known.
    """

    models: Sequence[str] = tuple(MIXTURES)
    gemms: Sequence[str] = GEMMS
    tokens: Sequence[int] = TOKENS
    routings: Sequence[str] = ("uniform",)
    kernels: Sequence[str] = ()
    passes: int = 2
    peers: Path | None = None

    def __post_init__(self) -> None:
        known(self.models, tuple(MIXTURES), "--models")
        known(self.gemms, GEMMS, "--gemms")
        known(self.routings, ROUTINGS, "--routing")


def contenders(request: Request, peers: Peers) -> list[Contender]:
    """Who takes part. Errors: a pattern that means no kernel; the message lists those there are."""
    everyone = [*ours.contenders(), *rivals.contenders(peers)]
    for pattern in request.kernels:
        if not any(matches(contender.name, pattern) for contender in everyone):
            names = ", ".join(contender.name for contender in everyone)
            raise HalfbyteError(f"--kernels {pattern!r}; accepted: {names}")
    if not request.kernels:
        return everyone
    return [c for c in everyone if any(matches(c.name, pattern) for pattern in request.kernels)]


class Comparison:
    """One run, planned when it is made. steps: how many its progress counts. Errors: no GPU; see ``contenders``."""

    def __init__(self, request: Request) -> None:
        self._device = gpu("bench experts")
        self._request = request
        peers = Peers(request.peers)
        self._contenders = contenders(request, peers)
        self._results = Results(torch.cuda.get_device_name(self._device), peers.versions())
        self.steps = len(request.models) * len(request.gemms) * len(self._contenders)

    @torch.no_grad()
    def measure(self, advance: Callable[..., None]) -> Iterator[Results]:
        """Yields all there is so far after each product. What fails is noted, and the others go on."""
        self._compile_ahead(advance)
        for model in self._request.models:
            for gemm in self._request.gemms:
                stack = Stack(MIXTURES[model], "gate-up" if gemm == BLOCK else gemm, self._device)
                for contender in self._contenders:
                    advance(0, f"{model} {gemm} {contender.name}")
                    where = {"model": model, "gemm": gemm}
                    if gemm != BLOCK:
                        self._measure(contender, stack, where)
                    elif contender.name in ours.OURS:
                        self._measure_block(contender, stack, where)
                    advance(1)
                yield self._results

    def _compile_ahead(self, advance: Callable[..., None]) -> None:
        jobs: list[Callable[[], object]] = []
        products = [gemm for gemm in self._request.gemms if gemm != BLOCK]
        for contender in self._contenders:
            for model, gemm in product(self._request.models, products):
                if contender.compile is not None:
                    try:
                        jobs += contender.compile(MIXTURES[model], gemm, self._request.tokens)
                    except Exception:
                        continue  # what is wrong here shows again, and is noted, when the contender is loaded
        compile_all(jobs, advance)

    def _measure_block(self, contender: Contender, stack: Stack, where: dict[str, Any]) -> None:
        try:
            block = Block.load(contender.name, contender.scheme, stack.mixture, self._device)
        except Exception as error:
            self._results.miss(contender.name, error, **where)
            return
        down = Stack(stack.mixture, "down", self._device)
        for routing in self._request.routings:
            for tokens in self._request.tokens:
                here = {**where, "routing": routing, "tokens": tokens}
                try:
                    calls, check = block.calls(tokens, routing, stack)
                    error_found = check()
                    us = self._best(calls, tokens)
                    of_products = [
                        self._timed(loaded, of, routing, tokens)["us"]
                        for loaded, of in ((block.gate_up, stack), (block.down, down))
                    ]
                except Exception as error:
                    self._results.miss(contender.name, error, **here)
                    torch.cuda.synchronize()
                    continue
                numbers = {
                    "us": round(us, 3),
                    "products_us": [round(product, 3) for product in of_products],
                    "over_products": round(us / sum(of_products), 3),
                    "rel_err": float(f"{error_found:.3g}"),
                }
                self._add(contender, stack, here, numbers)
        torch.cuda.empty_cache()

    def _best(self, calls: Sequence[Call], tokens: int) -> float:
        """Microseconds."""
        replay = Replay(calls, soak=tokens > _SOAKED_ABOVE_TOKENS)
        return min(replay.one_pass() for _ in range(self._request.passes))

    def _add(self, contender: Contender, stack: Stack, here: dict[str, Any], numbers: dict[str, Any]) -> None:
        identity = {"kernel": contender.name, "op": "experts", "scheme": contender.scheme}
        sizes = {"E": stack.mixture.experts, "top_k": stack.mixture.top_k}
        shape = {"N": stack.shape[0], "K": stack.shape[1]}
        self._results.rows.append({**identity, **here, **sizes, **shape, **numbers})

    def _measure(self, contender: Contender, stack: Stack, where: dict[str, Any]) -> None:
        try:
            loaded = contender.load(stack)
        except Exception as error:  # other people's code
            self._results.miss(contender.name, error, **where)
            return
        for routing in self._request.routings:
            for tokens in self._request.tokens:
                here = {**where, "routing": routing, "tokens": tokens}
                try:
                    numbers = self._timed(loaded, stack, routing, tokens)
                except Exception as error:
                    self._results.miss(contender.name, error, **here)
                    torch.cuda.synchronize()  # a GPU that is lost ends the run here
                    continue
                self._add(contender, stack, here, numbers)
        torch.cuda.empty_cache()

    def _timed(self, loaded: Loaded, stack: Stack, routing: str, tokens: int) -> dict[str, Any]:
        routings = stack.routings(tokens, routing, _ROUTINGS_A_LOOP)
        fed = [loaded.feed(each) for each in routings]
        room = stack.normal(routings[0].ids.numel(), stack.shape[0])
        room.fill_(torch.nan)
        error = relative_error(loaded.call(loaded.copies[0], fed[0], room), loaded, routings[0])
        calls = [
            partial(loaded.call, loaded.copies[i % len(loaded.copies)], fed[i % len(fed)], room)
            for i in range(lcm(len(loaded.copies), len(fed)))
        ]
        replay = Replay(calls, soak=tokens > _SOAKED_ABOVE_TOKENS)
        times = [replay.one_pass() for _ in range(self._request.passes)]
        touched = sum(each.touched for each in routings) / len(routings)
        nbytes = loaded.nbytes / stack.mixture.experts * touched
        best = min(times)
        operations = 2 * room.numel() * stack.shape[1]
        return {
            "us": round(best, 3),
            "passes": [round(us, 3) for us in times],
            "touched_experts": touched,
            "touched_bytes": round(nbytes),
            "tbps": round(nbytes / best / 1e6, 3),
            "tflops": round(operations / best / 1e6, 1),
            "rel_err": float(f"{error:.3g}"),
        }
