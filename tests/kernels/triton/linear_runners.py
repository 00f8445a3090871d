"""Two ways to run linear layers: on the CPU in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.kernels.triton.linear_cases import Case
from tests.kernels.triton.runners import poison

Runner = Callable[[Sequence[Case]], list[torch.Tensor]]


def interpreted(cases: Sequence[Case]) -> list[torch.Tensor]:
    """All cases in a process of its own: Triton decides when it is imported how kernels run."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "cases", Path(folder) / "results"
        torch.save(list(cases), asked)
        subprocess.run(
            [sys.executable, "-m", "tests.kernels.triton.linear_interpreter", str(asked), str(answered)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=True,
        )
        return torch.load(answered)


def on_gpu(cases: Sequence[Case]) -> list[torch.Tensor]:
    """One after the other, on memory that holds NaN where a kernel writes nothing."""
    results = []
    for case in cases:
        poison(case.x.numel() + case.weight.codes.numel())
        results.append(case.run(torch.device("cuda")))
    return results
