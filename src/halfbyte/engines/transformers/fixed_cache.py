"""Keys and values in buffers that never move and never grow: what a CUDA graph can be captured on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Slots:
    """What the layers of a cache share. length: slots of each. position: int64 ``[1]``, the next token's slot.

    prompts: the sequences whose prompts are being read, from slot 0 on; none if they go on by one token each.
    """

    batch: int
    length: int
    position: torch.Tensor
    prompts: slice | None = None
    _arrivals: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))

    def arrivals(self, count: int) -> torch.Tensor:
        """Scratch for attention: ``count`` int32 zeros, which it leaves as zeros. Made once, before any capture."""
        if self._arrivals.numel() < count:
            self._arrivals = torch.zeros(count, dtype=torch.int32, device=self.position.device)
        return self._arrivals


class FixedCache(Cache):
    """Room for ``batch`` sequences of ``length`` tokens in every layer.

    Layers with full and with sliding attention are alike; the mask makes the window. transformers' own static cache
    counts tokens in each layer, with five small kernels a step; here one ``position`` on the model's device is the
    slot of the token that comes next, for all of them. Inside :meth:`prompt` the layers take whole prompts and hand
    their keys and values back as they came, so that attention runs on the prompts alone and not on the empty slots
    behind them.
    """

    def __init__(self, layers: int, batch: int, length: int, position: torch.Tensor) -> None:
        self.slots = Slots(batch, length, position)
        super().__init__(layers=[FixedLayer(self.slots) for _ in range(layers)])

    @contextmanager
    def prompt(self, sequences: slice) -> Iterator[None]:
        """Within it the next call of the model reads the prompts of some sequences, from the first slot on."""
        self.slots.prompts = sequences
        try:
            yield
        finally:
            self.slots.prompts = None


class FixedLayer(CacheLayerMixin):
    """``keys`` and ``values`` ``[B, heads, length, head size]``, made when the first ones come."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self._slots.batch, heads, self._slots.length, size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``[B, heads, T, head size]``; returns what attention is to see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._slots.prompts is not None:
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                place, tokens = buffer[self._slots.prompts], states.shape[2]
                place[:, :, :tokens] = states
                # What an earlier prompt left there is masked; but a NaN would come through a weight of zero.
                place[:, :, tokens:].zero_()
            return key_states, value_states
        self.keys.index_copy_(2, self._slots.position, key_states)
        self.values.index_copy_(2, self._slots.position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self._slots.length if self._slots.prompts is None else query_length), 0

    def get_seq_length(self) -> Any:
        return self._slots.position[0] if self._slots.prompts is None else 0

    def get_max_length(self) -> int:
        return self._slots.length
