"""``pytorch_model*.bin`` or ``quant_model.pt`` behind the reader's interface, for those who said they trust them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from halfbyte.checkpoint.discover import listed, read_weight_map
from halfbyte.checkpoint.dtypes import STORED_NAMES
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint, write_all
from halfbyte.errors import HalfbyteError

_SINGLE_FILES = ("pytorch_model.bin", "quant_model.pt")
_INDEX_FILE = "pytorch_model.bin.index.json"


class PickleCheckpoint(Checkpoint):
    """A checkpoint whose ``tensors`` say 0 for ``offset``: a pickle tells no offsets."""

    def _load_range(self, info: TensorInfo, start: int, nbytes: int, shape: tuple[int, ...]) -> torch.Tensor:
        raw = self._raw(info)[start : start + nbytes].clone()
        return raw.view(_load_shard(info.file)[info.name].dtype).reshape(shape)

    def numpy(self, name: str) -> numpy.ndarray:
        tensor = self.load(name)
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def copy_bytes(self, name: str, fileobj: BinaryIO) -> None:
        write_all(fileobj, self._raw(self.info(name)).numpy().data)

    @staticmethod
    def _raw(info: TensorInfo) -> torch.Tensor:
        return _load_shard(info.file)[info.name].contiguous().reshape(-1).view(torch.uint8)


def open_pickles(path: Path, config: dict[str, Any]) -> PickleCheckpoint:
    """The checkpoint of pickle files in directory ``path``.

    Errors: a missing file, a file that torch's restricted unpickler refuses, a tensor in two files.
    """
    index = path / _INDEX_FILE
    weight_map = read_weight_map(index) if index.exists() else None
    names = sorted(set(weight_map.values())) if weight_map else [_single_file(path)]
    if absent := [name for name in names if not (path / name).exists()]:
        raise HalfbyteError(f"{path}: {listed(absent)} does not exist; fetch the missing files")
    tensors: dict[str, TensorInfo] = {}
    for file in (path / name for name in names):
        for name, tensor in _load_shard(file).items():
            if name in tensors:
                raise HalfbyteError(
                    f"{path}: tensor {name!r} is in {tensors[name].file.name} and {file.name}"
                )
            tensors[name] = TensorInfo(
                name, STORED_NAMES[tensor.dtype], tuple(tensor.shape), file, 0, tensor.nbytes
            )
    if missing := [name for name in weight_map or () if name not in tensors]:
        raise HalfbyteError(f"{index}: lists {listed(missing)}, which no file holds")
    return PickleCheckpoint(path, config, tensors)


def _single_file(path: Path) -> str:
    """The file that is there; the usual name if none is."""
    return next((name for name in _SINGLE_FILES if (path / name).exists()), _SINGLE_FILES[0])


# One file mapped at a time: the pages of the last one are given back when the next is opened.
@lru_cache(maxsize=1)
def _load_shard(file: Path) -> Mapping[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise HalfbyteError(
            f"{file}: cannot be read as a pickle of tensors ({str(error).splitlines()[0]})"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise HalfbyteError(f"{file}: expected a dictionary of tensors")
    return loaded
