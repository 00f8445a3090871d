"""``halfbyte import-gguf``: a GGUF file becomes a BF16 checkpoint."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli import console


def import_gguf(
    file: Annotated[Path, typer.Argument(help="GGUF file of a llama, qwen2 or qwen3 model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT once the new one is whole.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a GGUF FILE to a BF16 Hugging Face checkpoint with tokenizer and chat template.

    Quantized weights are dequantized and rounded to bfloat16: the result computes what the GGUF does up to
    that rounding; it is not the model that the GGUF was made from.

    Example: halfbyte import-gguf SmolLM2-135M-Instruct.Q4_1.gguf -o SmolLM2-135M-Instruct
    """
    from halfbyte.checkpoint.gguf import import_gguf as convert

    started = time.monotonic()
    with ExitStack() as stack:
        advance: console.Advance | None = None

        def step(name: str, values: int, total: int) -> None:
            nonlocal advance
            if advance is None:
                bar = console.progress("import", 2 * total / 1e6, unit="MB")
                advance = stack.enter_context(bar)
            advance(2 * values / 1e6, name)

        result = convert(file, out, overwrite=overwrite, on_tensor=step)
    seconds = time.monotonic() - started
    if json_output:
        console.print_json(
            {
                "source": str(result.source),
                "out": str(result.output),
                "architecture": result.architecture,
                "parameters": result.parameters,
                "stored_types": result.stored_types,
                "written_bytes": result.nbytes,
                "seconds": round(seconds, 3),
                "notes": result.notes,
            }
        )
        return
    for line in result.notes:
        console.note(f"note: {line}")
    types = ", ".join(f"{count} {name}" for name, count in sorted(result.stored_types.items()))
    console.out().print(
        f"{result.output}: {result.architecture}, {result.parameters:,} parameters ({types}) -> "
        f"{result.nbytes / 1e6:,.0f} MB of bfloat16 in {seconds:.1f} s",
        highlight=False,
    )
