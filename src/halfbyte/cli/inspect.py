"""``halfbyte inspect``: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from halfbyte.audit.inspect import inspect as describe_checkpoint
from halfbyte.audit.inspection import Inspection, WeightRow
from halfbyte.cli import console

_SHOWN_ANOMALIES = 20


def inspect(
    model: Annotated[
        Path, typer.Argument(help="Directory of a checkpoint, quantized by anyone or not at all.")
    ],
    every_weight: Annotated[
        bool, typer.Option("--all", help="One row per weight instead of one per kind of weight.")
    ] = False,
    scales: Annotated[
        bool | None,
        typer.Option("--scales/--no-scales", help="Read the values of scales. Default: where that is quick."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a checkpoint holds: scheme, bits, bytes, scale range and anomalies of every layer, and totals.

    Example: halfbyte inspect Llama-3.1-8B-W4A8
    """
    found = describe_checkpoint(model, scales=scales)
    if as_json:
        console.print_json(found.as_dict(every_weight))
        return
    out = console.out()
    out.print(_weights_table(found.single() if every_weight else found.grouped(), found.scales_read))
    out.print(_totals_table(found))
    if found.anomalies:
        out.print(f"{len(found.anomalies)} anomalies", style="bold red")
        shown = found.anomalies if every_weight else found.anomalies[:_SHOWN_ANOMALIES]
        for anomaly in shown:
            out.print(f"  {anomaly.where}: {anomaly.what}", markup=False, highlight=False)
        if len(shown) < len(found.anomalies):
            out.print(f"  and {len(found.anomalies) - len(shown)} more (--all shows them)")
    for line in found.notes:
        console.note(f"note: {line}")


def _weights_table(rows: list[WeightRow], scales_read: bool) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("weight", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("role")
    table.add_column("scheme")
    table.add_column("element")
    table.add_column("group", justify="right")
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("bits/weight", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    if scales_read:
        table.add_column("scales", justify="right", no_wrap=True)
    table.add_column("anomalies", justify="right")
    for row in rows:
        kind = row.kind
        cells = [
            escape(row.name),
            str(row.weights),
            kind.role,
            f"{kind.scheme} {kind.preset}" if kind.preset else kind.scheme,
            kind.element,
            kind.group,
            "x".join(map(str, kind.shape)),
            f"{kind.bits_per_weight:.3f}",
            _size(kind.nbytes * row.weights),
        ]
        if scales_read:
            cells.append(f"{row.scales.low:.3g} .. {row.scales.high:.3g}" if row.scales else "")
        table.add_row(*cells, str(row.anomalies) if row.anomalies else "")
    return table


def _totals_table(found: Inspection) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def line(title: str, text: str) -> None:
        table.add_row(title, escape(text))

    line("", "")
    line("format", found.format)
    line("because", found.why)
    line(
        "family",
        found.family + ("" if found.known_family else " (not known; roles come from names and shapes)"),
    )
    line("parameters", f"{found.parameters:,}")
    line("size", f"{_size(found.nbytes)} in {len(found.files)} files")
    line("bytes by kind", ", ".join(f"{k} {_size(n)}" for k, n in found.bytes_by_kind.items() if n))
    line("dtypes", ", ".join(f"{d} {_size(n)} in {count}" for d, (count, n) in found.dtypes.items()))
    bits = f"{found.bits_per_weight:.3f} overall"
    if found.bits_per_quantized_weight is not None:
        share = found.quantized_parameters / found.parameters
        bits += f", {found.bits_per_quantized_weight:.3f} in the quantized {share:.1%}"
    line("bits per weight", bits)
    if found.target is not None:
        line("rounded for", f"{found.target}'s kernel")
    line("KV cache", found.kv_cache or "not quantized")
    if not found.scales_read:
        line("scales", "values not read (--scales reads them)")
    return table


def _size(nbytes: int) -> str:
    """Bytes in words, powers of 1000: ``7.0 GB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
