"""Where the results of ``halfbyte bench`` go: files, a table, or JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from halfbyte.cli import console
from halfbyte.errors import HalfbyteError

Output = Annotated[Path | None, typer.Option("--out", "-o", help="Write the JSON record to this file too.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON record instead of a table.")]


def command() -> str:
    """The command line, for the record."""
    return shlex.join(["halfbyte", *sys.argv[1:]])


def require_writable(*paths: Path | None) -> None:
    """Makes the folders of files that will be written, before anything is measured for them.

    Errors: a file that cannot be written there.
    """
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HalfbyteError(f"{path} cannot be written: {error.strerror} ({error.filename})") from error
        if path.is_dir():
            raise HalfbyteError(f"{path} is a folder; accepted: the name of a file to write")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise HalfbyteError(f"{path} cannot be written: permission denied")


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_record(path: Path | None, result: dict[str, Any]) -> None:
    """To the file asked for, if one was."""
    if path is not None:
        write(path, json.dumps(result, indent=1) + "\n")


def growing_records(comparison: Any, what: str, unit: str) -> Iterator[dict[str, Any]]:
    """The record of a comparison of kernels as it grows: a run that is stopped leaves what it had.

    comparison: with ``steps``, and ``measure(advance)``, which yields its ``Results`` again and again.
    """
    with console.progress(what, comparison.steps, unit) as advance:
        for results in comparison.measure(advance):
            yield results.record(command())


def report(rows: list[dict[str, Any]], out: Path | None, json_output: bool) -> None:
    """Rows that were all measured at once: written, and shown."""
    from halfbyte.bench.record import record

    result = record(rows, command())
    write_record(out, result)
    show(result, json_output)


def show(result: dict[str, Any], json_output: bool) -> None:
    """The rows of a record as one table, or the record as JSON."""
    from rich.table import Table
    from rich.text import Text

    if json_output:
        console.print_json(result)
        return
    rows = result["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("op", "scheme", "kernel") else "right")
    for row in rows:
        table.add_row(*(Text(str(row.get(column, ""))) for column in columns))
    console.out().print(table)
