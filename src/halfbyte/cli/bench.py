"""``halfbyte bench``: measurements, always beside a baseline from the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from halfbyte.cli import bench_arguments as arguments
from halfbyte.cli.bench_calibration import calibration
from halfbyte.cli.bench_experts import experts
from halfbyte.cli.bench_folder import Folder, working_folder
from halfbyte.cli.bench_gpu import kernels, latency, tune
from halfbyte.cli.bench_output import Json, Output, report, require_writable
from halfbyte.cli.bench_quality import quality

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure halfbyte beside a baseline. Results as a table, JSON, or a file.",
    rich_markup_mode=None,
)
bench.command("kernels")(kernels)
bench.command("tune")(tune)
bench.command("experts")(experts)
bench.command("latency")(latency)
bench.command("quality")(quality)
bench.command("calibration")(calibration)


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

    require_writable(out)
    with working_folder(folder) as path:
        report(bench_quantize(path, gigabytes, scheme or ["w4a8"], repeats), out, json_output)


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

    require_writable(out)
    with working_folder(folder) as path:
        report(bench_inspect(path, repeats), out, json_output)


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
    texts = shape or ["576x576", "1536x576", "576x1536", "4096x4096", "14336x4096"]
    shapes = [arguments.shape(text, "--shape") for text in texts]
    counts = arguments.counts(rows, "--rows")
    require_writable(out)

    from halfbyte.bench.linear import bench_linear

    report(bench_linear(shapes, counts, scheme or ["w4a16", "w4a8"]), out, json_output)
