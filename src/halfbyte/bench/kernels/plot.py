"""Time over floor against M, one panel for each table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.bench.kernels.table import Comparison, comparisons
from halfbyte.bench.record import Row
from halfbyte.errors import HalfbyteError

_PANEL_INCHES = (4.2, 3.4)
_TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


def require_matplotlib() -> Any:
    """``matplotlib.pyplot`` for files, without a window. Errors: it is not installed."""
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise HalfbyteError("a plot needs matplotlib; accepted: pip install 'halfbyte[plot]'") from error


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes the figure to ``path`` in the format of its suffix: ops down, shapes across, both axes logarithmic.

    Errors: matplotlib is missing or does not know the suffix; rows without a floor.
    """
    pyplot = require_matplotlib()
    panels = [table for table in comparisons(rows) if _ratios(table)]
    if not panels:
        raise HalfbyteError("there is nothing to plot: no row has a number of rows M and a floor")
    down = list(dict.fromkeys(table.op for table in panels))
    across = max(sum(table.op == op for table in panels) for op in down)
    width, height = _PANEL_INCHES
    figure, axes = pyplot.subplots(
        len(down),
        across,
        squeeze=False,
        sharey="row",
        figsize=(width * across, height * len(down)),
        layout="constrained",
    )
    for line, op in zip(axes, down, strict=True):
        mine = [table for table in panels if table.op == op]
        columns = dict.fromkeys(column for table in mine for column in _ratios(table))
        colours = dict(zip(columns, pyplot.get_cmap("tab20").colors * 2, strict=False))
        for panel, table in zip(line, mine, strict=False):
            _draw(panel, table, colours)
        ratios = [r for table in mine for points in _ratios(table).values() for _, r in points]
        line[0].set_ylim(0.9, 1.1 * max(ratios))
        for panel in line[len(mine) :]:
            panel.set_axis_off()
        shown = {
            label: handle
            for panel in line
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        line[-1].legend(
            shown.values(), shown.keys(), loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise HalfbyteError(f"{path}: {error}") from error
    finally:
        pyplot.close(figure)


def _ratios(table: Comparison) -> dict[str, list[tuple[int, float]]]:
    """By column, (M, time over the op's floor)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in table.lines:
        if line.rows and line.floor_us:
            for column, cell in zip(table.columns, line.cells, strict=True):
                if cell is not None:
                    found.setdefault(column, []).append((line.rows, cell.us / line.floor_us))
    return found


def _draw(panel: Any, table: Comparison, colours: Mapping[str, Any]) -> None:
    for column, points in _ratios(table).items():
        style = "--" if column.startswith("torch-") else "-"
        panel.plot(
            *zip(*points, strict=True), style, label=column, color=colours[column], marker="o", markersize=3
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([line.rows for line in table.lines if line.rows])
    panel.set_yticks(_TICKS)
    panel.minorticks_off()
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.tick_params(axis="x", labelrotation=45)
    panel.grid(alpha=0.3)
    panel.axhline(1, color="black", lw=0.8)
    panel.set_title(table.title, fontsize="medium")
    panel.set_xlabel("M")
    panel.set_ylabel("time / floor")
