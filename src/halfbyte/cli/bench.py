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
from halfbyte.cli.kernel_record import print_record, print_tuning, read_record
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
    _report(bench_linear(shapes, _counts(rows, "--rows"), scheme or ["w4a16", "w4a8"]), out, json_output)


@bench.command("kernels")
def kernels(
    shapes: Annotated[str | None, typer.Option(help="Comma-separated NxK of weights.")] = None,
    ms: Annotated[str | None, typer.Option(help="Comma-separated numbers of input rows M.")] = None,
    ops: Annotated[str | None, typer.Option(help="Comma-separated ops; all by default.")] = None,
    kernel_names: Annotated[
        str | None,
        typer.Option("--kernels", help="Comma-separated names of kernels, * allowed; all by default."),
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="Group size of INT4 weights; -1: one scale per channel.")
    ] = 128,
    passes: Annotated[
        int, typer.Option(help="Timings of each kernel, in turns; the fastest counts.", min=1)
    ] = 3,
    from_bf16: Annotated[
        bool, typer.Option("--from-bf16", help="Time halfbyte's 8-bit kernels from BF16 inputs too.")
    ] = False,
    peers: Annotated[
        Path | None, typer.Option(help="Folder with other projects' kernels that are not installed.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Show this record instead of measuring; needs no GPU.")
    ] = None,
    out: Output = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file too.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time over floor against M into this file (.png, .svg, .pdf).")
    ] = None,
    json_output: Json = False,
) -> None:
    """GPU kernels side by side on one GPU: halfbyte's, torch's, and others' where they can be imported.

    CUDA graphs over rotated weights, random data, errors against float64. Kernels that are missing or fail are
    listed with the reason.

    Example: halfbyte bench kernels --shapes 8192x8192 --ms 1,64 --ops w4a8_linear -o kernels.json
    """
    if plot is not None:
        from halfbyte.bench.kernels.plot import require_matplotlib

        require_matplotlib()
    if recorded is not None:
        records = iter([read_record(recorded)])
    else:
        records = _kernel_records(shapes, ms, ops, kernel_names, group_size, passes, from_bf16, peers)
    for result in records:
        if out is not None:
            _write(out, json.dumps(result, indent=1) + "\n")
    if markdown is not None:
        from halfbyte.bench.kernels.table import markdown as page

        _write(markdown, page(result))
    if plot is not None:
        from halfbyte.bench.kernels.plot import plot as draw

        draw(result["rows"], plot)
    if json_output:
        console.print_json(result)
    else:
        print_record(result)


@bench.command("tune")
def tune(
    shapes: Annotated[str | None, typer.Option(help="Comma-separated NxK of weights.")] = None,
    ms: Annotated[str | None, typer.Option(help="Comma-separated numbers of input rows M.")] = None,
    op: Annotated[str, typer.Option(help="w4a8_linear or w4a16_linear.")] = "w4a8_linear",
    passes: Annotated[
        int, typer.Option(help="Timings of each configuration; the fastest counts.", min=1)
    ] = 1,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Configurations of a Hopper kernel side by side: what its table is made from.

    Example: halfbyte bench tune --shapes 8192x8192 --ms 1,64 -o tune.json
    """
    wanted_shapes = [_shape(text, "--shapes") for text in _parts(shapes)]
    wanted_rows = _counts(ms, "--ms") if ms is not None else None

    from halfbyte.bench.kernels.request import ROWS, SHAPES
    from halfbyte.bench.kernels.run import gpu
    from halfbyte.bench.kernels.tune import subjects
    from halfbyte.bench.kernels.tune import tune as measure
    from halfbyte.bench.record import record

    if op not in (known := subjects()):
        raise HalfbyteError(f"--op {op}; accepted: {', '.join(known)}")
    cases = (wanted_shapes or SHAPES, wanted_rows or ROWS)
    rows: list[dict[str, Any]] = []
    with console.progress("tune", len(cases[0]) * len(cases[1]), "cases") as advance:
        for case in measure(op, *cases, passes, gpu()):
            rows += case
            if out is not None:
                _write(out, json.dumps(record(rows, _command()), indent=1) + "\n")
            advance()
    if json_output:
        console.print_json(record(rows, _command()))
    else:
        print_tuning(rows)


@bench.command("latency")
def latency(
    schemes: Annotated[
        str, typer.Option(help="Comma-separated schemes to compare; bf16: not quantized.")
    ] = "bf16,fp8,w4a8,w4a16",
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,16,64,256",
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate after it.", min=2)] = 128,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Time to first token and per token of an 8B-shaped Llama with random weights, through transformers.

    Decoding runs in CUDA graphs. The share of a step that its matrix products take is measured too.

    Example: halfbyte bench latency --batches 1,16 --schemes bf16,w4a8 -o latency.json
    """
    sizes = _counts(batches, "--batches")

    from halfbyte.bench.latency import bench_latency
    from halfbyte.engines.transformers.latency import RandomLlama
    from halfbyte.engines.transformers.random_llama import LlamaShape
    from halfbyte.schemes import resolve

    def build(name: str) -> RandomLlama:
        scheme = None if name == "bf16" else resolve(name)
        return RandomLlama(LlamaShape(layers=layers), scheme, prompt_tokens + new_tokens)

    result = bench_latency(build, _parts(schemes), sizes, prompt_tokens, new_tokens)
    _report(result, out, json_output)


def _kernel_records(
    shapes: str | None,
    ms: str | None,
    ops: str | None,
    names: str | None,
    group_size: int,
    passes: int,
    from_bf16: bool,
    peers: Path | None,
) -> Iterator[dict[str, Any]]:
    """The record as it grows, shape by shape: a run that is stopped leaves what it had."""
    if group_size != -1 and group_size < 1:
        raise HalfbyteError(f"--group-size {group_size}; accepted: a positive size such as 128, or -1")
    wanted_shapes = [_shape(text, "--shapes") for text in _parts(shapes)]
    wanted_rows = _counts(ms, "--ms") if ms is not None else None

    from halfbyte.bench.kernels.request import OPS, ROWS, SHAPES, Request
    from halfbyte.bench.kernels.run import Comparison

    comparison = Comparison(
        Request(
            shapes=wanted_shapes or SHAPES,
            rows=wanted_rows or ROWS,
            ops=_parts(ops) or OPS,
            kernels=_parts(names),
            group_size=None if group_size == -1 else group_size,
            passes=passes,
            peers=peers,
            from_bf16=from_bf16,
        )
    )
    with console.progress("kernels", comparison.steps, "measurements") as advance:
        for results in comparison.measure(advance):
            yield results.record(_command())


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _counts(text: str, option: str) -> list[int]:
    if not all(part.isdecimal() and int(part) for part in _parts(text)) or not text:
        raise HalfbyteError(
            f"{option} {text!r}; accepted: numbers with commas between them, such as 1,16,128"
        )
    return [int(part) for part in _parts(text)]


def _shape(text: str, option: str = "--shape") -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise HalfbyteError(f"{option} {text!r}; accepted: out_features x in_features, such as 4096x4096")
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


def _command() -> str:
    return shlex.join(["halfbyte", *sys.argv[1:]])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _report(rows: list[dict[str, Any]], out: Path | None, json_output: bool) -> None:
    from rich.table import Table

    from halfbyte.bench.record import record

    result = record(rows, _command())
    if out is not None:
        _write(out, json.dumps(result, indent=1) + "\n")
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
