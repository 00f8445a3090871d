"""Compile Triton kernels for NVIDIA GPUs on a machine that has none, and read what they take of the chip."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """registers: of a thread. spills: bytes of a thread's stack, 0 if all fits. shared: bytes of a block.

    asm: by stage, among them ``ptx`` and ``ttgir`` (text) and ``cubin`` (bytes).
    """

    registers: int
    spills: int
    shared: int
    asm: Mapping[str, Any] = field(repr=False)


def compile_for(kernel: Any, capability: int, arguments: Mapping[str, Any], **options: Any) -> Compiled:
    """``kernel`` (a ``@triton.jit`` function) as the launcher would compile it for ``arguments``.

    capability: 80, 89, 90 (which stands for sm_90a). arguments: by parameter name, in any order. For a pointer the
    dtype it points to, as torch's or as Triton's (``"*bf16"``), aligned to 16 bytes; for a number that the kernel
    is launched with, a number; for a constant (``tl.constexpr``, or a pointer that is not there) its value.
    options: ``num_warps``, ``num_stages``, ``launch_pdl`` and the like.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in kernel.params:
        position = (parameter.num,)
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[position] = value
            continue
        kind = _POINTERS.get(value, value) if not isinstance(value, (int, float)) else _number(value)
        signature[parameter.name] = kind
        aligned = not isinstance(value, int) or value % 16 == 0
        if not isinstance(value, float) and aligned and not parameter.do_not_specialize:
            attributes[position] = [["tt.divisibility", 16]]
    if unknown := set(arguments) - set(signature):
        raise TypeError(f"{kernel.__name__} has no parameters called {', '.join(sorted(unknown))}")
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _usage(compiled.asm["cubin"])
    return Compiled(registers, stack, compiled.metadata.shared, compiled.asm)


def _number(value: float) -> str:
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        report = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def machine_code(compiled: Compiled) -> str:
    """The instructions of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        return subprocess.run(
            [_TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True
        ).stdout
