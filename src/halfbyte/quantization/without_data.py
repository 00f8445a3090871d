"""Steps of a plan that need no data: copied byte for byte, or quantized from the weight alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from halfbyte.algorithms.targets import Target
from halfbyte.checkpoint.quantized_weight import encode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import HalfbyteError
from halfbyte.formats.grid import Ranges, choose_grid
from halfbyte.models.layout import ModuleInfo
from halfbyte.quantization.kernel_targets import kernel_targets
from halfbyte.quantization.partners import PartnersAbsmax
from halfbyte.quantization.plan import Copy, QuantizationPlan, Quantize, Step
from halfbyte.quantization.rounding_step import clipped_grid


def write_without_data(
    plan: QuantizationPlan, steps: Sequence[Step], writer: CheckpointWriter
) -> Iterator[Step]:
    """Writes what is missing of ``steps``, one by one; each step once it is done.

    Memory: two source tensors and the result of one.
    Errors: NaN or Inf in a weight (the tensor is named); a full disk.
    """
    missing = {entry.name for entry in writer.missing()}
    partners_absmax = PartnersAbsmax(plan.checkpoint, plan.layout)
    targets = kernel_targets(plan)
    for step, weight in _with_weights(plan.checkpoint, steps, missing):
        if isinstance(step, Copy):
            if step.tensor in missing:
                writer.write(step.tensor, partial(plan.checkpoint.copy_bytes, step.tensor))
        elif weight is not None:
            for name, tensor in _quantized(
                plan, step, weight, partners_absmax, targets[step.module.name]
            ).items():
                if name in missing:
                    writer.write(name, tensor)
        yield step


def unseen_notes(plan: QuantizationPlan, steps: Sequence[Step]) -> list[str]:
    """One line for each module of ``steps``, outside the blocks of a calibrated run, that was to be calibrated."""
    methods = {
        step.module.name: plan.assignment.methods[step.module.name]
        for step in steps
        if isinstance(step, Quantize)
    }
    return [
        f"{name}: rounded to nearest with clip {method.without_data.clip} instead of {method}: it lies outside the "
        "decoder blocks, and only what is inside is calibrated"
        for name, method in methods.items()
        if method.needs_data
    ]


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
    target: Target,
) -> dict[str, torch.Tensor]:
    """The stored tensors of one module."""
    dtype = plan.checkpoint.model_dtype
    number_format = step.scheme.weights.with_scale(dtype)
    clip = plan.assignment.methods[step.module.name].without_data.clip
    shared = number_format.outer == "tensor" and step.module.fused_group is not None
    elsewhere = partners_absmax(step.module) if shared else 0.0
    try:
        if clip == "none":
            grid = choose_grid(Ranges.of(weight, number_format, elsewhere), number_format)
        else:
            grid = clipped_grid(weight, number_format, clip, None, elsewhere)
        quantized = target.round(weight, number_format, grid)
    except HalfbyteError as error:
        stored = plan.checkpoint.info(step.module.source.tensor)
        raise type(error)(f"{stored.file}: {stored.name}: {error}") from None
    return encode(step.module.name, step.scheme, quantized, dtype, plan.recipe.format)
