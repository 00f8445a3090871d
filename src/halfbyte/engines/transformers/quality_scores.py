"""Checkpoints scored one after the other against the same original, on the same texts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.bench.record import Row
from halfbyte.bench.remembered_logits import RememberedLogits
from halfbyte.devices import device_named
from halfbyte.engines.transformers.loading import load
from halfbyte.evaluation.evaluate import evaluate
from halfbyte.evaluation.result import Evaluation

_DIGITS = 6


class QualityScores:
    """Of each model a row of figures for each text.

    Memory: the checkpoint's model, the original's too while answers of it are asked for that are not remembered, and
    ``remembered_bytes`` of its answers.
    """

    def __init__(
        self,
        original: Path,
        texts: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        context: int,
        windows: int | None,
        remembered_bytes: int,
        on_share: Callable[[float], None],
    ) -> None:
        """texts: by name. dtype, device: as for :func:`load`. context, windows: as for :func:`evaluate`.
        on_share: called with the share of the texts, 0 to 1, that a call has scored.

        Errors: as :func:`load`, for the original.
        """
        self._original = original
        self._texts = texts
        self._dtype = dtype
        self._device = device_named(device)
        self._context = context
        self._windows = windows
        self._on_share = on_share
        self._baseline = RememberedLogits(self._load_original, remembered_bytes)

    def original(self) -> dict[str, Row]:
        """Perplexities of the original alone. Errors: as :func:`evaluate`."""
        with self._room():
            return self._score(self._baseline, self._tokenizer, {})

    def of(self, checkpoint: Path) -> dict[str, Row]:
        """Of a checkpoint against the original. Errors: as :func:`load` and :func:`evaluate`."""
        with self._room():
            model, tokenizer = load(checkpoint, dtype=self._dtype, device=self._device)
            baseline = {"baseline": self._baseline, "baseline_tokenizer": self._tokenizer}
            return self._score(model, tokenizer, baseline)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Gives back models afterwards; they refer to themselves, and the next one needs the room."""
        try:
            yield
        finally:
            self._baseline.release()
            gc.collect()

    def _score(self, model: Any, tokenizer: Any, baseline: dict[str, Any]) -> dict[str, Row]:
        rows = {}
        for number, (name, text) in enumerate(self._texts.items()):

            def on_window(done: int, total: int, number: int = number) -> None:
                self._on_share((number + done / total) / len(self._texts))

            found = evaluate(
                model,
                tokenizer,
                text,
                context=self._context,
                windows=self._windows,
                on_window=on_window,
                **baseline,
            )
            rows[name] = {
                "context": found.context,
                "windows": found.windows,
                "dtype": str(self._dtype).removeprefix("torch."),
                "device": self._device.type,
                **_figures(found),
            }
        return rows

    def _load_original(self) -> nn.Module:
        model, self._tokenizer = load(self._original, dtype=self._dtype, device=self._device)
        return model


def _figures(found: Evaluation) -> Row:
    figures: dict[str, float | None] = {"perplexity": found.perplexity}
    if (against := found.baseline) is not None:
        figures |= {
            "baseline_perplexity": against.perplexity,
            "increase": against.perplexity_increase,
            "extra_nll": against.extra_nll,
            "extra_nll_se": against.extra_nll_se,
            "kl_mean": against.kl_mean,
            "kl_p99": against.kl_p99,
            "top1_agreement": against.top1_agreement,
        }
    return {
        "tokens_scored": found.tokens_scored,
        **{name: None if value is None else round(value, _DIGITS) for name, value in figures.items()},
    }
