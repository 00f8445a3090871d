"""Measured rows as tables for people: one per op and shape, M down, kernels across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.bench.record import Row

# Results that are further off have been rounded on the way; their times are shown but are not the best. Where
# the result itself is FP8, a few of whose codes may be one off, more is allowed.
_EXACT_LINEAR, _EXACT_ROWS = 1e-2, 5e-2

CAPTION = (
    "Microseconds, relative error against float64 in brackets. Best: the fastest with an error of at most 1 % "
    "(ops on rows: 5 %). Floor: the least bytes and operations at what the GPU sustains."
)


@dataclass(frozen=True)
class Cell:
    us: float
    rel_err: float
    best: bool

    def __str__(self) -> str:
        mantissa, exponent = f"{self.rel_err:.1e}".split("e")
        error = f"{mantissa}e{int(exponent)}" if self.rel_err else "0"
        return f"{self.us:.{1 if self.us < 1000 else 0}f} ({error})"


@dataclass(frozen=True)
class Line:
    """rows: M, none where there is none. floor_us: of the op's own format, none if unknown."""

    rows: int | None
    floor_us: float | None
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Comparison:
    """One table. columns: what stands over the cells."""

    op: str
    shape: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        return f"{self.op}, {self.shape}"


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Tables of measured rows, in their order. torch's products stand in the tables of all linear ops."""
    baselines = [row for row in rows if _is_baseline(row)]
    compared = [row for row in rows if not _is_baseline(row)]
    ops = dict.fromkeys(row["op"] for row in compared) or dict.fromkeys(row["op"] for row in baselines)
    tables = []
    for op in ops:
        own = [row for row in rows if row["op"] == op]
        for shape in dict.fromkeys((row["N"], row["K"]) for row in own):
            others = [r for r in baselines if r["op"] != op] if compared and _is_linear(op) else []
            here = [row for row in (*own, *others) if (row["N"], row["K"]) == shape]
            tables.append(_table(op, shape, here))
    return tables


def markdown(record: dict[str, Any]) -> str:
    """A whole record as a page: where it comes from, its tables, and what is missing."""
    meta = record["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    lines = [
        f"# GPU kernels on {meta.get('gpu', 'an unnamed GPU')}",
        "",
        f"`{meta['command']}` at {meta['commit'] or 'no commit'}, {meta['date']}; {versions}.",
        "",
        CAPTION,
    ]
    for table in comparisons(record["rows"]):
        lines += ["", f"## {table.title}", "", _joined(["M", "floor", *table.columns])]
        lines.append("|" + "---|" * (2 + len(table.columns)))
        for line in table.lines:
            cells = ["" if c is None else f"**{c}**" if c.best else str(c) for c in line.cells]
            lines.append(_joined([*margin(line), *cells]))
    if record.get("missing"):
        lines += ["", "## Not measured", "", *(f"- {text}" for text in missing_lines(record))]
    return "\n".join(lines) + "\n"


def margin(line: Line) -> list[str]:
    """The line's first two cells: M and the floor."""
    floor = "" if line.floor_us is None else f"{line.floor_us:.1f}"
    return ["" if line.rows is None else str(line.rows), floor]


def missing_lines(record: dict[str, Any]) -> list[str]:
    """One line for each kernel and reason, with where it holds."""
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in record.get("missing", []):
        places.setdefault((entry["kernel"], entry["reason"]), []).append(entry)
    lines = []
    for (kernel, reason), entries in places.items():
        ops = [entry["op"] for entry in entries if "op" in entry]
        shapes = [_shape(entry["N"], entry["K"]) for entry in entries if "K" in entry]
        rows = [f"M {entry['M']}" for entry in entries if entry.get("M") is not None]
        where = "; ".join(", ".join(dict.fromkeys(part)) for part in (ops, shapes, rows) if part)
        lines.append(f"{kernel}{f' ({where})' if where else ''}: {reason}")
    return lines


def _table(op: str, shape: tuple[int | None, int], rows: Sequence[Row]) -> Comparison:
    keys = dict.fromkeys(_key(row) for row in rows)
    columns = {key: _label(key, list(keys)) for key in keys}
    exact_below = _EXACT_LINEAR if _is_linear(op) else _EXACT_ROWS
    lines = []
    for count in sorted({row["M"] for row in rows}, key=lambda m: m or 0):
        here = {_key(row): row for row in rows if row["M"] == count}
        exact = [row["us"] for row in here.values() if row["rel_err"] <= exact_below]
        floors = [row["floor_us"] for row in here.values() if row["op"] == op and row["floor_us"] is not None]
        cells = []
        for key in columns:
            row = here.get(key)
            best = row is not None and row["rel_err"] <= exact_below and row["us"] == min(exact)
            cells.append(None if row is None else Cell(row["us"], row["rel_err"], best))
        lines.append(Line(count, min(floors, default=None), tuple(cells)))
    return Comparison(op, _shape(*shape), tuple(columns.values()), tuple(lines))


_Key = tuple[str, str, str]
"""Kernel, scheme, inputs."""

# Inputs that go without saying.
_PLAIN = ("quantized", "codes")


def _key(row: Row) -> _Key:
    return row["kernel"], row["scheme"], row["inputs"]


def _label(key: _Key, keys: Sequence[_Key]) -> str:
    """The kernel's name, with as much behind it as tells it from the others."""
    kernel, scheme, inputs = key
    same = [other for other in keys if other[0] == kernel]
    parts = [kernel]
    if any(other[1] != scheme for other in same):
        parts.append(scheme)
    if inputs not in _PLAIN and any(other[1] == scheme and other[2] != inputs for other in same):
        parts.append(f"from {inputs}")
    return " ".join(parts)


def _is_linear(op: str) -> bool:
    return op.endswith("_linear")


def _is_baseline(row: Row) -> bool:
    return _is_linear(row["op"]) and row["kernel"].startswith("torch-")


def _shape(out_features: int | None, in_features: int) -> str:
    return f"K {in_features}" if out_features is None else f"{out_features} x {in_features}"


def _joined(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
