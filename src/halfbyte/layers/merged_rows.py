"""Tensors of several layers as the rows of one, which follows them wherever they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class MergedRows:
    """The parameters of one name of layers, one below the other; those become views of it.

    Whoever moves a model, copies it, loads into it or puts another parameter in the place of one changes the layers
    alone. So it is looked at, whenever the rows are asked for, whether the parameters are still views of them.
    """

    def __init__(self, parts: Sequence[nn.Module], name: str) -> None:
        """name: of parameters ``[out_features, ...]`` of one dtype, on one device; a part may have none."""
        self._parts = tuple(parts)
        self._name = name
        self._merged: torch.Tensor | None = None
        self._places: tuple[_Place | None, ...] = ()
        self.merged()

    def merged(self) -> torch.Tensor | None:
        """``[sum of out_features, ...]``, zeros where a part has none; none if no part has any."""
        if not self._is_current():
            # Whatever the mode in which it is found out that they have moved, they outlive it.
            with torch.inference_mode(False), torch.no_grad():
                self._merge()
        return self._merged

    def release(self) -> None:
        """Give the rows up, until they are asked for, if any part has left them."""
        if not self._is_current():
            self._merged, self._places = None, ()

    def _tensors(self) -> list[Any]:
        return [getattr(part, self._name) for part in self._parts]

    def _is_current(self) -> bool:
        return self._places == tuple(map(_place, self._tensors()))

    def _merge(self) -> None:
        tensors = self._tensors()
        sizes = [int(part.out_features) for part in self._parts]  # type: ignore[arg-type]
        like = next((tensor for tensor in tensors if tensor is not None), None)
        self._merged = None
        if like is not None:
            rows = [
                like.new_zeros(size, *like.shape[1:]) if tensor is None else tensor.detach()
                for tensor, size in zip(tensors, sizes, strict=True)
            ]
            self._merged = torch.cat(rows)
            for tensor, view in zip(tensors, self._merged.split(sizes), strict=True):
                if tensor is not None:
                    tensor.data = view
        self._places = tuple(map(_place, tensors))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files, which have the parts too: those are enough."""
        return {**self.__dict__, "_merged": None, "_places": ()}


_Place = tuple[int, torch.dtype, torch.Size]


def _place(tensor: torch.Tensor | None) -> _Place | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape)
