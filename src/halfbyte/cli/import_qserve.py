"""``halfbyte import-qserve``: weights of OmniServe become a checkpoint that says what it is."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli import console


def import_qserve(
    source: Annotated[
        Path, typer.Argument(help="Directory with config.json and quant_model.pt or the like.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT once the new one is whole.")
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="Read quant_model.pt, pytorch_model.bin (tensors only, no code)."
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Copy W4A8 weights that OmniServe or DeepCompressor converted into a safetensors checkpoint.

    Its config.json says how weights are quantized, which those tools leave out; tensors stay as they are. halfbyte and
    SGLang (with its qoq method) run the result.

    Example: halfbyte import-qserve ./Llama-3-8B-QServe -o ./Llama-3-8B-qoq --allow-pickle
    """
    from halfbyte.checkpoint.qserve_import import import_qserve as convert
    from halfbyte.checkpoint.reader import Checkpoint

    started = time.monotonic()
    with ExitStack() as stack:
        tensors = Checkpoint.open(source, allow_pickle=allow_pickle).tensors
        total = sum(info.nbytes for info in tensors.values())
        advance = stack.enter_context(console.progress("import", total / 1e6, unit="MB"))
        result = convert(
            source,
            out,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            on_tensor=lambda nbytes, name: advance(nbytes / 1e6, name),
        )
    seconds = time.monotonic() - started
    if json_output:
        console.print_json(
            {
                "out": str(result.output),
                "group_size": result.group_size,
                "modules": result.modules,
                "eight_bit": result.eight_bit,
                "written_bytes": result.nbytes,
                "seconds": round(seconds, 3),
                "notes": result.notes,
            }
        )
        return
    for line in result.notes:
        console.note(f"note: {line}")
    if result.eight_bit:
        console.note(
            f"note: zeros of {result.eight_bit} weights are no multiples of their scales: halfbyte holds them as INT8 "
            "when it runs them"
        )
    groups = "groups of 128" if result.group_size > 0 else "a scale per row"
    console.out().print(
        f"{result.output}: {result.modules} weights in {groups}, {result.nbytes / 1e6:,.0f} MB in {seconds:.1f} s",
        highlight=False,
    )
