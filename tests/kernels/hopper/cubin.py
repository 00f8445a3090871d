"""What machine code takes of a thread, read by the tool that Triton's package carries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

from halfbyte.kernels.hopper.compiler import Source, compile_source

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# ptxas: matrix products wait for each other, for one reason or another.
_SERIALIZED = re.compile("C751[0-8]|are serialized")


def faults(source: Source, folder: Path) -> list[str]:
    """What keeps a kernel from its pace: moves to a thread's local memory and back, serialized matrix products."""
    code, log = compile_source(source)
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    listing = subprocess.run([_TOOL, "-c", path], capture_output=True, text=True, check=True).stdout
    assert re.search("[QHI]GMMA", listing)
    spills = re.findall(r"\b(?:LDL|STL)\b", listing)
    return [*spills, *(line for line in log.split(" | ") if _SERIALIZED.search(line))]
