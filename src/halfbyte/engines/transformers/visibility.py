"""Which slots of a fixed cache the next token may attend to, kept up to date on the device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = frozenset({FULL, SLIDING})


def attention_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """The kinds of attention in a model's layers, as its text config names them."""
    if getattr(config, "layer_types", None):
        return frozenset(config.layer_types)
    if getattr(config, "sliding_window", None) is not None:
        return frozenset({SLIDING})
    if getattr(config, "attention_chunk_size", None) is not None:
        return frozenset({"chunked_attention"})
    return frozenset({FULL})


class Visibility:
    """Slots ``[B, 1, 1, length]`` that hold tokens, and the masks that a model's layers take for one new token."""

    def __init__(self, config: PreTrainedConfig, batch: int, length: int, position: torch.Tensor) -> None:
        """position: int64 ``[1]``, the new token's slot. config: the text config."""
        self._kinds = attention_kinds(config)
        self._by_kind = bool(getattr(config, "layer_types", None))
        self._window: int = getattr(config, "sliding_window", None) or length
        self._position = position
        self._slots = torch.arange(length, device=position.device)
        self._filled = torch.zeros(batch, 1, 1, length, dtype=torch.bool, device=position.device)

    def begin(self, prompt_mask: torch.Tensor) -> None:
        """A prompt's slots, bool ``[B, T]`` (false where padded), and the one after it."""
        tokens = prompt_mask.shape[1]
        self._filled.zero_()
        self._filled[:, 0, 0, :tokens] = prompt_mask
        self._filled[:, :, :, tokens] = True

    def advance(self) -> None:
        """Once ``position`` has moved on."""
        self._filled.index_fill_(3, self._position, True)

    def masks(self, additive: torch.dtype | None) -> Any:
        """One mask, or one by kind of layer, as the model's forward takes them.

        additive: as numbers of this dtype that are added to scores, instead of booleans.
        """
        masks = {kind: self._mask(kind, additive) for kind in self._kinds}
        return masks if self._by_kind else next(iter(masks.values()))

    def _mask(self, kind: str, additive: torch.dtype | None) -> torch.Tensor:
        visible = self._filled
        if kind == SLIDING:
            visible = visible & (self._slots > self._position - self._window)
        if additive is None:
            return visible
        hidden = torch.finfo(additive).min
        return torch.zeros_like(visible, dtype=additive).masked_fill_(~visible, hidden)
