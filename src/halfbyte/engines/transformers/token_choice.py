"""From logits to the next token, as transformers' ``generate`` chooses it, without waiting for the device."""

from __future__ import annotations

import torch


class TokenChoice:
    """The likeliest token, or one drawn at a temperature; tokens that were there already made less likely.

    sampled, penalized: whether there is a temperature and a repetition penalty at all. Their values lie on the
    device and may change between steps.
    """

    def __init__(
        self, batch: int, vocabulary: int, device: torch.device, *, sampled: bool, penalized: bool
    ) -> None:
        self._temperature = torch.ones(1, device=device) if sampled else None
        self._penalty = torch.ones(1, device=device) if penalized else None
        self._seen = torch.zeros(batch, vocabulary if penalized else 0, dtype=torch.bool, device=device)

    def begin(self, prompt: torch.Tensor, temperature: float, penalty: float) -> None:
        """Start on a ``prompt`` ``[B, T]`` of token ids."""
        if self._temperature is not None:
            self._temperature.fill_(temperature)
        if self._penalty is not None:
            self._penalty.fill_(penalty)
            self._seen.zero_().scatter_(1, prompt, True)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 ``[B]`` from ``[B, vocabulary]``."""
        if self._penalty is not None:
            scores = logits.float()
            lowered = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
            logits = torch.where(self._seen, lowered, scores)
        if self._temperature is None:
            tokens = logits.argmax(-1)
        else:
            shares = torch.softmax(logits.float() / self._temperature, -1)
            # What torch.multinomial does with one draw, but for its look at the values, which waits for the device.
            tokens = (shares / torch.empty_like(shares).exponential_(1)).argmax(-1)
        if self._penalty is not None:
            self._seen.scatter_(1, tokens.unsqueeze(-1), True)
        return tokens
