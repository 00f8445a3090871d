"""What a quantized checkpoint will hold, known from headers alone: nothing is read or computed here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoint.quantized_weight import stored_entries
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.devices import hardware
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout, ModuleInfo
from halfbyte.preflight import Finding, preflight
from halfbyte.quantization.rotated_source import RotatedCheckpoint
from halfbyte.recipe import Assignment, Recipe
from halfbyte.schemes import FormName, Scheme
from halfbyte.version import VERSION


@dataclass(frozen=True)
class Copy:
    """An untouched tensor, copied byte for byte."""

    tensor: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Quantize:
    """A module's weight, read through its source and written as the scheme's stored tensors."""

    module: ModuleInfo
    scheme: Scheme
    entries: tuple[Entry, ...]


Step = Copy | Quantize


@dataclass(frozen=True)
class QuantizationPlan:
    """The whole job: steps in the order of the source's tensors, so that reading and writing are sequential.

    findings: what preflight has to say, errors included; a plan with errors must not be run.
    """

    checkpoint: Checkpoint
    layout: ModelLayout
    recipe: Recipe
    assignment: Assignment
    steps: Sequence[Step]
    findings: Sequence[Finding]

    @property
    def entries(self) -> list[Entry]:
        return [entry for step in self.steps for entry in step.entries]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def origin(self) -> dict[str, Any]:
        """What blocks of one model must share, whatever their schemes and data: the state of the source's files (a
        digest), whether they are rotated, and the kernel whose numbers they are rounded to."""
        source = hashlib.sha256(json.dumps(self._source_files).encode()).hexdigest()[:16]
        return {"source": source, "rotated": self.recipe.rotates, "target": self.recipe.target}

    @property
    def _source_files(self) -> list[tuple[str, int, int]]:
        """Name, bytes and time of change in nanoseconds."""
        files = sorted({t.file for t in self.checkpoint.tensors.values()})
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    @property
    def fingerprint(self) -> str:
        """Identity of the result: the same source, recipe, versions of halfbyte and torch and, if the model is rotated,
        hardware give the same bytes, so a partial run can go on."""
        source = [[t.name, t.dtype, t.shape, t.file.name, t.offset] for t in self.checkpoint.tensors.values()]
        written = [[e.name, e.dtype, e.shape] for e in self.entries]
        rotated_by = (
            hardware(self.checkpoint.rotations.device)
            if isinstance(self.checkpoint, RotatedCheckpoint)
            else None
        )
        computed = [VERSION, torch.__version__, rotated_by]
        text = json.dumps(
            [self.checkpoint.config, source, self._source_files, written, self.recipe.to_dict(), computed],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()


def make_plan(checkpoint: Checkpoint, layout: ModelLayout, recipe: Recipe, tp: int = 1) -> QuantizationPlan:
    """Assign schemes and lay out every stored tensor.

    Errors: a fused expert tensor of which a recipe wants some experts quantized and others not.
    """
    assignment = recipe.assign(layout)
    modules_of: dict[str, list[ModuleInfo]] = {}
    for module in layout.modules:
        modules_of.setdefault(module.source.tensor, []).append(module)
    steps: list[Step] = []
    for name, info in checkpoint.tensors.items():
        modules = modules_of.get(name, [])
        quantized = [m for m in modules if assignment.schemes.get(m.name) is not None]
        if not quantized:
            steps.append(Copy(name, (Entry(name, info.dtype, info.shape),)))
            continue
        if len(quantized) != len(modules):
            left = next(m.name for m in modules if assignment.schemes.get(m.name) is None)
            raise HalfbyteError(
                f"{name} holds {len(modules)} expert weights in one tensor, and the recipe leaves {left} alone but "
                f"not {quantized[0].name}; accepted: all of a fused tensor's experts quantized, or none"
            )
        steps.extend(_quantize_steps(quantized, assignment, checkpoint.model_dtype, recipe.format))
    return QuantizationPlan(
        checkpoint, layout, recipe, assignment, steps, preflight(layout, recipe, assignment, tp=tp)
    )


def _quantize_steps(
    modules: Iterable[ModuleInfo], assignment: Assignment, dtype: str, form: FormName
) -> Iterable[Quantize]:
    for module in modules:
        scheme = assignment.schemes[module.name]
        assert scheme is not None
        yield Quantize(module, scheme, tuple(stored_entries(module.name, scheme, module.shape, dtype, form)))
