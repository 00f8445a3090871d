"""Measured rows as tables for people: one per mixture, product and routing, tokens down, kernels across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.bench.kernels.table import Cell
from halfbyte.bench.record import Row

# Results that are further off have been rounded on the way; their times are shown but are not the best.
_EXACT = 1e-2
CAPTION = (
    "Microseconds of one grouped product, relative error against float64 in brackets. Best: the fastest with an error "
    "of at most 1 %. Routing, permutation and quantization of inputs are not in the times."
)


@dataclass(frozen=True)
class Table:
    """columns: kernels. lines: tokens, and a cell for each kernel."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[int, tuple[Cell | None, ...]], ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """In the order of the rows."""
    found = []
    for model, gemm, routing in dict.fromkeys((row["model"], row["gemm"], row["routing"]) for row in rows):
        own = [row for row in rows if (row["model"], row["gemm"], row["routing"]) == (model, gemm, routing)]
        columns = tuple(dict.fromkeys(row["kernel"] for row in own))
        lines = []
        for tokens in sorted({row["tokens"] for row in own}):
            here = {row["kernel"]: row for row in own if row["tokens"] == tokens}
            exact = [row["us"] for row in here.values() if row["rel_err"] <= _EXACT]
            lines.append((tokens, tuple(_cell(here.get(name), exact) for name in columns)))
        shape = f"{own[0]['E']} x {own[0]['N']} x {own[0]['K']}, top {own[0]['top_k']}"
        found.append(Table(f"{model} {gemm}, {routing} ({shape})", columns, tuple(lines)))
    return found


def missing_lines(record: dict[str, Any]) -> list[str]:
    """One line for each kernel and reason, with where it holds."""
    places: dict[tuple[str, str], list[str]] = {}
    for entry in record.get("missing", []):
        where = [str(entry[key]) for key in ("model", "gemm", "routing", "tokens") if key in entry]
        places.setdefault((entry["kernel"], entry["reason"]), []).append(" ".join(where))
    return [
        f"{kernel} ({'; '.join(dict.fromkeys(where))}): {reason}"
        for (kernel, reason), where in places.items()
    ]


def _cell(row: Row | None, exact: Sequence[float]) -> Cell | None:
    if row is None:
        return None
    return Cell(row["us"], row["rel_err"], row["rel_err"] <= _EXACT and row["us"] == min(exact))
