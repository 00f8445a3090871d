"""Small calibrated runs, in this process or in one that can be killed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from halfbyte.calibration.samples import CalibrationSet, DataReport, Sample
from halfbyte.quantization import job
from halfbyte.quantization.calibrated import run_calibrated
from halfbyte.quantization.walk import Progress
from halfbyte.recipe import Recipe
from tests.tiny import VOCAB_SIZE

BEST = Recipe(algorithm="awq+gptq")


def samples(lengths: tuple[int, ...] = (48, 64, 48, 80), seed: int = 0, masked: int = 0) -> CalibrationSet:
    """Random tokens; the first ``masked`` of each sample do not count."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        made.append(Sample(ids, torch.arange(length) >= masked))
    total = sum(lengths)
    masks = {"template": masked * len(lengths)} if masked else {}
    report = DataReport(("random",), len(made), len(made), total, masks, min(lengths), max(lengths))
    return CalibrationSet(tuple(made), report)


def quantize(
    source: Path,
    out: Path,
    recipe: Recipe = BEST,
    data: CalibrationSet | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: object,
) -> job.QuantizationResult:
    plan = job.prepare(source, recipe)
    return run_calibrated(plan, out, data or samples(), on_progress=on_progress, **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


if __name__ == "__main__":
    # Says every step, then waits to be let on: the parent decides where the run dies.
    def step(state: Progress) -> None:
        print(f"{state.block} {state.doing}", flush=True)
        sys.stdin.readline()

    quantize(Path(sys.argv[1]), Path(sys.argv[2]), on_progress=step)
