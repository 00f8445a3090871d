"""``halfbyte plan``: which scheme a model's linear layers run fastest in, from measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from halfbyte.cli import bench_arguments as arguments
from halfbyte.cli import console
from halfbyte.planner.linear_layers import LinearTimes, linear_times
from halfbyte.planner.measured import measured_table

# What is asked first: INT8 against FP8 activations, then against FP8 weights.
_COMPARED = (("w4a8-int8", "w4a8"), ("w4a8-int8", "fp8"), ("w4a8", "fp8"))


def plan(
    model: Annotated[
        Path, typer.Argument(help="Directory of a checkpoint; its headers are read, no weight.")
    ],
    gpu: Annotated[str, typer.Option(help="GPU whose measured times count.")] = "H200",
    batch: Annotated[
        str,
        typer.Option(help="Comma-separated tokens of a step: sequences that decode, or a prompt's tokens."),
    ] = "1,16,64,128,256,512,2048,8192",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a model's linear layers take in each scheme on a GPU, from measured times, and which scheme wins when.

    Attention, norms and quantization of activations are not counted; experts are not yet.

    Example: halfbyte plan Llama-3.1-8B --gpu H200 --batch 1,64,2048
    """
    from halfbyte.checkpoint.reader import Checkpoint

    tokens = sorted(set(arguments.counts(batch, "--batch")))
    table = measured_table(gpu)
    found = linear_times(Checkpoint.open(model), table, tokens)
    comparisons = {f"{one} against {other}": found.comparison(one, other) for one, other in _COMPARED}
    if as_json:
        console.print_json(
            {
                "model": found.model,
                "gpu": found.gpu,
                "tokens": list(found.tokens),
                "products": [
                    {"out_features": n, "in_features": k, "count": count}
                    for (n, k), count in found.products.items()
                ],
                "linear_ms": {scheme: list(times) for scheme, times in found.times.items()},
                "fastest": [found.fastest(index) for index in range(len(tokens))],
                "comparisons": comparisons,
                "notes": list(found.notes),
            }
        )
        return
    out = console.out()
    out.print(_table(found))
    for line in (line for lines in comparisons.values() for line in lines):
        out.print(line, markup=False, highlight=False)
    for line in found.notes:
        console.note(f"note: {line}")


def _table(found: LinearTimes) -> Table:
    table = Table(
        title=f"{found.model} on {found.gpu}: milliseconds of all linear layers", title_justify="left"
    )
    table.add_column("tokens", justify="right")
    for scheme in found.times:
        table.add_column(scheme, justify="right")
    for index, tokens in enumerate(found.tokens):
        fastest = found.fastest(index)
        cells = [
            f"{times[index]:.3g}" + ("*" if scheme == fastest else "")
            for scheme, times in found.times.items()
        ]
        table.add_row(str(tokens), *cells)
    return table
