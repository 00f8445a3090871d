"""Running a plan: one weight at a time from the source, through an algorithm, into the writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint import qserve_config, w4afp8_config
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.output_directory import refuse_to_replace_source
from halfbyte.checkpoint.quantization_config import quantization_config
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import SHARD_BYTES, CheckpointWriter
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.quantization.plan import Copy, QuantizationPlan, Quantize, Step, make_plan
from halfbyte.quantization.report import REPORT_FILE, run_report
from halfbyte.quantization.rotated_source import RotatedCheckpoint
from halfbyte.quantization.without_data import write_without_data
from halfbyte.recipe import Recipe

ROTATION_SEED = 0
Progress = Callable[[float, str], None]
"""Called with the source bytes just done and the tensor's name."""


@dataclass(frozen=True)
class QuantizationResult:
    """What was written. ``notes`` are lines for the person: fallbacks, warnings, what was resumed."""

    out: Path
    modules: int
    source_bytes: int
    written_bytes: int
    notes: Sequence[str]


def prepare(
    source: Path | str,
    recipe: Recipe,
    *,
    tp: int = 1,
    allow_pickle: bool = False,
    device: torch.device | str = "cpu",
) -> QuantizationPlan:
    """Open a checkpoint and plan its quantization from headers alone.

    device: where tensors are rotated as they are read, if the recipe rotates the model.
    Errors: an unreadable checkpoint; one that is quantized already; a recipe that cannot be carried out
    (every preflight error, in one line).
    """
    checkpoint = Checkpoint.open(source, allow_pickle=allow_pickle)
    detection = detect(checkpoint)
    if detection.format != "unquantized":
        raise HalfbyteError(
            f"{checkpoint.path}: is quantized already ({detection.format}: {detection.why}); "
            "accepted: a checkpoint with 16- or 32-bit floating-point weights"
        )
    if recipe.rotates:
        checkpoint = RotatedCheckpoint.of(checkpoint, seed=ROTATION_SEED, device=device)
    plan = make_plan(checkpoint, describe(checkpoint.config, checkpoint.shapes), recipe, tp)
    if plan.errors:
        raise HalfbyteError("; ".join(f"{finding.where}: {finding.message}" for finding in plan.errors))
    return plan


def run(
    plan: QuantizationPlan,
    out: Path | str,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizationResult:
    """Write the planned checkpoint. Memory: two source tensors and the result of one, whatever the model's size.

    A run that was interrupted goes on where the last finished shard ends, and gives the same bytes.
    Errors: NaN or Inf in a weight (the tensor is named); a full disk; ``out`` exists without ``overwrite``; finished
    blocks of a run with data in its place.
    """
    checkpoint = plan.checkpoint
    for source in {checkpoint.path, *(info.file for info in checkpoint.tensors.values())}:
        refuse_to_replace_source(Path(out), source)
    with CheckpointWriter(
        out,
        plan.entries,
        overwrite=overwrite,
        shard_bytes=shard_bytes,
        origin=plan.origin,
        fingerprint=plan.fingerprint,
    ) as writer:
        for step in write_without_data(plan, plan.steps, writer):
            if progress:
                progress(_source_bytes(plan, step), step_name(step))
        # Whoever compares a rotated model with its source has to know.
        report = run_report(plan.recipe.to_dict(), None, [], plan_notes(plan), origin=plan.origin)
        documents = {REPORT_FILE: report} if plan.recipe.rotates else None
        writer.finish(output_config(plan), checkpoint.path, documents)
        notes = [*writer.notes, *plan_notes(plan)]
    return QuantizationResult(
        out=Path(out),
        modules=sum(isinstance(step, Quantize) for step in plan.steps),
        source_bytes=source_bytes(plan),
        written_bytes=sum(entry.nbytes for entry in plan.entries),
        notes=notes,
    )


def plan_notes(plan: QuantizationPlan) -> list[str]:
    """What a person should know about a plan: smaller groups, preflight's warnings."""
    warnings = [finding for finding in plan.findings if finding.level == "warning"]
    return [*plan.assignment.notes, *(f"{finding.where}: {finding.message}" for finding in warnings)]


def step_name(step: Step) -> str:
    """The tensor or module that a step is about."""
    return step.tensor if isinstance(step, Copy) else step.module.name


def source_bytes(plan: QuantizationPlan) -> int:
    """Bytes that a run goes through: the total for progress."""
    return sum(info.nbytes for info in plan.checkpoint.tensors.values())


def _source_bytes(plan: QuantizationPlan, step: Step) -> float:
    tensors = plan.checkpoint.tensors
    if isinstance(step, Copy):
        return tensors[step.tensor].nbytes
    stored = tensors[step.module.source.tensor]
    return stored.nbytes * math.prod(step.module.shape) / math.prod(stored.shape)


def output_config(plan: QuantizationPlan) -> dict[str, Any]:
    """config.json of what is written."""
    if plan.recipe.format == "qserve":
        return qserve_config.output_config(plan.checkpoint.config, plan.assignment.schemes)
    if plan.recipe.format == "w4afp8":
        return w4afp8_config.output_config(plan.checkpoint.config)
    return {
        **plan.checkpoint.config,
        "quantization_config": quantization_config(plan.assignment.schemes, plan.layout),
    }
