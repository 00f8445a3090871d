"""``halfbyte quantize``: make a quantized checkpoint."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli import console


def quantize(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory: config.json and safetensors.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    scheme: Annotated[
        str | None,
        typer.Option(help="Preset for every linear layer and expert; w4a8 unless a recipe has one."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with rules per layer.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Leave these alone: a name, re:<regex> or wildcards. Repeatable.")
    ] = None,
    clip: Annotated[str | None, typer.Option(help="Ranges: none (cover the largest weight) or mse.")] = None,
    tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks that will serve it; checked beforehand.")
    ] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace all of OUT once the new one is whole.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin files (tensors only, no code).")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Quantize MODEL into OUT without data, tensor by tensor.

    What is not quantized is copied byte for byte. An interrupted run goes on when the same command is given
    again.

    Example: halfbyte quantize ./Llama-3.1-8B -o ./Llama-3.1-8B-w4a8 --scheme w4a8
    """
    from halfbyte import api

    started = time.monotonic()
    with ExitStack() as stack:
        advance: console.Advance | None = None

        def start(total: float) -> None:
            nonlocal advance
            advance = stack.enter_context(console.progress("quantize", total / 1e6, unit="MB"))

        def step(done: float, what: str) -> None:
            assert advance is not None
            advance(done / 1e6, what)

        result = api.quantize(
            model,
            out,
            scheme,
            recipe=recipe,
            ignore=ignore or (),
            clip=clip,
            tp=tp,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            on_start=start,
            on_progress=step,
        )
    seconds = time.monotonic() - started
    if json_output:
        console.print_json(
            {
                "out": str(result.out),
                "modules": result.modules,
                "source_bytes": result.source_bytes,
                "written_bytes": result.written_bytes,
                "seconds": round(seconds, 3),
                "notes": list(result.notes),
            }
        )
        return
    for line in result.notes:
        console.note(f"note: {line}")
    console.out().print(
        f"{result.out}: {result.modules} modules quantized, {result.source_bytes / 1e6:,.0f} MB -> "
        f"{result.written_bytes / 1e6:,.0f} MB in {seconds:.1f} s",
        highlight=False,
    )
