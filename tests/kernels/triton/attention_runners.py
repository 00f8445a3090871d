"""Two ways to run the attention ops: on the CPU in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.kernels.triton.runners import Call, in_interpreter, poison, run

# By call: the op's outputs, then its arguments as it left them.
Results = list[tuple[Any, ...]]
Runner = Callable[[Sequence[Call]], Results]


def interpreted(calls: Sequence[Call]) -> Results:
    """On the CPU."""
    return in_interpreter("attention_interpreter", calls)


def on_gpu(calls: Sequence[Call]) -> Results:
    """One after the other, on memory that holds NaN where an op writes nothing."""
    results = []
    for name, given in calls:
        moved = [value.cuda() if isinstance(value, torch.Tensor) else value for value in given]
        poison(moved[0].numel() * 32)
        everything = (*run(name, *moved), *moved)
        results.append(tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in everything))
    return results
