"""From CUDA C++ to machine code by NVRTC, which torch brings: no compiler on the machine, no build step.

Machine code is kept in the user's cache directory under a hash of all that it depends on, so that a kernel is
compiled once (0.5 to 3 seconds) and not again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.instructions import warpgroup_mma

_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v")
_HEADERS = (
    "hopper.cuh",
    "linear.cuh",
    "schedule.cuh",
    "pipeline.cuh",
    "tile_out.cuh",
    "sums.cuh",
    "w4a8_codes.cuh",
)


@dataclass(frozen=True)
class Source:
    """One specialised kernel. file: in ``sources/``. defines: the constants that the file leaves open.

    mma: (columns, operands, name) of each matrix instruction the file uses.
    """

    file: str
    kernel: str
    defines: tuple[tuple[str, str | int], ...]
    mma: tuple[tuple[int, str, str], ...]

    @staticmethod
    def of(file: str, kernel: str, defines: Mapping[str, str | int], *mma: tuple[int, str, str]) -> Source:
        return Source(file, kernel, tuple(sorted(defines.items())), mma)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.file, self.kernel, self.defines, self.mma))

    @property
    def text(self) -> str:
        """The whole translation unit."""
        constants = "".join(f"#define {name} {value}\n" for name, value in self.defines)
        instructions = "".join(warpgroup_mma(*instruction) for instruction in self.mma)
        return f'{constants}#include "hopper.cuh"\n{instructions}{_file(self.file)}'


def machine_code(source: Source) -> bytes:
    """The cubin for ``sm_90a``, from the cache or compiled now. Errors: what the compiler says, in one message."""
    nvrtc = _nvrtc()
    version = ".".join(str(part) for part in _checked(nvrtc.nvrtcVersion()))
    parts = [source.text, *map(_file, _HEADERS), version, *_OPTIONS]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = _cache_directory() / f"{source.kernel}-{key[:32]}.cubin"
    if path.is_file():
        return path.read_bytes()
    code, _ = compile_source(source)
    _keep(path, code)
    return code


def compile_source(source: Source) -> tuple[bytes, str]:
    """The cubin, past the cache, and what the compiler had to say of it. Errors: see :func:`machine_code`."""
    nvrtc = _nvrtc()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source.text.encode(),
            source.file.encode(),
            len(_HEADERS),
            [_file(name).encode() for name in _HEADERS],
            [name.encode() for name in _HEADERS],
        )
    )[0]
    result = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), [option.encode() for option in _OPTIONS])
    log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program))[0])
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise HalfbyteError(f"{source.file} with {dict(source.defines)} does not compile: {_text(log)}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program))[0])
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code), _text(log)


@cache
def _file(name: str) -> str:
    return (resources.files("halfbyte.kernels.hopper") / "sources" / name).read_text(encoding="utf-8")


def _nvrtc():  # type: ignore[no-untyped-def]  # the module of a library that ships no types
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise HalfbyteError(
            "kernels for Hopper are compiled with cuda-bindings and NVRTC, which torch for CUDA 12.9 or later "
            f"brings; here: {error}"
        ) from error
    return nvrtc


def _checked(result: tuple) -> tuple:
    if int(result[0]):
        raise HalfbyteError(f"CUDA's compiler failed: {result[0].name}")
    return result[1:]


def _text(log: bytearray) -> str:
    return " | ".join(bytes(log).rstrip(b"\0").decode(errors="replace").split("\n"))


def _cache_directory() -> Path:
    base = os.environ.get("HALFBYTE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halfbyte" / "kernels"


def _keep(path: Path, code: bytes) -> None:
    """Written beside and renamed: two processes may compile the same kernel at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return  # a cache that cannot be written costs a second at the next start, nothing else
