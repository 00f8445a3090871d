"""What to measure, and which kernels take part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte.bench.kernels import gemlite, humming, ours, repack, row_ops, sglang, torch_ops, vllm
from halfbyte.bench.kernels.contender import Contender
from halfbyte.bench.kernels.operands import Shape
from halfbyte.bench.kernels.peers import Peers
from halfbyte.bench.kernels.results import Results
from halfbyte.errors import HalfbyteError
from halfbyte.matching import matches

LINEAR_OPS = tuple(ours.SCHEMES)
OPS = (*LINEAR_OPS, *row_ops.OPS, repack.OP)
SHAPES: tuple[Shape, ...] = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192))
ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)


@dataclass(frozen=True)
class Request:
    """What to measure.

    shapes: N, K of weights; ops on rows take the widths K. rows: numbers of input rows M. kernels: names or
    shell patterns; empty for all but those on request. group_size: of INT4 weights, none for one scale per
    channel. passes: timings of each kernel, in turns. peers: folder with rivals that are not installed.
    from_bf16: kernels that take quantized inputs are timed once more from BF16 ones, quantization included.
    """

    shapes: Sequence[Shape] = SHAPES
    rows: Sequence[int] = ROWS
    ops: Sequence[str] = OPS
    kernels: Sequence[str] = ()
    group_size: int | None = 128
    passes: int = 3
    peers: Path | None = None
    from_bf16: bool = False

    def __post_init__(self) -> None:
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise HalfbyteError(f"op {unknown[0]!r} is not known; known ops: {', '.join(OPS)}")


@dataclass(frozen=True)
class Chosen:
    """Who takes part. repacked: for the op ``repack``."""

    contenders: Sequence[Contender]
    repacked: Sequence[repack.Repacking]


def choose(request: Request, peers: Peers, device: torch.device, results: Results) -> Chosen:
    """Who takes part, halfbyte's kernels first; those left out are noted in ``results``.

    Errors: a pattern that means no kernel; the message lists those there are.
    """
    everyone = _everyone(request, peers, device, results)
    repacked = []
    if repack.OP in request.ops:
        repacked = repack.repackings(request.shapes, request.group_size, device)
    names = list(dict.fromkeys([*(c.name for c in everyone), *(case.kernel.name for case in repacked)]))
    for pattern in request.kernels:
        if not any(matches(name, pattern) for name in names):
            known = ", ".join(names) or "there are none"
            raise HalfbyteError(f"kernel {pattern!r} is not among those for these ops: {known}")
    if request.kernels:
        wanted = {name for name in names for pattern in request.kernels if matches(name, pattern)}
        return Chosen(
            [contender for contender in everyone if contender.name in wanted],
            [case for case in repacked if case.kernel.name in wanted],
        )
    for contender in everyone:
        if contender.on_request:
            reason = f"takes part only if it is named: {contender.on_request}"
            results.miss(contender.name, reason, op=contender.op)
    return Chosen([contender for contender in everyone if not contender.on_request], repacked)


def _everyone(request: Request, peers: Peers, device: torch.device, results: Results) -> list[Contender]:
    linear_ops = [op for op in request.ops if op in LINEAR_OPS]
    found: list[Contender] = []
    for op in linear_ops:
        own, without = ours.contenders(op, request.shapes, request.group_size, device, request.from_bf16)
        found += own
        for scheme, reason in without.items():
            results.miss("halfbyte", reason, op=op, scheme=scheme)
    if linear_ops:
        found += torch_ops.contenders()
    for room in (vllm, sglang, humming, gemlite):
        found += [rival for rival in room.contenders(peers, request.group_size) if rival.op in linear_ops]
    found += [contender for contender in row_ops.contenders(peers) if contender.op in request.ops]
    return found
