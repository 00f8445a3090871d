"""How commands speak: tables and JSON on stdout, progress and notes on stderr, plain lines without a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
_PLAIN_INTERVAL_S = 5.0


def out() -> Console:
    """Console for results. Without a terminal it is wide enough that no table cell is cut."""
    return Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=160, no_color=True)


def wide() -> Console:
    """The same for tables of a dozen columns."""
    shown = out()
    return shown if shown.is_terminal else Console(width=1000, no_color=True)


def err() -> Console:
    """Console for progress, notes and errors."""
    return Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=4096, no_color=True)


def print_json(value: Any) -> None:
    """The one JSON document of a command, on stdout. NaN and Inf are refused rather than written."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def note(message: str) -> None:
    """A line for the person at the terminal; never part of the result."""
    err().print(message, markup=False, highlight=False)


class Advance(Protocol):
    """Says that ``step`` more units are done; ``what`` names the one at work now."""

    def __call__(self, step: float = 1, what: str | None = None) -> None: ...


@contextmanager
def progress(title: str, total: float, unit: str = "") -> Iterator[Advance]:
    """Progress with ETA over ``total`` of a unit: a bar on a terminal, a line every few seconds elsewhere."""
    if sys.stderr.isatty():
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn(f"of {total:,.0f} {unit}".rstrip() + ", eta"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=err(), transient=True) as bar:
            task = bar.add_task(title, total=total)

            def advance_bar(step: float = 1, what: str | None = None) -> None:
                bar.update(task, advance=step, description=f"{title} {what}" if what else title)

            yield advance_bar
        return

    started = last = time.monotonic()
    done = 0.0

    def advance_plain(step: float = 1, what: str | None = None) -> None:
        nonlocal done, last
        done += step
        now = time.monotonic()
        if now - last >= _PLAIN_INTERVAL_S and done:
            last = now
            eta = (now - started) / done * (total - done)
            note(f"{title}: {done / total:.0%}, eta {eta:.0f} s" + (f" ({what})" if what else ""))

    yield advance_plain
