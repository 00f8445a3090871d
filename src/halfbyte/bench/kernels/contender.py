"""What takes part in a comparison: a kernel that can be loaded with operands and called for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from halfbyte.bench.kernels.accuracy import poison, relative_error
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.bench.kernels.timing import Call, rotation
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.roofline import Work, linear_work


class MissingError(Exception):
    """Why a kernel cannot take part, in words for the person who asked for it."""


@dataclass(frozen=True)
class Task:
    """One kernel on one shape with one number of rows.

    calls: one per copy of the operands. check: runs the first of them into poisoned memory and returns its
    relative error against float64. work: what it has to do at least.
    """

    calls: Sequence[Call]
    check: Callable[[], float]
    work: Work


Load = Callable[[Any], Callable[[int], Task]]
"""Takes Operands (linear layers) or Inputs, brings copies into the kernel's own form, and returns what makes the
task for M rows. Errors: MissingError; whatever other people's code raises."""


@dataclass(frozen=True)
class Contender:
    """One column of a table.

    op, scheme, group_size: what it computes; group_size is none where scales are not per group.
    inputs: ``bf16``, or ``quantized`` where quantizing them is not part of the time.
    on_request: takes part only if it is named, and why.
    compile: what can be compiled ahead for these shapes and numbers of rows, each piece on any thread.
    """

    name: str
    op: str
    scheme: str
    group_size: int | None
    inputs: Literal["bf16", "quantized"]
    load: Load
    on_request: str | None = None
    compile: Callable[[Sequence[Shape], Sequence[int]], Iterable[Callable[[], object]]] | None = None


def linear(
    operands: Operands,
    *,
    weight: QuantizedTensor | torch.Tensor,
    activations: ActivationFormat | None,
    copies: Sequence[Any],
    call: Callable[[Any, Any, torch.Tensor], torch.Tensor],
    feed: Callable[[torch.Tensor], Any],
    quantized: bool,
) -> Callable[[int], Task]:
    """The tasks of ``y = x @ weight.T`` on ``copies`` of one weight in a kernel's form.

    weight, activations: what the operands mean. feed: makes of x ``[M, in]`` what is given to the kernel, outside
    of the time. call: with a copy, what ``feed`` made, and room for the result that it may use; returns the
    result ``[M, out]``.
    """
    out_features, in_features = weight.shape
    fmt = weight.format if isinstance(weight, QuantizedTensor) else None

    def task(rows: int) -> Task:
        x = operands.x[:rows]
        fed = feed(x)
        room = x.new_empty(rows, out_features)

        def check() -> float:
            room.fill_(torch.nan)
            poison(room.nbytes, room.device)
            return relative_error(call(copies[0], fed, room), x, weight, activations)

        work = linear_work(out_features, in_features, rows, fmt, activations, quantized)
        return Task([partial(call, copy, fed, room) for copy in copies], check, work)

    return task


def clones(tensors: tuple[torch.Tensor | None, ...], cache: int) -> list[tuple[torch.Tensor | None, ...]]:
    """The tensors and as many copies of them as have to take turns with a cache of that many bytes."""
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    more = rotation(nbytes, cache) - 1
    return [tensors, *(tuple(None if t is None else t.clone() for t in tensors) for _ in range(more))]
