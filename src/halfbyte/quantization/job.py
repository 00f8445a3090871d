"""Running a plan: one weight at a time from the source, through an algorithm, into the writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfbyte.algorithms.clip import clip_mse
from halfbyte.algorithms.rtn import rtn
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.output_directory import refuse_to_replace_source
from halfbyte.checkpoint.quantization_config import quantization_config
from halfbyte.checkpoint.quantized_weight import encode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import SHARD_BYTES, CheckpointWriter
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.layout import ModuleInfo
from halfbyte.quantization.partners import PartnersAbsmax
from halfbyte.quantization.plan import Copy, QuantizationPlan, Quantize, Step, make_plan
from halfbyte.recipe import Recipe

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
    source: Path | str, recipe: Recipe, *, tp: int = 1, allow_pickle: bool = False
) -> QuantizationPlan:
    """Open a checkpoint and plan its quantization from headers alone.

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
    Errors: NaN or Inf in a weight (the tensor is named); a full disk; ``out`` exists without ``overwrite``.
    """
    checkpoint = plan.checkpoint
    for source in {checkpoint.path, *(info.file for info in checkpoint.tensors.values())}:
        refuse_to_replace_source(Path(out), source)
    with CheckpointWriter(
        out, plan.entries, overwrite=overwrite, shard_bytes=shard_bytes, fingerprint=plan.fingerprint
    ) as writer:
        missing = {entry.name for entry in writer.missing()}
        partners_absmax = PartnersAbsmax(checkpoint, plan.layout)
        for step, weight in _with_weights(checkpoint, plan.steps, missing):
            if isinstance(step, Copy):
                if step.tensor in missing:
                    writer.write(step.tensor, partial(checkpoint.copy_bytes, step.tensor))
            elif weight is not None:
                for name, tensor in _quantized(plan, step, weight, partners_absmax).items():
                    if name in missing:
                        writer.write(name, tensor)
            if progress:
                progress(
                    _source_bytes(plan, step), step.tensor if isinstance(step, Copy) else step.module.name
                )
        writer.finish(_config(plan), checkpoint.path)
        notes = [*writer.notes, *plan.assignment.notes]
    notes += [
        f"{finding.where}: {finding.message}" for finding in plan.findings if finding.level == "warning"
    ]
    return QuantizationResult(
        out=Path(out),
        modules=sum(isinstance(step, Quantize) for step in plan.steps),
        source_bytes=source_bytes(plan),
        written_bytes=sum(entry.nbytes for entry in plan.entries),
        notes=notes,
    )


def source_bytes(plan: QuantizationPlan) -> int:
    """Bytes that a run goes through: the total for progress."""
    return sum(info.nbytes for info in plan.checkpoint.tensors.values())


def _source_bytes(plan: QuantizationPlan, step: Step) -> float:
    tensors = plan.checkpoint.tensors
    if isinstance(step, Copy):
        return tensors[step.tensor].nbytes
    stored = tensors[step.module.source.tensor]
    return stored.nbytes * math.prod(step.module.shape) / math.prod(stored.shape)


def _with_weights(
    checkpoint: Checkpoint, steps: Sequence[Step], missing: set[str]
) -> Iterator[tuple[Step, torch.Tensor | None]]:
    """Steps with the weight of those that need one; the next weight is read while this one is worked on."""

    def wanted(step: Step) -> bool:
        return isinstance(step, Quantize) and any(entry.name in missing for entry in step.entries)

    upcoming = iter([step for step in steps if wanted(step)])
    with ThreadPoolExecutor(max_workers=1) as reader:

        def read_next() -> Future[torch.Tensor] | None:
            step = next(upcoming, None)
            return (
                reader.submit(checkpoint.load_source, step.module.source)
                if isinstance(step, Quantize)
                else None
            )

        ahead = read_next()
        for step in steps:
            if wanted(step):
                assert ahead is not None
                weight = ahead.result()
                ahead = read_next()
                yield step, weight
                del weight
            else:
                yield step, None


def _quantized(
    plan: QuantizationPlan,
    step: Quantize,
    weight: torch.Tensor,
    partners_absmax: Callable[[ModuleInfo], float],
) -> dict[str, torch.Tensor]:
    """The stored tensors of one module."""
    dtype = plan.checkpoint.model_dtype
    number_format = step.scheme.weights.with_scale(dtype)
    algorithm = clip_mse if plan.assignment.clips[step.module.name] == "mse" else rtn
    shared = number_format.outer == "tensor" and step.module.fused_group is not None
    try:
        quantized = algorithm(
            weight, number_format, elsewhere=partners_absmax(step.module) if shared else 0.0
        )
    except HalfbyteError as error:
        stored = plan.checkpoint.info(step.module.source.tensor)
        raise type(error)(f"{stored.file}: {stored.name}: {error}") from None
    return encode(step.module.name, step.scheme, quantized, dtype)


def _config(plan: QuantizationPlan) -> dict[str, Any]:
    return {
        **plan.checkpoint.config,
        "quantization_config": quantization_config(plan.assignment.schemes, plan.layout),
    }
