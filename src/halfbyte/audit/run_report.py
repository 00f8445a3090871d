"""What a calibrated run says that it changed besides rounding: what a comparison with the source has to know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError
from halfbyte.method import ROTATION
from halfbyte.models.folding import Fold
from halfbyte.models.layout import ModuleInfo
from halfbyte.models.producers import NormProducer, RowsProducer
from halfbyte.quantization.report import REPORT_FILE


@dataclass(frozen=True)
class RunReport:
    """folds: what scales were moved into, in the order in which that was done. rotated: the whole model was.

    elsewhere: modules whose codes are not those nearest to their weights: rounded with the errors of others, or to
        what a kernel makes of them.
    """

    folds: tuple[Fold, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    rotated: bool = False


def read_run_report(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, ModuleInfo]
) -> RunReport | None:
    """The report in a checkpoint directory, or none if it has none.

    shapes, modules: of the source, by tensor and by module.
    Errors: a file that is damaged, that has another form, or whose folds do not fit the source.
    """
    file = folder / REPORT_FILE
    if not file.exists():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        recipe, blocks = document["recipe"], document["blocks"]
        rotated = _rotates(recipe)
        folds = tuple(_fold(plain) for block in blocks for plain in block["folds"])
        elsewhere = frozenset(
            module["module"]
            for block in blocks
            for module in block["modules"]
            if recipe.get("target") == "vllm" or "gptq" in module["method"]
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise HalfbyteError(f"is no report of a calibrated run ({why})") from None
    if rotated:
        return RunReport(rotated=True)  # its folds are those of a rotated model, whose weights are nowhere
    _require_fit(folds, shapes, modules)
    return RunReport(folds, elsewhere)


def _rotates(recipe: Mapping[str, Any]) -> bool:
    named = [recipe.get("algorithm"), *(rule.get("algorithm") for rule in recipe.get("targets", {}).values())]
    return any(ROTATION in map(str.strip, algorithm.lower().split("+")) for algorithm in named if algorithm)


def _fold(plain: Mapping[str, Any]) -> Fold:
    producer, kind = plain["producer"], plain["producer"]["kind"]
    found: NormProducer | RowsProducer
    if kind == "norm":
        found = NormProducer(producer["weight"], producer["bias"], float(producer["offset"]))
    elif kind == "rows":
        start, *sizes = (_count(producer[field]) for field in ("start", "heads", "stride", "width"))
        found = RowsProducer(producer["module"], producer["bias"], start, *sizes)
    else:
        raise ValueError(f"producer of kind {kind!r}; accepted: norm, rows")
    channels, width, repeats = (_count(plain[field]) for field in ("channels", "width", "repeats"))
    return Fold(found, tuple(plain["consumers"]), channels, width, repeats)


def _count(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} where a number of rows or columns belongs")
    return number


def _require_fit(
    folds: Sequence[Fold], shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, ModuleInfo]
) -> None:
    norms: set[str] = set()
    for fold in folds:
        producer = fold.producer
        if isinstance(producer, NormProducer):
            tensors = {producer.weight: fold.channels, producer.bias: fold.channels}
            if producer.weight in norms:
                raise HalfbyteError(f"names {producer.weight} twice; accepted: one fold for each norm")
            norms.add(producer.weight)
        else:
            rows = _module(modules, producer.module).out_features
            tensors = {producer.bias: rows}
            last = producer.start + (producer.heads - 1) * producer.stride + producer.width
            if producer.channels != fold.channels or last > rows or producer.stride < producer.width:
                raise HalfbyteError(
                    f"names rows of {producer.module} that it does not have; its rows: {rows}"
                )
        for name, size in tensors.items():
            if name is not None and shapes.get(name) != (size,):
                found = f"{list(shapes[name])} in the source" if name in shapes else "no tensor of the source"
                raise HalfbyteError(f"names {name} with {size} elements, which is {found}")
        if not fold.width or fold.channels % fold.width:
            raise HalfbyteError(f"has {fold.channels} channels in runs of {fold.width}; accepted: whole runs")
        for name in fold.consumers:
            columns = _module(modules, name).in_features
            if columns != fold.channels * fold.repeats:
                raise HalfbyteError(
                    f"says that {name} reads {fold.channels} x {fold.repeats} columns; it has {columns}"
                )


def _module(modules: Mapping[str, ModuleInfo], name: str) -> ModuleInfo:
    if name not in modules:
        raise HalfbyteError(f"names {name}, which is no weight of the source")
    return modules[name]
