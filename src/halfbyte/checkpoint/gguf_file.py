"""A GGUF file: its metadata and tensors by name, every refusal as one line. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    import gguf
    import numpy as np


class GgufFile:
    """The metadata and tensors of one file, memory-mapped and read-only.

    ``tensors`` maps GGUF names (``blk.0.attn_q.weight``) to the reader's tensors, in file order.
    """

    def __init__(self, path: Path) -> None:
        """Errors: the ``gguf`` package is missing; ``path`` is no whole GGUF file or one part of several."""
        try:
            from gguf import GGUFReader
        except ImportError:
            raise HalfbyteError("reading GGUF needs the package gguf: pip install 'halfbyte[gguf]'") from None
        with path.open("rb"):  # a missing or unreadable file is the system's own message
            pass
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
            raise HalfbyteError(f"{path}: is no complete GGUF file ({error})") from None
        self.path = path
        self._fields = reader.fields
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if (parts := self.get("split.count", 1)) > 1:
            raise HalfbyteError(
                f"{path}: is one of {parts} parts; merge them first (llama-gguf-split --merge)"
            )
        self.architecture = self._text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python object, ``default`` where the file does not state it."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def stated(self, name: str) -> bool:
        """Whether ``<architecture>.<name>`` is in the metadata."""
        return f"{self.architecture}.{name}" in self._fields

    def integer(self, name: str, default: int | None = None) -> int:
        """The positive whole number at ``<architecture>.<name>``.

        Errors: absent without ``default``; not one number (some models state a list, one value per layer).
        """
        value = self._number(name, default)
        if value != int(value) or value <= 0:
            raise HalfbyteError(
                f"{self.path}: {self.architecture}.{name} is {value}, expected a positive integer"
            )
        return int(value)

    def real(self, name: str, default: float | None = None) -> float:
        """The number at ``<architecture>.<name>``: float32 in the file, here the shortest decimal for it."""
        return float(f"{self._number(name, default):.7g}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in torch's order (GGUF states the innermost dimension first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Rows (first axis) of a tensor as float32, dequantized as the ``gguf`` package defines it.

        Errors: a storage type that package cannot dequantize.
        """
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            return dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError:
            raise HalfbyteError(
                f"{self.path}: tensor {name!r} is stored as {tensor.tensor_type.name}, "
                "which the gguf package cannot dequantize"
            ) from None

    def _number(self, name: str, default: float | None) -> float:
        key = f"{self.architecture}.{name}"
        value = self.get(key, default)
        if value is None:
            raise HalfbyteError(f"{self.path}: the metadata has no {key}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HalfbyteError(
                f"{self.path}: {key} is {str(value)[:60]}, expected one number for all layers"
            )
        return value

    def _text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise HalfbyteError(f"{self.path}: the metadata has no {key}")
        return value
