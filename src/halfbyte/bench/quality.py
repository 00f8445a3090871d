"""What each way to choose a scheme's numbers costs in quality: a ladder of methods on one model and the same tokens."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from halfbyte.assignment import Choice
from halfbyte.bench.only_choice import only_choice
from halfbyte.bench.record import Row
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.method import Method
from halfbyte.quantization.report import REPORT_FILE
from halfbyte.recipe import Recipe

ORIGINAL = "original"
_REFERENCE = str(Method())


class Scores(Protocol):
    """Figures of models, by text."""

    def original(self) -> Mapping[str, Row]:
        """Of the model that is quantized."""
        ...

    def of(self, checkpoint: Path) -> Mapping[str, Row]:
        """Of a checkpoint beside it. ``increase`` is that of perplexity over the original's: 0.05 is 5 %."""
        ...


@dataclass(frozen=True)
class Rung:
    """name: as in the ladder, ``ALGORITHM`` or ``ALGORITHM:CLIP``. choice: the scheme and method of the recipe."""

    name: str
    recipe: Recipe
    choice: Choice

    @property
    def folder_name(self) -> str:
        """A directory's name."""
        return self.name.replace(":", "-clip-")


Make = Callable[[Rung, Path], object]
"""Quantizes the model as a rung says into a directory."""


def parse_ladder(ladder: Sequence[str], clips: Sequence[str], scheme: str) -> list[Rung]:
    """The rungs named ``ALGORITHM`` or ``ALGORITHM:CLIP``; the former once with each of ``clips``, if there are any.

    Algorithms and clips are those of :class:`halfbyte.method.Method`.
    Errors: what a recipe does not accept; a rung that is named twice.
    """
    rungs: dict[str, Rung] = {}
    for given in ladder:
        algorithm, colon, clip = given.partition(":")
        chosen_clips: Sequence[str | None] = [clip] if colon else clips or [None]
        for chosen in chosen_clips:
            name = algorithm if chosen is None else f"{algorithm}:{chosen}"
            if name in rungs:
                raise HalfbyteError(f"rung {name!r} is named twice; accepted: each once")
            try:
                recipe = Recipe(scheme=scheme, algorithm=algorithm, clip=chosen)
                rungs[name] = Rung(name, recipe, only_choice(recipe))
            except HalfbyteError as error:
                raise HalfbyteError(f"rung {name!r}: {error}") from None
    return list(rungs.values())


def bench_quality(
    rungs: Sequence[Rung],
    others: Sequence[Path],
    *,
    make: Make,
    scores: Scores,
    keep: Path | None = None,
) -> Iterator[list[Row]]:
    """The original, each rung and each checkpoint of ``others``: a row for each text.

    keep: where each rung's checkpoint stays, in a directory of its name; without it they are temporary.
    ``seconds``: of making a rung. ``error``, ``error_rtn``: mean relative output error of its layers, and that of round
    to nearest in their place; none without data. What fails is one row with ``failed``; only for the original it is an
    error.
    Errors: a rung's place in ``keep`` that is taken.
    """
    for place in [keep / rung.folder_name for rung in rungs] if keep else []:
        if place.exists():
            raise HalfbyteError(f"{place}: exists already; accepted: a folder without it")
    yield _rows({"rung": ORIGINAL, "scheme": ORIGINAL}, scores.original())
    for rung in rungs:
        yield _attempt(rung.name, partial(_climb, rung, keep, make, scores))
    for other in others:
        yield _attempt(str(other), partial(_rate, other, scores))


def relative_to_rtn(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with ``increase_of_rtn``: the increase as a share of round to nearest's on the same text.

    The rung ``rtn`` has 1.0. None without that rung, or where it increases nothing.
    """
    of_rtn = {
        row["text"]: row["increase"] for row in rows if _compared(row) and row.get("method") == _REFERENCE
    }

    def share(row: Row) -> float | None:
        reference = of_rtn.get(row["text"])
        return round(row["increase"] / reference, 4) if reference is not None and reference > 0 else None

    return [{**row, "increase_of_rtn": share(row)} if _compared(row) else row for row in rows]


def _compared(row: Row) -> bool:
    return "increase" in row


def _attempt(name: str, rows: Callable[[], list[Row]]) -> list[Row]:
    try:
        return rows()
    except HalfbyteError as error:
        reason = str(error)
    except Exception as error:  # one rung's defect is no reason to lose the others
        reason = f"{type(error).__name__}: {error}"
    return [{"op": "quality", "rung": name, "failed": reason}]


def _climb(rung: Rung, keep: Path | None, make: Make, scores: Scores) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="halfbyte-bench-") as temporary:
        out = Path(temporary) / rung.folder_name if keep is None else keep / rung.folder_name
        started = time.perf_counter()
        make(rung, out)
        seconds = time.perf_counter() - started
        about: Row = {
            "rung": rung.name,
            "scheme": rung.choice.scheme.name,
            "method": str(rung.choice.method),
            "seconds": round(seconds, 1),
            **_reported(out),
        }
        return _rows(about, scores.of(out))


def _rate(checkpoint: Path, scores: Scores) -> list[Row]:
    scheme = detect(Checkpoint.open(checkpoint)).format
    return _rows({"rung": str(checkpoint), "scheme": scheme}, scores.of(checkpoint))


def _rows(about: Mapping[str, Any], scores: Mapping[str, Row]) -> list[Row]:
    return [{"op": "quality", **about, "text": text, **figures} for text, figures in scores.items()]


def _reported(out: Path) -> Row:
    """What the run says of its data and of its layers' outputs; nothing without data, rotated or not."""
    file = out / REPORT_FILE
    if not file.exists():
        return {"error": None, "error_rtn": None}
    report = json.loads(file.read_text())
    data, totals = report["data"], report["totals"]
    if data is None:
        return {"error": None, "error_rtn": None}
    return {
        "data": data["sources"],
        "samples": data["samples"],
        "tokens": data["counted"],
        "error": _rounded(totals["error"]),
        "error_rtn": _rounded(totals["error_rtn"]),
        "fallbacks": len(totals["fallbacks"]),
    }


def _rounded(error: float | None) -> float | None:
    return None if error is None else round(error, 6)
