"""``halfbyte generate``: use a checkpoint at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli import console
from halfbyte.cli.options import Device, Dtype, Kernel
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    import torch

    from halfbyte.engines.transformers.generation import Generation


def generate(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory, quantized or not.")],
    prompt: Annotated[str, typer.Argument(help="What to answer or go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest token. Above: sample.", min=0)
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="With or without the chat template. Default: if there is one."),
    ] = None,
    kernel: Kernel = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the checkpoint's own.")] = None,
    device: Device = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: all cores.", min=1, max=1024)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Generate text after PROMPT, as it is made. Speed and peak memory go to stderr.

    Example: halfbyte generate ./SmolLM2-135M-w4a8 "Why is the sky blue?" --max-new-tokens 100
    """
    import torch
    from transformers.utils import logging

    from halfbyte.api import load
    from halfbyte.engines.transformers.generation import generate as generate_text

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if threads is not None:
        torch.set_num_threads(threads)
    computed_in = getattr(torch, dtype.value) if dtype else None
    loaded, tokenizer = load(model, dtype=computed_in, kernel=kernel, device=device)
    result = generate_text(
        loaded,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        on_text=None if json_output else _write,
    )
    if json_output:
        console.print_json(
            {
                "text": result.text,
                "prompt_tokens": result.prompt_tokens,
                "new_tokens": result.new_tokens,
                "ttft_ms": round(result.ttft_ms, 3),
                "tpot_ms": None if result.tpot_ms is None else round(result.tpot_ms, 3),
                "tokens_per_s": None if result.tokens_per_s is None else round(result.tokens_per_s, 3),
                "device": str(loaded.device),
                "peak_memory_bytes": _peak_memory(),
                "peak_gpu_memory_bytes": _peak_gpu_memory(loaded.device),
            }
        )
        return
    _write("\n")
    console.note(_speed(result, loaded.device))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        raise HalfbyteError(
            f"the text cannot be shown in {sys.stdout.encoding}; set PYTHONIOENCODING=utf-8, or use --json"
        ) from None
    sys.stdout.flush()


def _speed(result: Generation, device: torch.device) -> str:
    words = (
        f"prompt: {result.prompt_tokens} tokens in {result.ttft_ms:,.0f} ms "
        f"({result.prompt_tokens_per_s:,.1f} tokens/s); new: {result.new_tokens} tokens"
    )
    if result.tpot_ms is not None and result.tokens_per_s is not None:
        words += f", {result.tpot_ms:,.1f} ms each ({result.tokens_per_s:,.1f} tokens/s)"
    on_gpu = _peak_gpu_memory(device)
    gpu = "" if on_gpu is None else f", of the GPU {on_gpu / 1e9:.2f} GB"
    return f"{words}; {device}, peak memory {_peak_memory() / 1e9:.2f} GB{gpu}"


def _peak_memory() -> int:
    """Most memory that this process has held at once, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_gpu_memory(device: torch.device) -> int | None:
    """Most memory of the GPU that tensors have taken at once, in bytes; none on the CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
