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

Figures = Callable[[str, int], dict[str, Any]]
"""A row's numbers for a routing and a number of tokens."""

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
                    if gemm != BLOCK or contender.name in ours.OURS:
                        self._measure(contender, stack, {"model": model, "gemm": gemm})
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

    def _measure(self, contender: Contender, stack: Stack, where: dict[str, Any]) -> None:
        try:
            figures = self._figures_of(contender, stack, where["gemm"])
        except Exception as error:  # other people's code
            self._results.miss(contender.name, error, **where)
            return
        for routing, tokens in product(self._request.routings, self._request.tokens):
            here = {**where, "routing": routing, "tokens": tokens}
            try:
                numbers = figures(routing, tokens)
            except Exception as error:
                self._results.miss(contender.name, error, **here)
                torch.cuda.synchronize()  # a GPU that is lost ends the run here
                continue
            identity = {"kernel": contender.name, "op": "experts", "scheme": contender.scheme}
            sizes = {"E": stack.mixture.experts, "top_k": stack.mixture.top_k}
            shape = {"N": stack.shape[0], "K": stack.shape[1]}
            self._results.rows.append({**identity, **here, **sizes, **shape, **numbers})
        torch.cuda.empty_cache()

    def _figures_of(self, contender: Contender, stack: Stack, gemm: str) -> Figures:
        if gemm != BLOCK:
            return partial(self._timed, contender.load(stack), stack)
        block = Block.load(contender.name, contender.scheme, stack.mixture, self._device)
        return partial(self._timed_block, block, stack, Stack(stack.mixture, "down", self._device))

    def _timed_block(
        self, block: Block, stack: Stack, down: Stack, routing: str, tokens: int
    ) -> dict[str, Any]:
        calls, check = block.calls(tokens, routing, stack)
        error = check()
        us = min(self._passes(calls, tokens))
        of_products = [
            self._timed(loaded, of, routing, tokens)["us"]
            for loaded, of in ((block.gate_up, stack), (block.down, down))
        ]
        return {
            "us": round(us, 3),
            "products_us": of_products,
            "over_products": round(us / sum(of_products), 3),
            "rel_err": float(f"{error:.3g}"),
        }

    def _passes(self, calls: Sequence[Call], tokens: int) -> list[float]:
        """Microseconds of a call, by each pass."""
        replay = Replay(calls, soak=tokens > _SOAKED_ABOVE_TOKENS)
        return [replay.one_pass() for _ in range(self._request.passes)]

    def _timed(self, loaded: Loaded, stack: Stack, routing: str, tokens: int) -> dict[str, Any]:
        routings = stack.routings(tokens, routing, _ROUTINGS_A_LOOP)
        fed = [loaded.feed(each) for each in routings]
        room = stack.normal(routings[0].ids.numel(), stack.shape[0])
        room.fill_(torch.nan)
        error = relative_error(loaded.call(loaded.copies[0], fed[0], room), loaded, routings[0])
        calls: list[Call] = [
            partial(loaded.call, loaded.copies[i % len(loaded.copies)], fed[i % len(fed)], room)
            for i in range(lcm(len(loaded.copies), len(fed)))
        ]
        times = self._passes(calls, tokens)
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
