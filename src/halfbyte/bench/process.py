"""Wall time and peak memory of a whole process: what a user waits for and what the machine must have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.errors import HalfbyteError

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class ProcessCost:
    """seconds: from start to exit. peak_rss: bytes of resident memory at most."""

    seconds: float
    peak_rss: int


def measure(command: Sequence[str]) -> ProcessCost:
    """Run ``command`` to its end with its output discarded.

    Errors: a command that fails; the message has the last line it printed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").strip().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise HalfbyteError(
            f"{' '.join(command)}: exit code {process.returncode}: {said[-1] if said else 'no output'}"
        )
    return ProcessCost(seconds, usage.ru_maxrss * _RSS_UNIT)


def halfbyte_command(*arguments: str) -> list[str]:
    """The command line of this installation."""
    return [sys.executable, "-m", "halfbyte", *arguments]
