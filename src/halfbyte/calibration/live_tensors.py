"""Parameters that come into memory when they are needed and leave it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from halfbyte.calibration.places import Places, view_at
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import WeightSource

_READERS = 4
# Elements of a tensor that is large, and of a part of it.
_LARGE, _PART = 1 << 28, 1 << 25
_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TensorSource(Protocol):
    """What a model is calibrated from: a checkpoint, or one whose tensors are changed as they are read."""

    @property
    def path(self) -> Path:
        """Directory, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of config.json."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Stored tensor name -> shape."""

    @property
    def model_dtype(self) -> str:
        """``bf16``, ``f16`` or ``f32``: what the model computes in."""

    def load(self, name: str) -> torch.Tensor:
        """One stored tensor, on the CPU."""

    def load_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of its first axis."""

    def load_source(self, source: WeightSource) -> torch.Tensor:
        """The weight ``[out, in]`` at ``source``, on the CPU."""


class LiveTensors:
    """The parameters and persistent buffers of ``model``, each either on the meta device or loaded."""

    def __init__(
        self,
        model: PreTrainedModel,
        source: TensorSource,
        places: Places,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ) -> None:
        self._model = model
        self._source = source
        self._places = places
        self._dtypes = dtypes
        self._device = device
        self._stored: dict[str, list[str]] = {}
        for name, place in places.tensors.items():
            self._stored.setdefault(place.tensor, []).append(name)

    @property
    def names(self) -> list[str]:
        """Parameters and persistent buffers that the checkpoint fills, by itself or by a tie."""
        return [*self._stored, *self._places.ties]

    def load(self, names: Iterable[str], *, in_parts: bool = False) -> None:
        """Fills the parameters ``names``; those already in memory stay as they are.

        in_parts: large ones (embeddings) are read a few rows at a time, which must not depend on each other.
        """
        absent = [name for name in names if self._entry(name).is_meta]
        origins = {name: self._places.ties.get(name, name) for name in absent}
        needed = [name for name in dict.fromkeys(origins.values()) if self._entry(name).is_meta]
        entries = {name: self._empty(name) for name in needed}
        # Reading and copying to a GPU wait for memory, several at once hide that; a CPU's memory is what is short.
        with ThreadPoolExecutor(1 if self._device.type == "cpu" else _READERS) as pool:
            jobs = [
                pool.submit(self._fill, entries[name], stored, in_parts)
                for name in needed
                for stored in self._stored[name]
            ]
            for job in jobs:
                job.result()
        for name, entry in entries.items():
            self._put(name, entry)
        for name, origin in origins.items():
            if name != origin:
                self._put(name, self._entry(origin))

    def release(self, names: Iterable[str]) -> None:
        """Back to the meta device; changes since loading are lost."""
        for name in names:
            self._put(name, torch.empty_like(self._entry(name), device="meta"))

    def allocate(self, name: str) -> None:
        """Gives the parameter ``name`` memory, whose values mean nothing, unless it is loaded."""
        if self._entry(name).is_meta:
            self._put(name, self._empty(name))

    def read(self, source: WeightSource, name: str) -> torch.Tensor:
        """A weight as stored at ``source``, ``[out, in]``, in the dtype and on the device of parameter ``name``."""
        return self._source.load_source(source).to(self._device, self._dtypes[name])

    def stored(self, name: str) -> torch.Tensor:
        """The live values of the stored tensor ``name``, which must be loaded; shares the model's memory."""
        return self.view(self._places.tensors[name])

    def view(self, place: WeightSource) -> torch.Tensor:
        """The live values at ``place``; shares the model's memory."""
        return view_at(self._entry(place.tensor), place)

    def _empty(self, name: str) -> torch.Tensor:
        return torch.empty(self._entry(name).shape, dtype=self._dtypes[name], device=self._device)

    def _fill(self, entry: torch.Tensor, stored: str, in_parts: bool) -> None:
        """Reads a stored tensor into its place in a parameter."""
        target = view_at(entry, self._places.tensors[stored])
        if not in_parts or target.numel() < _LARGE:
            self._copy(target, self._source.load(stored), stored)
            return
        for start in range(0, len(target), step := max(1, _PART * len(target) // target.numel())):
            stop = min(start + step, len(target))
            self._copy(target[start:stop], self._source.load_rows(stored, start, stop), stored)

    def _copy(self, target: torch.Tensor, values: torch.Tensor, stored: str) -> None:
        if target.is_floating_point() and values.dtype not in _READABLE:
            raise HalfbyteError(
                f"{self._source.path}: {stored} is stored as {values.dtype}; accepted for calibration: "
                f"{', '.join(map(str, _READABLE))}"
            )
        target.copy_(values)

    def _entry(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        return getattr(self._model.get_submodule(owner), leaf).detach()

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
