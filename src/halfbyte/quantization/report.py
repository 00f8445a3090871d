"""What a calibrated run says about every module it quantized: ``quantization_report.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from halfbyte.errors import HalfbyteError
from halfbyte.models.folding import Fold
from halfbyte.models.producers import NormProducer

REPORT_FILE = "quantization_report.json"
T = TypeVar("T")


@dataclass(frozen=True)
class ModuleReport:
    """How one weight was quantized, and what that does to the layer's outputs.

    tokens: tokens of the statistics, 0 without. error_rtn, error: size of the output's error over that of the
    output, of round to nearest and of what was written; none without statistics. scale_min, scale_max: of the
    written group scales (times outer scales). narrowed: share of the ranges that were narrowed, none without clipping.
    scaling: how uneven its input channels were scaled, largest over smallest; none if not at all.
    damping: GPTQ's, as a share of the mean of the moment's diagonal. fallback: why it was rounded to nearest instead.
    """

    module: str
    scheme: str
    method: str
    shape: tuple[int, int]
    group_size: int | None
    tokens: int
    error_rtn: float | None
    error: float | None
    scale_min: float
    scale_max: float
    narrowed: float | None = None
    scaling: float | None = None
    damping: float | None = None
    fallback: str | None = None

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ModuleReport:
        """The inverse of ``asdict``, through JSON."""
        return cls(**{**plain, "shape": tuple(plain["shape"])})


@dataclass(frozen=True)
class BlockReport:
    """The modules of one block.

    routed_tokens: how many counted tokens the router gave each expert, by the experts' name. folds: what scales of
    inputs were moved into, in that order (see :func:`fold_report`).
    """

    block: str
    modules: tuple[ModuleReport, ...]
    routed_tokens: Mapping[str, list[int]] = field(default_factory=dict)
    folds: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> BlockReport:
        """The inverse of :meth:`to_dict`, through JSON."""
        return cls(
            plain["block"],
            tuple(ModuleReport.from_dict(module) for module in plain["modules"]),
            dict(plain["routed_tokens"]),
            tuple(plain["folds"]),
            tuple(plain["notes"]),
        )


def fold_report(fold: Fold) -> dict[str, Any]:
    """The fields of a fold and of its producer as plain data, ``kind`` being ``norm`` or ``rows``; the scales
    themselves are in the weights."""
    kind = "norm" if isinstance(fold.producer, NormProducer) else "rows"
    plain = asdict(fold)
    return {**plain, "producer": {"kind": kind, **plain["producer"]}, "consumers": list(fold.consumers)}


def run_report(
    recipe: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    blocks: Iterable[BlockReport],
    notes: Iterable[str],
    *,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole document: the recipe, what the data was, the totals, then block by block.

    origin: see :attr:`halfbyte.quantization.plan.QuantizationPlan.origin`.
    """
    blocks = list(blocks)
    modules = [module for block in blocks for module in block.modules]
    return {
        "recipe": dict(recipe),
        "origin": dict(origin),
        "data": None if data is None else dict(data),
        "notes": list(notes),
        "totals": {
            "modules": len(modules),
            "error_rtn": _mean(module.error_rtn for module in modules),
            "error": _mean(module.error for module in modules),
            "fallbacks": {module.module: module.fallback for module in modules if module.fallback},
        },
        "blocks": [block.to_dict() for block in blocks],
    }


def read_reports(folder: Path) -> dict[str, BlockReport]:
    """The blocks' reports in a checkpoint directory, by block; empty without a report.

    Errors: a report that is damaged or has another form.
    """
    return (
        _read(folder, lambda document: {b["block"]: BlockReport.from_dict(b) for b in document["blocks"]})
        or {}
    )


def read_origin(folder: Path) -> dict[str, Any] | None:
    """What a checkpoint directory was made of; none without a report or in one of an earlier version.

    Errors: a report that is damaged or has another form.
    """
    return _read(folder, lambda document: dict(document["origin"]) if "origin" in document else None)


def _read(folder: Path, part: Callable[[dict[str, Any]], T]) -> T | None:
    file = folder / REPORT_FILE
    if not file.exists():
        return None
    try:
        return part(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise HalfbyteError(f"{file}: is no report of a calibrated run ({error})") from None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
