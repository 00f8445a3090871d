"""A baseline's answers, which are asked for once for every model that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class RememberedLogits:
    """A causal LM that keeps the logits of each sequence it has seen on the CPU, up to ``limit`` bytes.

    load: makes the model, once now and again whenever a sequence that was not kept is asked for after :meth:`release`.
    """

    def __init__(self, load: Callable[[], nn.Module], limit: int) -> None:
        self._load = load
        self._room = limit
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        self._model: nn.Module | None = load()
        self.config: Any = self._model.config

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Logits ``[1, T, V]`` for tokens ``[1, T]``. options: as the model takes them."""
        key = tuple(ids[0].tolist())
        if key in self._kept:
            return self._kept[key]
        if self._model is None:
            self._model = self._load()
        device = next(self._model.parameters()).device
        logits: torch.Tensor = self._model(ids.to(device), **options).logits
        if logits.nbytes <= self._room:
            logits = logits.cpu()
            self._room -= logits.nbytes
            self._kept[key] = logits
        return logits

    def release(self) -> None:
        """Gives back the model; what is kept stays."""
        self._model = None
