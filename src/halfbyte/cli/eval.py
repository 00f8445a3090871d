"""``halfbyte eval``: what a model scores, and what it lost against a baseline."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from halfbyte.cli import console
from halfbyte.cli.options import Device, Dtype, Kernel
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from halfbyte.evaluation.result import Evaluation


def evaluate(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory, quantized or not.")],
    baseline: Annotated[
        Path | None, typer.Option(help="Checkpoint to compare with on the same tokens.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="UTF-8 file, or prose or code from the package. Repeatable. Default: prose and code."
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next. Default: no overlap.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="First so many windows of each text. Default: all.")
    ] = None,
    bos: Annotated[
        bool, typer.Option("--bos", help="Put the start token in front of each window (Gemma needs it).")
    ] = False,
    dtype: Annotated[
        Dtype, typer.Option(help="What everything that is not quantized computes in.")
    ] = Dtype.FLOAT32,
    device: Device = "auto",
    kernel: Kernel = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="Fail if perplexity rises by more than so many percent.", min=0)
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Fail if the mean KL (nats) is above this.", min=0)
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Fail if top-1 agreement (0 to 1) is below this.", min=0, max=1)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure perplexity, and KL divergence and top-1 agreement against a baseline.

    Perplexity is per token: it compares models that share a tokenizer. With a limit (--max-..., --min-...)
    the command is a gate: it ends with 1 where a text breaks one.

    Example: halfbyte eval ./Llama-3.1-8B-w4a8 --baseline ./Llama-3.1-8B --max-kl 0.05
    """
    from halfbyte.evaluation.texts import BUILT_IN, read_text

    limits = {"max_ppl_increase": max_ppl_increase, "max_kl": max_kl, "min_top1": min_top1}
    if baseline is None and any(limit is not None for limit in limits.values()):
        raise HalfbyteError("a limit needs something to compare with: pass --baseline MODEL")
    texts = {name: read_text(name) for name in text or BUILT_IN}

    import torch
    from transformers.utils import logging

    from halfbyte import api
    from halfbyte.evaluation.evaluate import evaluate as score
    from halfbyte.evaluation.gate import Gate

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    started = time.monotonic()
    computed_in = getattr(torch, dtype.value)
    loaded, tokenizer = api.load(model, dtype=computed_in, kernel=kernel, device=device)
    reference, reference_tokenizer = (
        (None, None) if baseline is None else api.load(baseline, dtype=computed_in, device=device)
    )
    results: dict[str, Evaluation] = {}
    for name, content in texts.items():
        with ExitStack() as stack:
            results[name] = score(
                loaded,
                tokenizer,
                content,
                baseline=reference,
                baseline_tokenizer=reference_tokenizer,
                context=context,
                stride=stride,
                windows=windows,
                bos=bos,
                on_window=_progress(stack, f"eval {name}"),
            )
    gate = Gate(**limits)
    broken = [f"{name}: {line}" for name, result in results.items() for line in gate.failures(result)]
    if json_output:
        console.print_json(
            {
                "model": str(model),
                "baseline": None if baseline is None else str(baseline),
                "dtype": dtype.value,
                "device": str(loaded.device),
                "texts": {name: result.to_dict() for name, result in results.items()},
                "gate": {**limits, "passed": not broken, "broken": broken} if gate.is_set else None,
                "seconds": round(time.monotonic() - started, 3),
            }
        )
    else:
        _print(results, baseline is not None, f"{dtype.value} on {loaded.device}")
        for line in broken:
            console.note(f"gate failed: {line}")
        if gate.is_set and not broken:
            console.note("gate passed")
    if broken:
        raise typer.Exit(console.EXIT_CHECK_FAILED)


def _progress(stack: ExitStack, title: str) -> Callable[[int, int], None]:
    """A progress bar on ``stack`` that learns its length from the first report."""
    advance: console.Advance | None = None

    def on_window(done: int, total: int) -> None:
        nonlocal advance
        if advance is None:
            advance = stack.enter_context(console.progress(title, total, unit="windows"))
        else:
            advance()

    return on_window


def _print(results: dict[str, Evaluation], compared: bool, computed: str) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("text", overflow="fold")
    titles = ["tokens scored", "perplexity"]
    if compared:
        titles += ["baseline", "increase", "extra loss (nats)", "KL mean", "KL p99", "top-1 agreement"]
    for title in titles:
        table.add_column(title, justify="right")
    for name, result in results.items():
        cells = [f"{result.tokens_scored:,}", f"{result.perplexity:.3f}"]
        if (against := result.baseline) is not None:
            error = "" if against.extra_nll_se is None else f" +- {against.extra_nll_se:.4f}"
            cells += [
                f"{against.perplexity:.3f}",
                f"{against.perplexity_increase:+.2%}",
                f"{against.extra_nll:+.4f}{error}",
                f"{against.kl_mean:.4f}",
                f"{against.kl_p99:.4f}",
                f"{against.top1_agreement:.2%}",
            ]
        table.add_row(escape(name), *cells)
    out = console.out()
    out.print(table)
    shape = next(iter(results.values()))
    counts = ", ".join(f"{name} {r.windows} of {r.windows_in_text}" for name, r in results.items())
    start = "start token in front" if shape.bos else "no start token"
    out.print(
        f"windows of {shape.context} tokens, stride {shape.stride}, {start}, {computed}; windows: {counts}",
        markup=False,
        highlight=False,
    )
