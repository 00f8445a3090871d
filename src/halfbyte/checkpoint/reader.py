"""Reading a checkpoint directory, one tensor in memory at a time. Torch is only loaded when a tensor is."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from halfbyte.checkpoint.discover import INDEX_FILE, SINGLE_FILE, find_safetensors
from halfbyte.checkpoint.headers import DTYPE_BITS, TensorInfo
from halfbyte.checkpoint.model_config import model_dtype, read_config
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import WeightSource

if TYPE_CHECKING:
    import numpy
    import torch

_CHUNK = 16 << 20
_NUMPY_NAMES = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"},
    **{"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?", "C64": "c8"},
}
# No way round the kernel for this pair of files: copy through memory instead.
_NO_FAST_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory whose headers have been checked.

    config: content of config.json. tensors: by name, shard after shard, in the order of their bytes.
    notes: oddities that were tolerated, one line each.
    Tensors are read into fresh memory, never mapped, so that resident memory stays at one tensor.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def open(path: Path | str, *, allow_pickle: bool = False) -> Checkpoint:
        """The checkpoint in the local directory ``path``; reads config.json and headers only.

        allow_pickle: also read ``pytorch_model*.bin`` or ``quant_model.pt``, through torch's restricted unpickler.
        Errors: see :func:`~halfbyte.checkpoint.model_config.read_config` and
        :func:`~halfbyte.checkpoint.discover.find_safetensors`; no weights; pickle files not allowed.
        """
        path = Path(path)
        config = read_config(path)
        tensors, notes = find_safetensors(path)
        if tensors:
            return Checkpoint(path, config, tensors, notes)
        if pickles := [*path.glob("pytorch_model*.bin"), *path.glob("quant_model.pt")]:
            if not allow_pickle:
                raise HalfbyteError(
                    f"{path}: its weights are pickle files ({pickles[0].name}), which can run code when "
                    "loaded; convert them to safetensors, or pass --allow-pickle if you trust them"
                )
            from halfbyte.checkpoint.pickle_reader import open_pickles

            return open_pickles(path, config)
        if any(path.glob("*.gguf")):
            raise HalfbyteError(
                f"{path}: holds GGUF files; convert one with `halfbyte import-gguf FILE -o DIRECTORY`"
            )
        raise HalfbyteError(
            f"{path}: no weights; expected {SINGLE_FILE}, {INDEX_FILE} or a complete set of shards"
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Stored tensor name -> shape."""
        return {name: info.shape for name, info in self.tensors.items()}

    @cached_property
    def model_dtype(self) -> str:
        """``bf16``, ``f16`` or ``f32``: the dtype that the model computes in."""
        return model_dtype(self.config, self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Header of one tensor. Errors: a name that the checkpoint does not hold."""
        if name not in self.tensors:
            raise HalfbyteError(f"{self.path}: no tensor {name!r}")
        return self.tensors[name]

    def load(self, name: str) -> torch.Tensor:
        """One tensor with its stored dtype and shape. Errors: an unknown name; a dtype that torch lacks."""
        info = self.info(name)
        return self._load_range(info, 0, info.nbytes, info.shape)

    def load_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of the first axis of a tensor; only their bytes are read."""
        info = self.info(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise HalfbyteError(
                f"{info.file}: tensor {name!r} of shape {list(info.shape)} has no rows {start}:{stop}"
            )
        row = info.nbytes // max(info.shape[0], 1)
        return self._load_range(info, start * row, (stop - start) * row, (stop - start, *info.shape[1:]))

    def load_source(self, source: WeightSource) -> torch.Tensor:
        """The weight ``[out, in]`` that a layout found inside a stored tensor, contiguous."""
        if source.expert is not None:
            weight = self.load_rows(source.tensor, source.expert, source.expert + 1)[0]
        elif source.rows is not None and not source.transposed:
            start, stop, step = source.rows
            return self.load_rows(source.tensor, start, stop)[::step].contiguous()
        else:
            weight = self.load(source.tensor)
        if source.transposed:
            weight = weight.t()
        if source.rows is not None:
            start, stop, step = source.rows
            weight = weight[start:stop:step]
        return weight.contiguous()

    def numpy(self, name: str) -> numpy.ndarray:
        """One tensor without torch: BF16 as float32, dtypes that numpy lacks as their bytes (uint8)."""
        import numpy as np

        info = self.info(name)
        buffer = np.empty(info.nbytes, np.uint8)
        self._read_into(info, 0, buffer.data)
        if info.dtype == "BF16":
            return (buffer.view("<u2").astype("<u4") << 16).view("<f4").reshape(info.shape)
        if info.dtype not in _NUMPY_NAMES:
            return buffer if DTYPE_BITS[info.dtype] != 8 else buffer.reshape(info.shape)
        return buffer.view(np.dtype(_NUMPY_NAMES[info.dtype]).newbyteorder("<")).reshape(info.shape)

    def copy_bytes(self, name: str, fileobj: BinaryIO) -> None:
        """Append the stored bytes of a tensor to ``fileobj``, in the kernel where that is possible."""
        info = self.info(name)
        with _opened(info) as source:
            done = _copy_in_kernel(source, fileobj, info)
            source.seek(info.offset + done)
            buffer = memoryview(bytearray(min(_CHUNK, info.nbytes - done)))
            while done < info.nbytes:
                view = buffer[: min(_CHUNK, info.nbytes - done)]
                _fill(source, view, info)
                write_all(fileobj, view)
                done += len(view)

    def _load_range(self, info: TensorInfo, start: int, nbytes: int, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        from halfbyte.checkpoint.dtypes import TORCH_DTYPES

        if info.dtype not in TORCH_DTYPES:
            raise HalfbyteError(
                f"{info.file}: tensor {info.name!r} has dtype {info.dtype}, which torch cannot hold"
            )
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._read_into(info, start, buffer.numpy().data)
        return buffer.view(TORCH_DTYPES[info.dtype]).reshape(shape)

    def _read_into(self, info: TensorInfo, start: int, view: memoryview) -> None:
        with _opened(info) as file:
            file.seek(info.offset + start)
            _fill(file, view, info)


def write_all(fileobj: BinaryIO, data: memoryview) -> None:
    """Write every byte of ``data``; an unbuffered file may take less than it is given."""
    while data:
        data = data[fileobj.write(data) :]


def _opened(info: TensorInfo) -> io.FileIO:
    try:
        return info.file.open("rb", buffering=0)
    except OSError as error:
        raise HalfbyteError(f"{info.file}: cannot be read ({error.strerror})") from None


def _fill(file: io.FileIO, view: memoryview, info: TensorInfo) -> None:
    while view:
        try:
            count = file.readinto(view)
        except OSError as error:
            where = f"{info.file}: tensor {info.name!r}"
            raise HalfbyteError(f"{where} cannot be read ({error.strerror})") from None
        if not count:
            raise HalfbyteError(
                f"{info.file}: ended inside tensor {info.name!r}; it changed while being read"
            )
        view = view[count:]


def _copy_in_kernel(source: io.FileIO, target: BinaryIO, info: TensorInfo) -> int:
    """Bytes of the tensor that the kernel has copied: all of them, or fewer where it cannot."""
    try:
        target.flush()
        target_fd = target.fileno()
    except io.UnsupportedOperation:
        return 0
    done = 0
    while done < info.nbytes and hasattr(os, "copy_file_range"):
        try:
            count = os.copy_file_range(source.fileno(), target_fd, info.nbytes - done, info.offset + done)
        except OSError as error:
            if error.errno in _NO_FAST_COPY:
                break
            raise
        if count == 0:
            break
        done += count
    return done
