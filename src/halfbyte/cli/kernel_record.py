"""Records of ``halfbyte bench kernels`` and ``tune`` on a terminal."""

from __future__ import annotations

from typing import Any

from halfbyte.cli import console


def print_record(result: dict[str, Any]) -> None:
    """One table per op and shape, then what was not measured and why."""
    from rich.table import Table
    from rich.text import Text

    from halfbyte.bench.kernels.table import CAPTION, comparisons, margin, missing_lines

    shown = console.wide()
    for comparison in comparisons(result["rows"]):
        table = Table(title=Text(comparison.title), title_justify="left")
        for column in ("M", "floor", *comparison.columns):
            table.add_column(Text(column.replace("-", "-\n")), justify="right", overflow="fold")
        for line in comparison.lines:
            cells = ["" if cell is None else f"{cell}{'*' if cell.best else ' '}" for cell in line.cells]
            table.add_row(*map(Text, (*margin(line), *cells)))
        shown.print(table)
    shown.print(f"* {CAPTION}", markup=False, highlight=False)
    for text in missing_lines(result):
        shown.print(f"not measured: {text}", markup=False, highlight=False, soft_wrap=True)


def print_tuning(rows: list[dict[str, Any]], most: int = 5) -> None:
    """The fastest configurations of each case, and where the one now in the table stands."""
    from rich.table import Table
    from rich.text import Text

    shown = console.wide()
    table = Table()
    for column in ("N x K", "M", "us", "error", "configuration", "now"):
        table.add_column(column, justify="right" if column in ("M", "us", "error") else "left")
    places: dict[tuple[int, int, int], int] = {}
    for row in rows:
        case = (row["N"], row["K"], row["M"])
        places[case] = places.get(case, 0) + 1
        if places[case] <= most or row["chosen"]:
            text = " ".join(f"{name} {value}" for name, value in row["config"].items())
            cells = (
                f"{row['N']}x{row['K']}",
                str(row["M"]),
                f"{row['us']:.2f}",
                f"{row['rel_err']:.1e}",
                text,
            )
            table.add_row(*map(Text, (*cells, "chosen" if row["chosen"] else "")))
    shown.print(table)
