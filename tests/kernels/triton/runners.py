"""Two ways to run the row ops: on the CPU in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# An op of torch.ops.halfbyte, and its arguments.
Call = tuple[str, tuple[Any, ...]]
Results = list[tuple[torch.Tensor, ...]]
Runner = Callable[[Sequence[Call]], Results]


def in_interpreter(module: str, calls: Sequence[Any]) -> list[Any]:
    """All calls in a process of its own: Triton decides when it is imported how kernels run.

    module: of this folder; it reads the calls from a file and writes their results to another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "calls", Path(folder) / "results"
        torch.save(list(calls), asked)
        subprocess.run(
            [sys.executable, "-m", f"tests.kernels.triton.{module}", str(asked), str(answered)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=True,
        )
        return torch.load(answered)


def interpreted(calls: Sequence[Call]) -> Results:
    """On the CPU."""
    return in_interpreter("interpreter", calls)


def on_gpu(calls: Sequence[Call]) -> Results:
    """One after the other, on memory that holds NaN where an op writes nothing."""
    results = []
    for name, arguments in calls:
        moved = [as_laid_out(a, "cuda") if isinstance(a, torch.Tensor) else a for a in arguments]
        poison(moved[0].numel())
        results.append(tuple(as_laid_out(out) for out in run(name, *moved)))
    return results


def as_laid_out(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """On another device with the strides it has, which a plain copy would lose."""
    if 0 in tensor.stride():  # values that share memory cannot be written one by one
        once = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        return once.clone(memory_format=torch.contiguous_format).to(device).expand(tensor.shape)
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def run(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of an op as a tuple, though there be one."""
    outputs = getattr(torch.ops.halfbyte, name)(*arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def poison(values: int) -> None:
    """Leave NaN (in every dtype that has one) in the memory that the allocator hands out next."""
    sizes = [size for power in range(3, 26) if (size := 1 << power) <= 16 * max(values, 1)]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    blocks.clear()
