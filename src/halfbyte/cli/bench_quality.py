"""``halfbyte bench quality``: the methods of a scheme beside each other, and beside other tools' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli import bench_arguments as arguments
from halfbyte.cli import console
from halfbyte.cli.bench_output import Json, Output, command, require_writable, write_record
from halfbyte.cli.options import Device, Dtype

if TYPE_CHECKING:
    from halfbyte.bench.quality import Rung
    from halfbyte.bench.record import Row

_LADDER = "rtn,rtn:mse,awq,gptq,awq+gptq"


def quality(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory in 16- or 32-bit floating point.")],
    scheme: Annotated[str, typer.Option(help="Preset to quantize with.")] = "w4a8",
    ladder: Annotated[
        str, typer.Option(help="Comma-separated algorithms, each as ALGORITHM or ALGORITHM:CLIP.")
    ] = _LADDER,
    clips: Annotated[
        str | None,
        typer.Option(help="Comma-separated clips to try with each algorithm that is named without one."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Calibrate on this file or directory; 'default': built-in texts.")
    ] = "default",
    samples: Annotated[int, typer.Option(help="Sequences to calibrate on.", min=1)] = 128,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; 2048, or the model's context, by default.", min=1),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="UTF-8 file to score, or prose or code from the package. Repeatable. Default: prose and code."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens in a window.", min=2)] = 1024,
    windows: Annotated[
        int | None, typer.Option(help="First so many windows of each text. Default: all.", min=1)
    ] = None,
    others: Annotated[
        list[Path] | None, typer.Option(help="Score this checkpoint of another tool too. Repeatable.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the quantized checkpoints in this folder.")] = None,
    remember_gb: Annotated[
        float,
        typer.Option(help="Memory for the original's answers; without it they are computed anew.", min=0),
    ] = 4.0,
    dtype: Annotated[
        Dtype, typer.Option(help="What everything that is not quantized computes in.")
    ] = Dtype.FLOAT32,
    device: Device = "auto",
    out: Output = None,
    json_output: Json = False,
) -> None:
    """Quantize MODEL once with each method of a ladder, and score all of them on the same tokens.

    Increases of perplexity are also given as a share of round to nearest's (the rung rtn). What fails is a row with
    the reason.

    Example: halfbyte bench quality ./Llama-3.1-8B --ladder rtn,gptq,awq+gptq --windows 40 -o quality.json
    """
    from halfbyte.bench.kernels.results import name_gpu
    from halfbyte.bench.quality import bench_quality, parse_ladder, relative_to_rtn
    from halfbyte.bench.record import record
    from halfbyte.calibration.request import CalibrationData
    from halfbyte.evaluation.texts import BUILT_IN, read_text

    names = [] if clips is None else arguments.names(clips, "--clips")
    rungs = parse_ladder(arguments.names(ladder, "--ladder"), names, scheme)
    texts = {name: read_text(name) for name in text or BUILT_IN}
    others = others or []
    require_writable(out)

    import torch
    from transformers.utils import logging

    from halfbyte import api
    from halfbyte.engines.transformers.quality_scores import QualityScores

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows: list[Row] = []
    with console.progress("quality", 1 + len(rungs) + len(others), "checkpoints") as advance:
        steps = _Steps(advance)

        def make(rung: Rung, path: Path) -> None:
            with_data = rung.choice.method.needs_data
            api.quantize(
                model,
                path,
                recipe=rung.recipe,
                data=CalibrationData(data, samples=samples, length=length) if with_data else None,
                device=device,
                on_block=lambda at: steps.making(at.done, f"{rung.name} block {at.block}/{at.blocks}"),
            )

        scores = QualityScores(
            model,
            texts,
            dtype=getattr(torch, dtype.value),
            device=device,
            context=context,
            windows=windows,
            remembered_bytes=int(remember_gb * 1e9),
            on_share=steps.scoring,
        )
        for found in bench_quality(rungs, others, make=make, scores=scores, keep=keep):
            rows = relative_to_rtn([*rows, *found])
            result = name_gpu(record(rows, command()))
            write_record(out, result)
            steps.next()
    if json_output:
        console.print_json(result)
    else:
        _print(rows)


class _Steps:
    """Progress through one checkpoint after another, each of them made in the first half of its step."""

    def __init__(self, advance: console.Advance) -> None:
        self._advance = advance
        self._reached = 0.0

    def making(self, share: float, what: str) -> None:
        self._reach(share / 2, what)

    def scoring(self, share: float) -> None:
        self._reach((1 + share) / 2, "scoring")

    def next(self) -> None:
        self._reach(1.0)
        self._reached = 0.0

    def _reach(self, share: float, what: str | None = None) -> None:
        self._advance(share - self._reached, what)
        self._reached = share


def _print(rows: list[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("rung", "scheme", "text"):
        table.add_column(title, overflow="fold")
    for title in (
        "seconds",
        "output error",
        "RTN's",
        "perplexity",
        "increase",
        "of RTN's",
        "extra loss (nats)",
        "KL mean",
        "top-1",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        if "failed" in row:
            continue
        spread = row.get("extra_nll_se")
        table.add_row(
            Text(row["rung"]),
            Text(row["scheme"]),
            Text(row["text"]),
            _cell(row, "seconds", ",.1f"),
            _cell(row, "error", ".4f"),
            _cell(row, "error_rtn", ".4f"),
            _cell(row, "perplexity", ".3f"),
            _cell(row, "increase", "+.2%"),
            _cell(row, "increase_of_rtn", ".2f"),
            _cell(row, "extra_nll", "+.4f") + ("" if spread is None else f" +- {spread:.4f}"),
            _cell(row, "kl_mean", ".4f"),
            _cell(row, "top1_agreement", ".2%"),
        )
    console.out().print(table)
    for row in rows:
        if "failed" in row:
            console.note(f"{row['rung']} failed: {row['failed']}")


def _cell(row: dict[str, Any], column: str, form: str) -> str:
    value = row.get(column)
    return "" if value is None else format(value, form)
