"""How the first projections' outputs become the last one's inputs, in an expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ExpertGate:
    """combine: ``[T, 2 * inner]`` (or ``[T, inner]`` without a gate) to ``[T, inner]``.

    interleaved: gate and up values alternate in what ``combine`` takes, instead of lying in halves.
    up_bias: ``[experts, 2 * inner]``, in the order that ``combine`` takes. down_bias: ``[experts, hidden]``.
    activation: where ``combine`` is that of the first half times the second one, its name among
    :data:`halfbyte.kernels.fused.GATES`' values, for kernels that do it.
    """

    combine: Callable[[torch.Tensor], torch.Tensor]
    interleaved: bool = False
    up_bias: nn.Parameter | None = None
    down_bias: nn.Parameter | None = None
    activation: str | None = None
