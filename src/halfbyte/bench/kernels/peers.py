"""Where other projects' kernels come from: what is installed, and a folder of what is not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from halfbyte.bench.kernels.contender import MissingError
from halfbyte.errors import HalfbyteError

_VLLM_LIBRARIES = ("_C.*so", "_C_stable_libtorch.*so", "_moe_C.*so", "_moe_C_stable_libtorch.*so")
_SGLANG_LIBRARY = "sgl_kernel/sm90/common_ops.abi3.so"
_DISTRIBUTIONS = ("vllm", "humming-kernels", "gemlite", "sglang-kernel")


class Peers:
    """folder: as ``pip install --target`` fills it, or none. vLLM need not be whole: its extension module
    ``_C_stable_libtorch.abi3.so`` is enough, in the folder or in ``vllm/`` below it; nor SGLang's kernels:
    ``sgl_kernel/sm90/common_ops.abi3.so``.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is not None:
            if not folder.is_dir():
                raise HalfbyteError(
                    f"--peers {folder} is no folder; accepted: one with the packages to measure"
                )
            sys.path.insert(0, str(folder.resolve()))
        self._folder = folder

    def load_vllm(self) -> None:
        """Registers vLLM's operations as ``torch.ops._C`` without importing vLLM itself.

        Errors: MissingError.
        """
        found = [
            file for place in self._vllm_places() for name in _VLLM_LIBRARIES for file in place.glob(name)
        ]
        if not found:
            where = f" and {self._folder} has no {_VLLM_LIBRARIES[1]}" if self._folder else ""
            raise MissingError(f"vllm is not installed{where}")
        for library in found:
            _load(library)

    def load_sglang(self) -> None:
        """Registers SGLang's operations as ``torch.ops.sgl_kernel`` without importing the package.

        Errors: MissingError.
        """
        places = [self._folder] if self._folder is not None else []
        spec = importlib.util.find_spec("sgl_kernel")
        places += [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
        library = next((file for place in places if (file := place / _SGLANG_LIBRARY).is_file()), None)
        if library is None:
            raise MissingError(f"sgl_kernel is not installed, and no folder of rivals has {_SGLANG_LIBRARY}")
        _load(library)

    def module(self, name: str) -> ModuleType:
        """The package imported. Errors: MissingError, with what the import said."""
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise MissingError(f"cannot be imported: {error}") from error

    def versions(self) -> dict[str, str]:
        """Versions of the rivals whose distributions are here."""
        found = {}
        for name in _DISTRIBUTIONS:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    def _vllm_places(self) -> list[Path]:
        if self._folder is not None and any(self._folder.glob(_VLLM_LIBRARIES[1])):
            return [self._folder]
        spec = importlib.util.find_spec("vllm")  # finds, does not import
        return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise MissingError(f"{library.name} does not load: {error.__cause__ or error}") from error
