"""The steps of a plan sorted by decoder block, which is the unit that a calibrated run finishes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.calibration.blocks import BlockModel
from halfbyte.calibration.samples import Sample
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.devices import hardware
from halfbyte.errors import HalfbyteError
from halfbyte.matching import REGEX_PREFIX, matches
from halfbyte.quantization.plan import Copy, QuantizationPlan, Quantize, Step


@dataclass(frozen=True)
class BlockPlan:
    """outside: steps for what is in no block. blocks: steps for each block, in the order in which blocks run."""

    outside: Sequence[Step]
    blocks: Sequence[Sequence[Step]]

    @property
    def entries(self) -> list[Entry]:
        """Everything that is written, block after block."""
        return [entry for part in (self.outside, *self.blocks) for step in part for entry in step.entries]

    @property
    def starts(self) -> frozenset[str]:
        """Names of the entries that begin a block: each is in a shard of its own."""
        return frozenset(first_entry(steps) for steps in self.blocks if steps)


def first_entry(steps: Sequence[Step]) -> str:
    """Name of the first tensor that ``steps`` write."""
    return steps[0].entries[0].name


def by_block(plan: QuantizationPlan, model: BlockModel) -> BlockPlan:
    """Every step of ``plan`` in the block of ``model`` that holds its tensor, or outside."""
    block_of = {tensor: index for index in range(len(model.blocks)) for tensor in model.tensors(index)}
    blocks: list[list[Step]] = [[] for _ in model.blocks]
    outside: list[Step] = []
    for step in plan.steps:
        stored = step.tensor if isinstance(step, Copy) else step.module.source.tensor
        place = block_of.get(stored)
        (outside if place is None else blocks[place]).append(step)
    return BlockPlan(outside, blocks)


def quantize_steps(steps: Sequence[Step]) -> list[Quantize]:
    """The steps that quantize."""
    return [step for step in steps if isinstance(step, Quantize)]


def fingerprint(
    plan: QuantizationPlan, samples: Sequence[Sample], device: torch.device | str, dtype: torch.dtype
) -> str:
    """Identity of a calibrated run: what gives the same bytes.

    device: where blocks run. dtype: in which. The number of ranks is no part of it: moments are summed in fp64, so that
    codes come out the same on a CPU; on a GPU its last bits may differ, which is no reason to lose finished blocks.
    """
    digest = hashlib.sha256(f"{plan.fingerprint} {hardware(device)} {dtype}".encode())
    for sample in samples:
        digest.update(sample.ids.numpy().tobytes())
        digest.update(sample.counts.numpy().tobytes())
    return digest.hexdigest()


def meant_blocks(blocks: BlockPlan, patterns: Sequence[str]) -> list[int]:
    """Indices of the blocks with a module that one of ``patterns`` means, or would with a prefix: ``layers.7.*``.

    Errors: a pattern that means no module of any block.
    """
    found: set[int] = set()
    for pattern in patterns:
        wide = [pattern] if pattern.startswith(REGEX_PREFIX) else [pattern, f"*.{pattern}"]
        meant = {
            index
            for index, steps in enumerate(blocks.blocks)
            if any(matches(step.module.name, each) for step in quantize_steps(steps) for each in wide)
        }
        if not meant:
            raise HalfbyteError(
                f"--redo {pattern!r} means no quantized module of a block; accepted: a name, re:<regex> or wildcards"
            )
        found |= meant
    return sorted(found)
