"""``halfbyte bench``: measurements, always beside a baseline from the same run."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from halfbyte.cli import console
from halfbyte.errors import HalfbyteError

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure halfbyte beside a baseline. Results as a table, JSON, or a file.",
    rich_markup_mode=None,
)

Folder = Annotated[
    Path | None, typer.Option(help="Keep the synthetic checkpoints here; a temporary folder otherwise.")
]
Output = Annotated[Path | None, typer.Option("--out", "-o", help="Write the JSON record to this file too.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON record instead of a table.")]


@bench.command("quantize")
def quantize(
    gigabytes: Annotated[
        float, typer.Option(help="Size of the synthetic BF16 checkpoint.", min=0.1, max=1000)
    ] = 8.0,
    scheme: Annotated[list[str] | None, typer.Option(help="Scheme to time; repeatable.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each; the fastest counts.", min=1)] = 3,
    folder: Folder = None,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Data-free quantization: time beside safetensors moving the same bytes, and peak memory.

    Example: halfbyte bench quantize --gigabytes 8 --scheme w4a8 -o benchmarks/cpu/quantize.json
    """
    from halfbyte.bench.quantize import bench_quantize

    with _working_folder(folder) as path:
        _report(bench_quantize(path, gigabytes, scheme or ["w4a8"], repeats), out, json_output)


@bench.command("inspect")
def inspect(
    repeats: Annotated[int, typer.Option(help="Runs of each; the fastest counts.", min=1)] = 5,
    folder: Folder = None,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """The inspect command on 671B parameters in 163 shards of headers, interpreter start included.

    Example: halfbyte bench inspect --json
    """
    from halfbyte.bench.inspect import bench_inspect

    with _working_folder(folder) as path:
        _report(bench_inspect(path, repeats), out, json_output)


@bench.command("linear")
def linear(
    shape: Annotated[list[str] | None, typer.Option(help="NxK of a weight; repeatable.")] = None,
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of input rows M.")] = "1,16,128",
    scheme: Annotated[list[str] | None, typer.Option(help="Scheme to time; repeatable.")] = None,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Linear layers on this CPU: quantized beside torch's BF16, with the error against float64.

    Example: halfbyte bench linear --shape 4096x4096 --rows 1,16 --scheme w4a16
    """
    from halfbyte.bench.linear import bench_linear

    shapes = [
        _shape(text) for text in shape or ["576x576", "1536x576", "576x1536", "4096x4096", "14336x4096"]
    ]
    if not all(part.strip().isdecimal() and int(part) for part in rows.split(",")):
        raise HalfbyteError(f"--rows {rows!r}; accepted: numbers with commas between them, such as 1,16,128")
    counts = [int(part) for part in rows.split(",")]
    _report(bench_linear(shapes, counts, scheme or ["w4a16", "w4a8"]), out, json_output)


def _shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise HalfbyteError(f"--shape {text!r}; accepted: out_features x in_features, such as 4096x4096")
    return int(parts[0]), int(parts[1])


@contextmanager
def _working_folder(folder: Path | None) -> Iterator[Path]:
    """The folder asked for, made if need be, or a temporary one that is removed."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="halfbyte-bench-") as temporary:
        yield Path(temporary)


def _report(rows: list[dict[str, Any]], out: Path | None, json_output: bool) -> None:
    from rich.table import Table

    from halfbyte.bench.record import record

    result = record(rows, shlex.join(["halfbyte", *sys.argv[1:]]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    if json_output:
        console.print_json(result)
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("op", "scheme", "kernel") else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console.out().print(table)
