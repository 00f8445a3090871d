"""``halfbyte bench`` on a GPU: kernels, their configurations, and whole models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli import bench_arguments as arguments
from halfbyte.cli import console
from halfbyte.cli.bench_output import (
    Json,
    Output,
    command,
    growing_records,
    require_writable,
    show,
    write,
    write_record,
)
from halfbyte.cli.kernel_record import print_record, print_tuning
from halfbyte.cli.kernel_record_file import KERNELS, read_record
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from halfbyte.bench.kernels.request import Request
    from halfbyte.schemes import Scheme

_MOST_PASSES = 1000
_MEASURING = {"shapes", "ms", "ops", "kernel_names", "group_size", "passes", "from_bf16", "peers"}


def kernels(
    context: typer.Context,
    shapes: Annotated[str | None, typer.Option(help="Comma-separated NxK of weights.")] = None,
    ms: Annotated[str | None, typer.Option(help="Comma-separated numbers of input rows M.")] = None,
    ops: Annotated[str | None, typer.Option(help="Comma-separated ops; all by default.")] = None,
    kernel_names: Annotated[
        str | None,
        typer.Option("--kernels", help="Comma-separated names of kernels, * allowed; all by default."),
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="Group size of INT4 weights; -1: one scale per channel.", max=arguments.MOST)
    ] = 128,
    passes: Annotated[
        int,
        typer.Option(help="Timings of each kernel, in turns; the fastest counts.", min=1, max=_MOST_PASSES),
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
    if recorded is not None:
        _refuse_measuring(context)
    if plot is not None:
        from halfbyte.bench.kernels.plot import require_matplotlib

        require_matplotlib()
    if recorded is not None:
        require_writable(out, markdown, plot)
        records = iter([read_record(recorded, KERNELS)])
    else:
        request = _request(shapes, ms, ops, kernel_names, group_size, passes, from_bf16, peers)
        require_writable(out, markdown, plot)
        records = _measured(request)
    for result in records:
        write_record(out, result)
    if markdown is not None:
        from halfbyte.bench.kernels.table import markdown as page

        write(markdown, page(result))
    if plot is not None:
        from halfbyte.bench.kernels.plot import plot as draw

        draw(result["rows"], plot)
    if json_output:
        console.print_json(result)
    else:
        print_record(result)


def tune(
    shapes: Annotated[str | None, typer.Option(help="Comma-separated NxK of weights.")] = None,
    ms: Annotated[str | None, typer.Option(help="Comma-separated numbers of input rows M.")] = None,
    op: Annotated[
        str, typer.Option(help="w4a8_linear, w4a16_linear, w4a8_fp8_scales_linear or w4a8_int8_linear.")
    ] = "w4a8_linear",
    passes: Annotated[
        int, typer.Option(help="Timings of each configuration; the fastest counts.", min=1, max=_MOST_PASSES)
    ] = 1,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Configurations of a Hopper kernel side by side: what its table is made from.

    Example: halfbyte bench tune --shapes 8192x8192 --ms 1,64 -o tune.json
    """
    wanted_shapes = None if shapes is None else arguments.shapes(shapes, "--shapes")
    wanted_rows = None if ms is None else arguments.counts(ms, "--ms")
    require_writable(out)

    from halfbyte.bench.kernels.request import ROWS, SHAPES
    from halfbyte.bench.kernels.results import name_gpu
    from halfbyte.bench.kernels.run import gpu
    from halfbyte.bench.kernels.tune import subjects
    from halfbyte.bench.kernels.tune import tune as measure
    from halfbyte.bench.record import record

    if op not in (known := subjects()):
        raise HalfbyteError(f"--op {op}; accepted: {', '.join(known)}")
    device = gpu("bench tune")
    cases = (wanted_shapes or SHAPES, wanted_rows or ROWS)
    rows: list[dict[str, Any]] = []
    with console.progress("tune", len(cases[0]) * len(cases[1]), "cases") as advance:
        for case in measure(op, *cases, passes, device):
            rows += case
            result = name_gpu(record(rows, command()), device)
            write_record(out, result)
            advance()
    if json_output:
        console.print_json(result)
    else:
        print_tuning(rows)


def latency(
    schemes: Annotated[
        str, typer.Option(help="Comma-separated schemes to compare; bf16: not quantized.")
    ] = "bf16,fp8,w4a8,w4a16",
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,16,64,256",
    model: Annotated[
        str, typer.Option(help="Shape of the model: llama-3-8b or qwen3-30b-a3b.")
    ] = "llama-3-8b",
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model; its own by default.", min=1, max=1024)
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt.", min=1, max=arguments.MOST)
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate after it.", min=2, max=arguments.MOST)
    ] = 128,
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Time to first token and per token of a model of real shape with random weights, through transformers.

    Decoding runs in CUDA graphs. The share of a step that its matrix products (and whole experts) take is measured too.

    Example: halfbyte bench latency --batches 1,16 --schemes bf16,w4a8 -o latency.json
    """
    wanted = arguments.names(schemes, "--schemes")
    sizes = arguments.counts(batches, "--batches")
    require_writable(out)

    from halfbyte.bench.kernels.results import name_gpu
    from halfbyte.bench.latency import bench_latency
    from halfbyte.bench.qwen3_moe_shape import Qwen3MoeShape
    from halfbyte.bench.record import record
    from halfbyte.engines.transformers.latency import RandomModel
    from halfbyte.engines.transformers.random_llama import LlamaShape

    shapes: dict[str, LlamaShape | Qwen3MoeShape] = {
        "llama-3-8b": LlamaShape(),
        "qwen3-30b-a3b": Qwen3MoeShape(layers=48),
    }
    if model not in shapes:
        raise HalfbyteError(f"--model {model!r}; accepted: {', '.join(shapes)}")
    shape = shapes[model] if layers is None else replace(shapes[model], layers=layers)
    by_name = {name: _random_scheme(name) for name in wanted}

    def build(name: str) -> RandomModel:
        return RandomModel(shape, by_name[name], prompt_tokens + new_tokens)

    rows: list[dict[str, Any]] = []
    with console.progress("latency", len(wanted) * len(sizes), "measurements") as advance:
        for row in bench_latency(build, wanted, sizes, prompt_tokens, new_tokens):
            rows.append({"model": model, **row})
            result = name_gpu(record(rows, command()))
            write_record(out, result)
            advance(1, row["scheme"])
    show(result, json_output)


def _refuse_measuring(context: typer.Context) -> None:
    """Errors: an option of a measurement beside a record that is only shown."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name) if option.name in _MEASURING else None
        if source is not None and source.name == "COMMANDLINE":
            raise HalfbyteError(f"--from shows what was measured; not accepted beside it: {option.opts[0]}")


def _request(
    shapes: str | None,
    ms: str | None,
    ops: str | None,
    names: str | None,
    group_size: int,
    passes: int,
    from_bf16: bool,
    peers: Path | None,
) -> Request:
    if group_size != -1 and group_size < 1:
        raise HalfbyteError(f"--group-size {group_size}; accepted: a positive size such as 128, or -1")
    wanted_shapes = None if shapes is None else arguments.shapes(shapes, "--shapes")
    wanted_rows = None if ms is None else arguments.counts(ms, "--ms")
    wanted_ops = None if ops is None else arguments.names(ops, "--ops")
    wanted_kernels = [] if names is None else arguments.names(names, "--kernels")

    from halfbyte.bench.kernels.request import OPS, ROWS, SHAPES, Request

    return Request(
        shapes=wanted_shapes or SHAPES,
        rows=wanted_rows or ROWS,
        ops=wanted_ops or OPS,
        kernels=wanted_kernels,
        group_size=None if group_size == -1 else group_size,
        passes=passes,
        peers=peers,
        from_bf16=from_bf16,
    )


def _measured(request: Request) -> Iterator[dict[str, Any]]:
    from halfbyte.bench.kernels.run import Comparison

    return growing_records(Comparison(request), "kernels", "measurements")


def _random_scheme(name: str) -> Scheme | None:
    """None for weights that are not quantized.

    Errors: a name that is not known, or a scheme whose weights cannot be drawn at random.
    """
    import torch

    from halfbyte.engines.transformers.random_llama import drawn_format, random_weight
    from halfbyte.schemes import resolve

    if name.lower() == "bf16":
        return None
    scheme = resolve(name)
    try:
        # As many as the largest groups and blocks have on a side.
        random_weight(drawn_format(scheme.weights), 128, 128, torch.Generator())
    except HalfbyteError as error:
        raise HalfbyteError(f"scheme {name}: {error}") from error
    return scheme
