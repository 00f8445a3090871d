"""A calibrated run: block by block through the model, each block final on disk before the next one begins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from halfbyte.calibration.activations import DiskStore, MemoryStore
from halfbyte.calibration.blocks import BlockModel
from halfbyte.calibration.ranks import Ranks
from halfbyte.calibration.samples import CalibrationSet, Sample
from halfbyte.checkpoint.output_directory import refuse_to_replace_source
from halfbyte.checkpoint.redo import Redo
from halfbyte.checkpoint.writer import SHARD_BYTES, CheckpointWriter
from halfbyte.errors import HalfbyteError
from halfbyte.models.config_fields import read_config
from halfbyte.models.folding import Folds, find_folds
from halfbyte.quantization.block_plan import (
    by_block,
    fingerprint,
    first_entry,
    meant_blocks,
    quantize_steps,
)
from halfbyte.quantization.follower import Follower
from halfbyte.quantization.job import QuantizationResult, output_config, plan_notes, source_bytes
from halfbyte.quantization.kernel_targets import kernel_targets
from halfbyte.quantization.plan import QuantizationPlan
from halfbyte.quantization.report import REPORT_FILE, read_origin, read_reports, run_report
from halfbyte.quantization.walk import OnProgress, Walk
from halfbyte.quantization.without_data import unseen_notes, write_without_data

ALONE = Ranks()
_GPU_ACTIVATIONS = 3 << 30


def run_calibrated(
    plan: QuantizationPlan,
    out: Path | str,
    data: CalibrationSet,
    *,
    device: torch.device | str = "cpu",
    activations: str = "memory",
    overwrite: bool = False,
    redo: Sequence[str] = (),
    ranks: Ranks = ALONE,
    shard_bytes: int = SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> QuantizationResult:
    """Write the planned checkpoint, quantized with what its layers see of ``data``.

    Every block sees what the quantized blocks before it put out. Memory: one block (on a GPU the next one too, while
    this one runs), the moments of its inputs, and hidden states of all samples, which ``activations`` keeps in
    ``memory`` or on ``disk``.
    A run that was interrupted goes on after its last finished block, and gives the same bytes.
    redo: patterns of modules whose blocks are quantized again, with this recipe and data; all other blocks stay as an
    unfinished run or OUT has them (those behind a redone one were calibrated on what it put out before). They must be
    of the same source, rotation, target and schemes.
    ranks: all take part with the same arguments and a share of the samples; the first one writes.
    Errors: NaN or Inf in a weight or a block's output; a full disk; ``out`` exists without ``overwrite``; finished
    blocks of another run in its place; blocks to be kept that are of another source, rotation or target, or of which
    that is not known.
    """
    checkpoint = plan.checkpoint
    for source in {checkpoint.path, *(info.file for info in checkpoint.tensors.values())}:
        refuse_to_replace_source(Path(out), source)
    targets = kernel_targets(plan)
    folds = find_folds(plan.layout, checkpoint.shapes, checkpoint.config)
    _refuse_two_scalings(plan, folds)
    model = BlockModel.open(checkpoint, plan.layout, device=device)
    blocks = by_block(plan, model)
    with ExitStack() as stack:
        output: CheckpointWriter | Follower
        if ranks.is_first:
            again = [first_entry(blocks.blocks[index]) for index in meant_blocks(blocks, redo)]
            output = writer = stack.enter_context(
                CheckpointWriter(
                    out,
                    blocks.entries,
                    overwrite=overwrite,
                    shard_bytes=shard_bytes,
                    starts=blocks.starts,
                    redo=Redo(again, read_origin) if redo else None,
                    origin=plan.origin,
                    fingerprint=fingerprint(plan, data.samples, device, model.dtype),
                )
            )
            for _ in write_without_data(plan, blocks.outside, writer):
                pass
            ranks.from_first(Follower.of(writer))
        else:
            output = ranks.from_first(None)
        sequences = ranks.share(data.samples)
        store = (
            DiskStore(output.folder)
            if activations == "disk"
            else MemoryStore(_near(device, model.dtype, plan, sequences))
        )
        stack.callback(store.close)
        known = read_reports(Path(out)) if redo else {}
        walk = Walk(plan, targets, folds, blocks, model, sequences, store, output, known, on_progress)
        reports = list(walk.all_blocks())
        notes = [*plan_notes(plan), *data.report.notes, *unseen_notes(plan, blocks.outside), *walk.notes]
        document = run_report(
            plan.recipe.to_dict(), data.report.to_dict(), reports, notes, origin=plan.origin
        )
        if ranks.is_first:
            writer.finish(output_config(plan), checkpoint.path, {REPORT_FILE: document})
            notes = [*writer.notes, *notes]
    fallbacks = document["totals"]["fallbacks"]
    notes += [f"{name}: rounded to nearest ({why})" for name, why in fallbacks.items()]
    return QuantizationResult(
        out=Path(out),
        modules=len(quantize_steps(plan.steps)),
        source_bytes=source_bytes(plan),
        written_bytes=sum(entry.nbytes for entry in plan.entries),
        notes=notes,
    )


def _refuse_two_scalings(plan: QuantizationPlan, folds: Folds) -> None:
    """Errors: layers that read one input, whose methods would scale it in two ways."""
    methods = plan.assignment.methods
    for fold in folds.folds:
        scalings = {methods[name].scaling: name for name in fold.consumers if name in methods}
        wanted = {scaling: name for scaling, name in scalings.items() if scaling}
        if len(wanted) > 1:
            (one, first), (other, second) = sorted(wanted.items())[:2]
            raise HalfbyteError(
                f"{first} and {second} read the same input, which {one} and {other} would each scale; "
                "accepted: one of the two for both"
            )


def _near(
    device: torch.device | str, dtype: torch.dtype, plan: QuantizationPlan, samples: Sequence[Sample]
) -> torch.device:
    """Where hidden states wait in memory: on a GPU if they take little of it, else on the CPU."""
    place = torch.device(device)
    hidden = read_config(plan.checkpoint.config).hidden
    if place.type != "cuda" or hidden is None:
        return torch.device("cpu")
    needed = dtype.itemsize * hidden * sum(len(sample.ids) for sample in samples)
    free, _ = torch.cuda.mem_get_info(place)
    return place if needed < min(_GPU_ACTIVATIONS, free // 4) else torch.device("cpu")
