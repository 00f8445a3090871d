"""Two ways to run the attention ops: on the CPU in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.kernels.triton.runners import Call, poison, run

# By call: the op's outputs, then its arguments as it left them.
Results = list[tuple[Any, ...]]
Runner = Callable[[Sequence[Call]], Results]


def interpreted(calls: Sequence[Call]) -> Results:
    """All calls in a process of its own: Triton decides when it is imported how kernels run."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "calls", Path(folder) / "results"
        torch.save(list(calls), asked)
        subprocess.run(
            [sys.executable, "-m", "tests.kernels.triton.attention_interpreter", str(asked), str(answered)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=True,
        )
        return torch.load(answered)


def on_gpu(calls: Sequence[Call]) -> Results:
    """One after the other, on memory that holds NaN where an op writes nothing."""
    results = []
    for name, given in calls:
        moved = [value.cuda() if isinstance(value, torch.Tensor) else value for value in given]
        poison(moved[0].numel() * 32)
        everything = (*run(name, *moved), *moved)
        results.append(tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in everything))
    return results
