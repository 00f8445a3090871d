"""What machine code takes of a thread, read by the tool that Triton's package carries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def spills(code: bytes, folder: Path) -> int:
    """Instructions that move registers to a thread's local memory or back."""
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    listing = subprocess.run([_TOOL, "-c", path], capture_output=True, text=True, check=True).stdout
    assert "QGMMA" in listing or "HGMMA" in listing
    return len(re.findall(r"\b(?:LDL|STL)\b", listing))
