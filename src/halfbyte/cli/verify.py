"""``halfbyte verify``: whether a quantized checkpoint is what it should be."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from halfbyte.audit.patterns import MergedNames, Pattern, split_numbers
from halfbyte.audit.verification import DEFAULT_MAX_ERROR, Verification, WeightCheck
from halfbyte.cli import console


class Engine(str, Enum):
    """Engines whose rules can be required."""

    VLLM = "vllm"


def verify(
    out: Annotated[Path, typer.Argument(help="Directory of the quantized checkpoint.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="The checkpoint that it was made from, to compare with."),
    ] = None,
    require: Annotated[
        Engine | None, typer.Option(help="Fail if this engine's W4A8 rules refuse the checkpoint.")
    ] = None,
    max_error: Annotated[
        float, typer.Option(min=0, help="Relative error of a weight that fails the check.")
    ] = (DEFAULT_MAX_ERROR),
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="MODEL may hold pickle files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Read a quantized checkpoint with an independent decoder and report every weight's error and every fault.

    Exits with 1 if the check failed. Example: halfbyte verify Llama-3.1-8B-W4A8 --against Llama-3.1-8B
    """
    from halfbyte.audit.verify import total_bytes
    from halfbyte.audit.verify import verify as check

    with console.progress("verify", max(1, total_bytes(out))) as advance:
        found = check(
            out,
            against=against,
            require_vllm=require is Engine.VLLM,
            max_error=max_error,
            allow_pickle=allow_pickle,
            progress=advance,
        )
    if as_json:
        console.print_json(found.as_dict())
    else:
        _print(found)
    if not found.passed:
        raise typer.Exit(console.EXIT_CHECK_FAILED)


def _print(found: Verification) -> None:
    out = console.out()
    if found.weights:
        out.print(_weights_table(found.weights))
        out.print()
    out.print(_findings_table(found))
    out.print("vLLM W4A8: " + _vllm_verdict(found), markup=False, highlight=False)
    if found.passed:
        out.print("passed", style="bold green")
    else:
        out.print(f"failed: {len(found.errors)} errors", style="bold red")


def _weights_table(weights: list[WeightCheck]) -> Table:
    """Weights that differ in layer and expert numbers only share a row; its error is the mean and the worst."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("weight", overflow="fold")
    for title in ("count", "scheme", "shape", "scales", "relative error", "worst", "largest error"):
        table.add_column(title, justify="left" if title == "scheme" else "right", no_wrap=True)
    merged: dict[tuple[Pattern, str, tuple[int, ...]], tuple[MergedNames, list[WeightCheck]]] = {}
    for weight in weights:
        pattern, numbers = split_numbers(weight.name)
        names, members = merged.setdefault((pattern, weight.scheme, weight.shape), (MergedNames(pattern), []))
        names.add(numbers)
        members.append(weight)
    for names, members in merged.values():
        first = members[0]
        lows = [weight.scale_min for weight in members if weight.scale_min is not None]
        highs = [weight.scale_max for weight in members if weight.scale_max is not None]
        errors = [weight.relative_error for weight in members if weight.relative_error is not None]
        largest = [weight.largest_error for weight in members if weight.largest_error is not None]
        table.add_row(
            escape(str(names)),
            str(names.count),
            first.scheme,
            "x".join(map(str, first.shape)),
            f"{min(lows):.3g} .. {max(highs):.3g}" if lows and highs else "",
            f"{sum(errors) / len(errors):.4f}" if errors else "",
            f"{max(errors):.4f}" if errors else "",
            f"{max(largest):.3g}" if largest else "",
        )
    return table


def _findings_table(found: Verification) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "rule", "where", "found"):
        table.add_column(title, overflow="fold")
    styles = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in found.findings:
        text = f"[{styles[finding.level]}]{finding.level}[/]"
        table.add_row(text, finding.rule, escape(finding.where), escape(finding.message))
    return table


def _vllm_verdict(found: Verification) -> str:
    if found.vllm is None:
        return "no weight is INT4 with FP8 activations, so its rules do not apply"
    if not found.vllm:
        return "accepted"
    first = found.vllm[0]
    more = f" (and {len(found.vllm) - 1} more like this)" if len(found.vllm) > 1 else ""
    return f"no, because {first.where} has {first.message}{more}"
