"""What a benchmark result is: rows, with what is needed to make them again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_PACKAGES = ("halfbyte", "torch", "transformers", "safetensors", "triton")


def record(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """``{meta: {commit, command, versions, machine, date}, rows}``; the commit is none outside a checkout."""
    return {
        "meta": {
            "commit": _commit(),
            "command": command,
            "versions": {"python": platform.python_version(), **_versions()},
            "machine": f"{_processor()}, {_cores()} cores",
            "date": date.today().isoformat(),
        },
        "rows": list(rows),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
