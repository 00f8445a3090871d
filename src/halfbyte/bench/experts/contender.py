"""What takes part: a kernel that multiplies each expert's rows by its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.bench.experts.mixtures import Mixture
from halfbyte.bench.experts.operands import Routing, Stack, checked_experts
from halfbyte.bench.kernels.accuracy import exact_inputs, exact_rows, require_finite
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat


@dataclass(frozen=True)
class Loaded:
    """experts: what the weights mean. activations: what x is quantized to, outside of the time. copies: of all weights
    in the kernel's form, to take turns. nbytes: of one of them.

    feed: makes what is given to the kernel for a routing, outside of the time. call: with a copy, what ``feed`` made
    and room ``[R, N]``; returns the results. in_order: whether those are in ``Routing.order``; else in that of choices.
    """

    experts: Sequence[QuantizedTensor | torch.Tensor]
    activations: ActivationFormat | None
    copies: Sequence[Any]
    nbytes: int
    feed: Callable[[Routing], Any]
    call: Callable[[Any, Any, torch.Tensor], torch.Tensor]
    in_order: bool = True


@dataclass(frozen=True)
class Contender:
    """One column of a table. load: Errors: MissingError; whatever other people's code raises.

    compile: what can be compiled ahead for a mixture's product and numbers of tokens, each piece on any thread.
    """

    name: str
    scheme: str
    load: Callable[[Stack], Loaded]
    compile: Callable[[Mixture, str, Sequence[int]], Iterable[Callable[[], object]]] | None = None


def relative_error(result: torch.Tensor, loaded: Loaded, routing: Routing) -> float:
    """``||result - exact|| / ||exact||`` over the rows of a few experts, in float64.

    Errors: WrongResultError, for any element of ``result``.
    """
    require_finite(result, (routing.ids.numel(), result.shape[1]))
    rows = result if loaded.in_order else result[routing.order]
    off = size = 0.0
    for expert in checked_experts(routing):
        own = slice(*routing.offsets[expert : expert + 2])
        inputs = exact_inputs(routing.rows[own], loaded.activations)
        exact = inputs @ exact_rows(loaded.experts[expert], slice(0, result.shape[1])).T
        off += float((rows[own].double() - exact).square().sum())
        size += float(exact.square().sum())
    return float((off / size) ** 0.5)
