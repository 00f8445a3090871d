"""``halfbyte bench calibration``: how long a calibrated run takes and what memory it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli import bench_arguments as arguments
from halfbyte.cli import console
from halfbyte.cli.bench_folder import Folder, working_folder
from halfbyte.cli.bench_output import Json, Output, command, require_writable, write_record

if TYPE_CHECKING:
    from halfbyte.bench.record import Row


def calibration(
    shape: Annotated[str, typer.Option(help="8b (Llama 3.1), 30b-a3b (Qwen3), or tiny.")] = "8b",
    layers: Annotated[
        int | None,
        typer.Option(help="Make so many layers and extrapolate the time to all. Default: all.", min=1),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Sequences of random tokens.", min=1, max=arguments.MOST)
    ] = 128,
    length: Annotated[int, typer.Option(help="Tokens of each.", min=1, max=arguments.MOST)] = 2048,
    scheme: Annotated[str, typer.Option(help="Preset to quantize with.")] = "w4a8",
    algorithm: Annotated[str, typer.Option(help="Steps joined by +, as for halfbyte quantize.")] = "gptq",
    clip: Annotated[str | None, typer.Option(help="none, mse or output, as for halfbyte quantize.")] = None,
    calibrated: Annotated[
        int | None,
        typer.Option(
            help="Calibrate the first so many blocks, round others to nearest. Default: all.", min=1
        ),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="Where hidden states wait between blocks: memory or disk.")
    ] = "memory",
    device: Annotated[
        str, typer.Option(help="Where blocks are calibrated: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    folder: Folder = None,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Calibrated quantization of random weights in real shapes: seconds by phase and block, peak memory, bytes moved.

    The run is a process of its own. Making the checkpoint is not timed; its size is said before.

    Example: halfbyte bench calibration --shape 30b-a3b --layers 4 -o calibration.json
    """
    from halfbyte.bench.calibration import CalibrationCase, bench_calibration
    from halfbyte.bench.kernels.results import name_gpu
    from halfbyte.bench.record import record
    from halfbyte.recipe import Recipe

    recipe = Recipe(scheme=scheme, algorithm=algorithm, clip=clip)
    case = CalibrationCase(recipe, shape, layers, samples, length, device, activations, calibrated)
    require_writable(out)
    with working_folder(folder) as path:
        rows = bench_calibration(path, case, console.note)
    result = name_gpu(record(rows, command()))
    write_record(out, result)
    if json_output:
        console.print_json(result)
    else:
        _print(rows)


def _print(rows: list[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    total, *blocks = rows
    page = console.out()
    figures = Table(show_header=False)
    figures.add_column()
    figures.add_column(justify="right")
    for name, value in total.items():
        figures.add_row(name, Text(_cell(value)))
    page.print(figures)
    columns = ["block", *(name for name in blocks[0] if name.endswith("_s"))]
    table = Table(*columns)
    for row in blocks:
        table.add_row(*(_cell(row[column]) for column in columns))
    page.print(table)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
