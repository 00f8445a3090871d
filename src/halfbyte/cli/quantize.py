"""``halfbyte quantize``: make a quantized checkpoint."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli import console
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from halfbyte.quantization.walk import Progress


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
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Steps joined by +: rotation, smoothquant or awq, rtn or gptq. "
            "Default: a recipe's, or awq+gptq with --data, rtn without."
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(help="Ranges of least error: none, mse (of weights) or output (of layers, with data)."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Whose W4A8 kernel's numbers to round to: halfbyte (exact scales) or vllm. "
            "Default: a recipe's, or halfbyte."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Of the files: compressed-tensors, qserve with --scheme w4a8-int8, or w4afp8 (SGLang's, of mixtures). "
            "Default: a recipe's, or compressed-tensors."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Calibrate on this JSONL, parquet or text file or directory; 'default': built-in texts."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Sequences to calibrate on; 128 by default.")] = None,
    length: Annotated[
        str | None,
        typer.Option(help="Tokens of a sequence, or several numbers with commas; 2048 by default."),
    ] = None,
    mask_role: Annotated[
        list[str] | None,
        typer.Option(
            help="Messages of this role enter no statistic. Repeatable; system, developer and tool by default."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides which data is drawn; 0 by default.")] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="Where hidden states wait between blocks: memory (the default) or disk."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where blocks are calibrated: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    redo: Annotated[
        list[str] | None,
        typer.Option(
            help="Quantize the blocks of these modules again, keep the others: layers.7.*, re:<regex>. Repeatable."
        ),
    ] = None,
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
    """Quantize MODEL into OUT: tensor by tensor, or with --data block by block.

    What is not quantized is copied byte for byte. An interrupted run goes on when the same command is given
    again. With data, OUT/quantization_report.json says how far every layer's output moved.

    Example: halfbyte quantize ./Llama-3.1-8B -o ./Llama-3.1-8B-w4a8 --scheme w4a8 --data default
    """
    from halfbyte import api
    from halfbyte.calibration.ranks import is_first_process
    from halfbyte.calibration.request import CalibrationData

    started = time.monotonic()
    with ExitStack() as stack:
        advance: console.Advance | None = None
        reached = 0.0

        def start(total: float) -> None:
            nonlocal advance
            advance = stack.enter_context(console.progress("quantize", total / 1e6, unit="MB"))

        def step(done: float, what: str) -> None:
            assert advance is not None
            advance(done / 1e6, what)

        def block(state: Progress) -> None:
            nonlocal advance, reached
            if advance is None:
                advance = stack.enter_context(console.progress("quantize", 100, unit="%"))
            advance(100 * (state.done - reached), _doing(state))
            reached = state.done

        calibration = CalibrationData(
            data,
            samples=samples,
            length=_lengths(length),
            masked_roles=mask_role or None,
            activations=activations,
            seed=seed,
        )
        result = api.quantize(
            model,
            out,
            scheme,
            recipe=recipe,
            ignore=ignore or (),
            algorithm=algorithm,
            clip=clip,
            target=target,
            format=format,
            data=calibration,
            device=device,
            redo=redo or (),
            tp=tp,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            on_start=start,
            on_progress=step,
            on_block=block,
        )
    seconds = time.monotonic() - started
    if not is_first_process():
        return
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


def _lengths(given: str | None) -> list[int] | None:
    if given is None:
        return None
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise HalfbyteError(f"--length {given!r}; accepted: numbers of tokens, separated by commas") from None


def _doing(state: Progress) -> str:
    """One line: block, what is done with it, how fast or with which error."""
    line = f"block {state.block}/{state.blocks} {state.doing}"
    if state.tokens_per_s is not None:
        line += f", {state.tokens_per_s:,.0f} tokens/s"
    if state.module is not None:
        line += f" {state.module.rpartition('.')[2]}"
        if state.error is not None:
            line += f", error {state.error:.3f}"
    return line
