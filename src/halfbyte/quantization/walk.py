"""The walk of a calibrated run through the blocks, each of which is quantized from what reaches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from halfbyte.algorithms.targets import Target
from halfbyte.calibration.activations import ActivationStore
from halfbyte.calibration.blocks import BlockModel
from halfbyte.calibration.loaded_block import LoadedBlock
from halfbyte.calibration.loaded_block import Sample as BlockSample
from halfbyte.calibration.observers import Observation
from halfbyte.calibration.samples import Sample
from halfbyte.checkpoint.quantized_weight import decode, encode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.models.folding import Fold, Folds
from halfbyte.models.producers import NormProducer
from halfbyte.quantization.batches import batched
from halfbyte.quantization.block_plan import BlockPlan, first_entry, quantize_steps
from halfbyte.quantization.block_step import QuantizedBlock, quantize_block
from halfbyte.quantization.follower import Follower
from halfbyte.quantization.plan import Copy, QuantizationPlan, Step
from halfbyte.quantization.report import BlockReport


@dataclass(frozen=True)
class Progress:
    """done: share of the whole run, 0 to 1. block: its number from one, of blocks. module, error: quantized last, and
    its relative output error. tokens_per_s: through the block at present."""

    done: float
    block: int
    blocks: int
    doing: str
    module: str | None = None
    error: float | None = None
    tokens_per_s: float | None = None


_TOKENS_TOGETHER = 8192
OnProgress = Callable[[Progress], None]


class Walk:
    """The walk through the blocks, of which some may be finished already."""

    def __init__(
        self,
        plan: QuantizationPlan,
        targets: Mapping[str, Target],
        folds: Folds,
        blocks: BlockPlan,
        model: BlockModel,
        samples: Sequence[Sample],
        store: ActivationStore,
        writer: CheckpointWriter | Follower,
        known: Mapping[str, BlockReport],
        on_progress: OnProgress | None,
    ) -> None:
        """targets, folds: of the model. known: reports of blocks that were quantized by a run that is complete."""
        self._plan = plan
        self._blocks = blocks
        self._model = model
        # A GPU is hardly busy with one sample. On a CPU ranks then see what one alone sees, to the last bit.
        self._batches = batched(samples, 1 if model.device.type == "cpu" else _TOKENS_TOGETHER)
        self._store = store
        self._writer = writer
        self._known = known
        self._on_progress = on_progress
        self._missing = {entry.name for entry in writer.missing()}
        self._targets = targets
        self._modules = {module.name: module for module in plan.layout.modules}
        self._folds = folds.folds
        self._writing: Future[None] | None = None
        self._loading: Future[None] | None = None
        self.notes = _unscaled(plan, folds.left_out)

    def all_blocks(self) -> Iterator[BlockReport]:
        """Every block's report; those that were not finished are quantized and written."""
        unfinished = [index for index, steps in enumerate(self._blocks.blocks) if self._is_missing(steps)]
        last = max((index for index in unfinished if self._watched(index)), default=-1)
        if last >= 0:
            self._enter()
        with ThreadPoolExecutor(2) as background:
            for index, steps in enumerate(self._blocks.blocks):
                self._until_loaded()
                if index in unfinished:
                    following = index + 1 if index + 1 in unfinished or index + 1 < last else None
                    yield self._quantize(index, steps, background, forward=index < last, following=following)
                else:
                    self._until_written()
                    if index < last:
                        self._pass_through(index, steps)
                    yield self._kept_report(index, steps)
            self._until_written()

    def _watched(self, index: int) -> list[str]:
        """Modules of a block whose methods, or static scales, need to know their inputs."""
        methods = self._plan.assignment.methods
        return [
            step.module.name
            for step in quantize_steps(self._blocks.blocks[index])
            if methods[step.module.name].needs_data or step.scheme.has_static_inputs
        ]

    def _kept_report(self, index: int, steps: Sequence[Step]) -> BlockReport:
        kept = self._writer.kept_notes(first_entry(steps))
        if kept:
            return BlockReport.from_dict(kept)
        name = self._model.blocks[index]
        return self._known.get(name, BlockReport(name, (), notes=("written by a run that left no report",)))

    def _is_missing(self, steps: Sequence[Step]) -> bool:
        return any(entry.name in self._missing for step in steps for entry in step.entries)

    def _enter(self) -> None:
        for batch in self._batches:
            self._store.append(self._model.enter(batch.ids))
        self._model.release()

    def _quantize(
        self,
        index: int,
        steps: Sequence[Step],
        background: ThreadPoolExecutor,
        *,
        forward: bool,
        following: int | None,
    ) -> BlockReport:
        """forward: later blocks need to know what this one puts out. following: the block that is loaded next.

        A GPU goes on with the next block while this one is written; on a CPU memory is what is short.
        """
        quantized = quantize_steps(steps)
        on_cpu = self._model.device.type == "cpu"
        with self._model.block(index) as block:
            block.require_finite()
            result = quantize_block(
                block,
                quantized,
                self._observe(index, block),
                methods=self._plan.assignment.methods,
                targets=self._targets,
                folds=[fold for fold in self._folds if _is_inside(fold, block)],
                modules=self._modules,
                load=self._plan.checkpoint.load,
                dtype=self._plan.checkpoint.model_dtype,
                on_module=lambda name, error: self._say(index, 1 / 3, "quantizing", name, error),
            )
            self._until_written()
            self._writing = background.submit(self._write, steps, result)
            if following is not None and not on_cpu:
                self._loading = background.submit(self._model.load, following)
            try:
                if forward:
                    self._forward(index, block)
            finally:
                if on_cpu or index == len(self._blocks.blocks) - 1:
                    self._until_written()
        if self._writing is None:
            self._say(index, 1.0, "written")
        return result.report

    def _until_loaded(self) -> None:
        """Until nothing is read ahead any more. What could not be read is read, or said, when its turn has come."""
        if self._loading is not None:
            wait([self._loading])
            self._loading = None

    def _until_written(self) -> None:
        """Until the block before is final. Errors: why it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _observe(self, index: int, block: LoadedBlock) -> Observation:
        watched = self._watched(index)
        observation = (
            block.observe(watched, self._samples(index, "observing")) if watched else Observation([], {})
        )
        if self._model.device.type == "cpu":
            # Beside moments and their factors there is room for one weight at a time.
            block.set_aside({step.module.name for step in quantize_steps(self._blocks.blocks[index])})
        return observation

    def _write(self, steps: Sequence[Step], result: QuantizedBlock) -> None:
        """The report goes first: a finished shard has it beside it, whenever the run ends."""
        if isinstance(self._writer, Follower):
            return
        dtype = self._plan.checkpoint.model_dtype
        self._writer.keep_notes(first_entry(steps), result.report.to_dict())
        for step in steps:
            if isinstance(step, Copy):
                changed = result.changed.get(step.tensor)
                content = (
                    partial(self._plan.checkpoint.copy_bytes, step.tensor) if changed is None else changed
                )
                self._writer.write(step.tensor, content)
            else:
                name = step.module.name
                form, input_scale = self._plan.recipe.format, result.input_scales.get(name)
                encoded = encode(name, step.scheme, result.quantized[name], dtype, form, input_scale)
                for tensor, stored in encoded.items():
                    self._writer.write(tensor, stored)

    def _pass_through(self, index: int, steps: Sequence[Step]) -> None:
        """Runs a block as it was written, so that the next one sees the same as if this run had written it."""
        written = Checkpoint(self._writer.folder, {}, self._writer.finished())
        with self._model.block(index) as block:
            for step in steps:
                if isinstance(step, Copy):
                    if step.tensor in block.tensors:
                        block.put_parameter(step.tensor, written.load(step.tensor))
                else:
                    name = step.module.name
                    stored = {entry.name: written.load(entry.name) for entry in step.entries}
                    weight = decode(name, step.scheme, stored, self._plan.recipe.format)
                    block.put(name, self._targets[name].decode(weight))
            self._forward(index, block)

    def _forward(self, index: int, block: LoadedBlock) -> None:
        for number, output in enumerate(block.run(self._samples(index, "running", 2 / 3))):
            self._store.replace(number, output)

    def _samples(self, index: int, doing: str, begun: float = 0.0) -> Iterator[BlockSample]:
        """What enters block ``index``, with progress through a third of its work."""
        started, tokens = time.monotonic(), 0
        for number, batch in enumerate(self._batches):
            yield BlockSample(self._store.read(number), batch.ids, batch.name, batch.counts)
            tokens += batch.ids.numel()
            pace = tokens / max(time.monotonic() - started, 1e-9)
            self._say(index, begun + (number + 1) / len(self._batches) / 3, doing, tokens_per_s=pace)

    def _say(
        self,
        index: int,
        share: float,
        doing: str,
        module: str | None = None,
        error: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        if self._on_progress:
            blocks = len(self._blocks.blocks)
            self._on_progress(
                Progress((index + share) / blocks, index + 1, blocks, doing, module, error, tokens_per_s)
            )


def _is_inside(fold: Fold, block: LoadedBlock) -> bool:
    producer = fold.producer
    absorbed = (
        producer.weight in block.tensors
        if isinstance(producer, NormProducer)
        else producer.module in block.modules
    )
    return absorbed and all(name in block.modules for name in fold.consumers)


def _unscaled(plan: QuantizationPlan, left_out: Mapping[str, str]) -> list[str]:
    """One line for each reason why modules whose inputs should be scaled are not."""
    methods = plan.assignment.methods
    reasons: dict[str, int] = {}
    for name, why in left_out.items():
        if name in methods and methods[name].scaling:
            reasons[why] = reasons.get(why, 0) + 1
    return [f"{count} modules keep the scale of their inputs: {why}" for why, count in reasons.items()]
