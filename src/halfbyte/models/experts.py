"""Experts fused into one three-dimensional tensor, unfolded into the modules that they are.

Stored as ``[experts, out, in]`` or ``[experts, in, out]``; the width of the model's hidden state tells which,
and where it fits both ways the other tensors of the experts do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from halfbyte.models.config_fields import ConfigFields
from halfbyte.models.families import Family
from halfbyte.models.fusion import fused_group
from halfbyte.models.layout import ModuleInfo, Role, WeightSource
from halfbyte.models.names import WEIGHT, split

_GATE_UP = frozenset({"gate_up_proj", "w13", "w13_weight", "input_linear"})
_INNER = {"gate_proj": "gate_proj", "up_proj": "up_proj", "w1": "gate_proj", "w3": "up_proj"}
_EXPERT_INDEX = re.compile(r"\.experts\.(\d+)\.")
_DOWN = frozenset({"down_proj", "w2", "w2_weight", "output_linear"})


@dataclass(frozen=True)
class FusedExperts:
    """One fused tensor: ``projections`` that its rows hold (gate and up together, or one alone)."""

    tensor: str
    parent: str
    projections: tuple[str, ...]
    shape: tuple[int, int, int]

    @property
    def reads_hidden(self) -> bool:
        """Whether the inputs, and not the outputs, have the width of the hidden state."""
        return self.projections != ("down_proj",)


def find_fused_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FusedExperts]:
    """The fused expert tensors among ``shapes``, by name of the stored tensor."""
    found = {}
    for tensor, shape in shapes.items():
        if len(shape) != 3:
            continue
        parent, leaf = split(tensor.removesuffix(WEIGHT))
        projections = _projections(leaf)
        if projections and (parent.endswith("experts") or leaf in ("input_linear", "output_linear")):
            if not parent.endswith("experts"):
                parent += ".experts"
            found[tensor] = FusedExperts(tensor, parent, projections, (shape[0], shape[1], shape[2]))
    return found


def count_experts(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Experts per layer, by the tensors; none in a dense model."""
    counts = [fused.shape[0] for fused in find_fused_experts(shapes).values()]
    counts += [int(found[1]) + 1 for found in map(_EXPERT_INDEX.search, shapes) if found]
    return max(counts, default=None)


def _projections(leaf: str) -> tuple[str, ...]:
    if leaf in _GATE_UP:
        return ("gate_proj", "up_proj")
    if leaf in _DOWN:
        return ("down_proj",)
    return (_INNER[leaf],) if leaf in _INNER else ()


def stored_transposed(experts: Iterable[FusedExperts], fields: ConfigFields, family: Family) -> bool | None:
    """Whether the model stores its fused experts as ``[experts, in, out]``; none if no size fits."""
    fits_both = False
    for fused in experts:
        _, first, second = fused.shape
        rows, columns = first in fields.expert_widths, second in fields.expert_widths
        if rows != columns:
            return rows if fused.reads_hidden else columns
        fits_both = fits_both or rows
    return family.transposed_experts if fits_both else None


def unfold(fused: FusedExperts, transposed: bool, interleaved: bool) -> Iterator[ModuleInfo]:
    """The experts of one fused tensor, expert by expert, as ``{parent}.{expert}.{projection}``."""
    count, first, second = fused.shape
    rows, columns = (second, first) if transposed else (first, second)
    parts = len(fused.projections)
    for expert in range(count):
        for index, projection in enumerate(fused.projections):
            name = f"{fused.parent}.{expert}.{projection}"
            taken = _rows(rows, index, parts, interleaved)
            yield ModuleInfo(
                name=name,
                role=Role.EXPERT,
                out_features=rows // parts,
                in_features=columns,
                source=WeightSource(fused.tensor, expert, taken, transposed),
                fused_group=fused_group(name),
            )


def _rows(rows: int, index: int, parts: int, interleaved: bool) -> tuple[int, int, int] | None:
    if parts == 1:
        return None
    if interleaved:
        return (index, rows, parts)
    part = rows // parts
    return (index * part, (index + 1) * part, 1)
