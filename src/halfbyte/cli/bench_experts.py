"""``halfbyte bench experts``: grouped products of mixtures of experts on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli import bench_arguments as arguments
from halfbyte.cli import console
from halfbyte.cli.bench_output import Json, Output, growing_records, require_writable, write_record
from halfbyte.cli.kernel_record_file import EXPERTS, read_record

if TYPE_CHECKING:
    from halfbyte.bench.experts.run import Request

_MOST_PASSES = 1000


def experts(
    models: Annotated[str | None, typer.Option(help="Comma-separated mixtures; all by default.")] = None,
    gemms: Annotated[
        str, typer.Option(help="Comma-separated: gate-up, down, block (all of it).")
    ] = "gate-up,down",
    tokens: Annotated[
        str, typer.Option(help="Comma-separated numbers of tokens.")
    ] = "1,4,16,64,256,1024,4096",
    routing: Annotated[
        str, typer.Option(help="Comma-separated: uniform, or zipf (expert i as likely as 1 / i).")
    ] = "uniform",
    kernel_names: Annotated[
        str | None,
        typer.Option("--kernels", help="Comma-separated names of kernels, * allowed; all by default."),
    ] = None,
    passes: Annotated[
        int, typer.Option(help="Timings of each kernel; the fastest counts.", min=1, max=_MOST_PASSES)
    ] = 2,
    peers: Annotated[
        Path | None, typer.Option(help="Folder with other projects' kernels that are not installed.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Show this record instead of measuring; needs no GPU.")
    ] = None,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Grouped products of a mixture's experts side by side on one GPU: halfbyte's, torch's, and others'.

    CUDA graphs over rotated weights and eight routings, random data, errors against float64. Routing, permutation and
    quantization of inputs are not timed. Kernels that are missing or fail are listed with the reason.

    Example: halfbyte bench experts --models qwen3-30b-a3b --tokens 1,64 -o experts.json
    """
    if recorded is not None:
        require_writable(out)
        records = iter([read_record(recorded, EXPERTS)])
    else:
        request = _request(models, gemms, tokens, routing, kernel_names, passes, peers)
        require_writable(out)
        records = _measured(request)
    for result in records:
        write_record(out, result)
    if json_output:
        console.print_json(result)
    else:
        _show(result)


def _request(
    models: str | None,
    gemms: str,
    tokens: str,
    routing: str,
    names: str | None,
    passes: int,
    peers: Path | None,
) -> Request:
    wanted = arguments.counts(tokens, "--tokens")

    from halfbyte.bench.experts.mixtures import MIXTURES
    from halfbyte.bench.experts.run import Request

    return Request(
        models=list(MIXTURES) if models is None else arguments.names(models, "--models"),
        gemms=arguments.names(gemms, "--gemms"),
        tokens=wanted,
        routings=arguments.names(routing, "--routing"),
        kernels=[] if names is None else arguments.names(names, "--kernels"),
        passes=passes,
        peers=peers,
    )


def _measured(request: Request) -> Iterator[dict[str, Any]]:
    from halfbyte.bench.experts.run import Comparison

    return growing_records(Comparison(request), "experts", "kernels")


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from halfbyte.bench.experts.table import CAPTION, missing_lines, tables

    shown = console.wide()
    for each in tables(result["rows"]):
        table = Table(title=Text(each.title), title_justify="left")
        for column in ("tokens", *each.columns):
            table.add_column(Text(column.replace("-", "-\n")), justify="right", overflow="fold")
        for tokens, cells in each.lines:
            texts = ["" if cell is None else f"{cell}{'*' if cell.best else ' '}" for cell in cells]
            table.add_row(*map(Text, (str(tokens), *texts)))
        shown.print(table)
    shown.print(f"* {CAPTION}", markup=False, highlight=False)
    for text in missing_lines(result):
        shown.print(f"not measured: {text}", markup=False, highlight=False, soft_wrap=True)
