"""Hidden states of all calibration samples between two blocks, in memory or in a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from halfbyte.errors import HalfbyteError


class ActivationStore(Protocol):
    """Hidden states ``[n, T, hidden]`` of samples in order, each with its own length; read to where they wait."""

    def __len__(self) -> int: ...

    def append(self, hidden: torch.Tensor) -> None:
        """Adds a sample."""

    def read(self, index: int) -> torch.Tensor:
        """Sample ``index``."""

    def replace(self, index: int, hidden: torch.Tensor) -> None:
        """Puts ``hidden``, of the same shape and dtype, in the place of sample ``index``."""

    def close(self) -> None:
        """Gives back memory or disk."""


class MemoryStore:
    """Samples in the memory of a device, the CPU's unless another one is given."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._samples: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._samples)

    def append(self, hidden: torch.Tensor) -> None:
        self._samples.append(hidden.detach().to(self._device, copy=True))

    def read(self, index: int) -> torch.Tensor:
        return self._samples[index].clone()

    def replace(self, index: int, hidden: torch.Tensor) -> None:
        _require_same(index, self._samples[index].shape, self._samples[index].dtype, hidden)
        self._samples[index] = hidden.detach().to(self._device, copy=True)

    def close(self) -> None:
        self._samples.clear()


class DiskStore:
    """Samples in one file of ``folder`` that has no name, so that it is gone whenever the process is.

    Errors: a folder that cannot be written to; a full disk.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise HalfbyteError(f"{folder}: cannot keep activations there ({error.strerror})") from None
        self._samples: list[tuple[int, torch.Size, torch.dtype]] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._samples)

    def append(self, hidden: torch.Tensor) -> None:
        self._write(self._end, hidden)
        self._samples.append((self._end, hidden.shape, hidden.dtype))
        self._end += hidden.nbytes

    def read(self, index: int) -> torch.Tensor:
        offset, shape, dtype = self._samples[index]
        hidden = torch.empty(shape, dtype=dtype)
        view = _bytes_of(hidden)
        while view:
            try:
                count = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise HalfbyteError(
                    f"{self._folder}: activations cannot be read ({error.strerror})"
                ) from None
            if not count:
                raise HalfbyteError(f"{self._folder}: the file of activations ended inside sample {index}")
            view, offset = view[count:], offset + count
        return hidden

    def replace(self, index: int, hidden: torch.Tensor) -> None:
        offset, shape, dtype = self._samples[index]
        _require_same(index, shape, dtype, hidden)
        self._write(offset, hidden)

    def close(self) -> None:
        self._file.close()

    def _write(self, offset: int, hidden: torch.Tensor) -> None:
        view = _bytes_of(hidden.detach().cpu().contiguous())
        while view:
            try:
                count = os.pwrite(self._file.fileno(), view, offset)
            except OSError as error:
                raise HalfbyteError(
                    f"{self._folder}: activations cannot be written ({error.strerror})"
                ) from None
            view, offset = view[count:], offset + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _require_same(index: int, shape: torch.Size, dtype: torch.dtype, hidden: torch.Tensor) -> None:
    if hidden.shape != shape or hidden.dtype != dtype:
        raise HalfbyteError(
            f"sample {index} is {list(shape)} {dtype}, so {list(hidden.shape)} {hidden.dtype} cannot replace it"
        )
