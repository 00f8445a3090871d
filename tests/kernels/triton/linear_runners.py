"""Two ways to run linear layers: on the CPU in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.kernels.triton.linear_cases import Case
from tests.kernels.triton.runners import in_interpreter, poison

Runner = Callable[[Sequence[Case]], list[torch.Tensor]]


def interpreted(cases: Sequence[Case]) -> list[torch.Tensor]:
    """On the CPU."""
    return in_interpreter("linear_interpreter", cases)


def on_gpu(cases: Sequence[Case]) -> list[torch.Tensor]:
    """One after the other, on memory that holds NaN where a kernel writes nothing."""
    results = []
    for case in cases:
        poison(case.x.numel() + case.weight.codes.numel())
        results.append(case.run(torch.device("cuda")))
    return results
