"""Wall time and peak memory of a whole process: what a user waits for and what the machine must have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.errors import HalfbyteError

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class ProcessCost:
    """seconds: from start to exit. peak_rss: bytes of resident memory at most."""

    seconds: float
    peak_rss: int


# A child's peak starts at what its parent had, so the parent is an interpreter with nothing in it.
_SMALL_PARENT = """
import os, subprocess, sys, time
started = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(time.perf_counter() - started, usage.ru_maxrss, os.waitstatus_to_exitcode(status))
"""


def measure(command: Sequence[str]) -> ProcessCost:
    """Run ``command`` to its end with its output discarded.

    Errors: a command that fails; the message has the last line it printed.
    """
    small_parent = [sys.executable, "-ISc", _SMALL_PARENT, *command]
    done = subprocess.run(small_parent, capture_output=True, text=True, check=True)
    seconds, peak, code = done.stdout.split()
    if code != "0":
        said = done.stderr.strip().splitlines()
        raise HalfbyteError(f"{' '.join(command)}: exit code {code}: {said[-1] if said else 'no output'}")
    return ProcessCost(float(seconds), int(peak) * _RSS_UNIT)


def halfbyte_command(*arguments: str) -> list[str]:
    """The command line of this installation."""
    return [sys.executable, "-m", "halfbyte", *arguments]
