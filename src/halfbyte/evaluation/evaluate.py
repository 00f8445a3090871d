"""Perplexity of a model, and its distance to a baseline, one window of text at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.evaluation.result import Evaluation, compare, mean_nll
from halfbyte.evaluation.scores import WindowScore, score_window
from halfbyte.evaluation.windows import Window, plan_windows

Model = Callable[..., Any]
"""A transformers causal LM, or any function from token ids [1, T] to logits [1, T, V]."""


@torch.inference_mode()
def evaluate(
    model: Model,
    tokenizer: Any,
    text: str,
    *,
    baseline: Model | None = None,
    baseline_tokenizer: Any = None,
    context: int = 1024,
    stride: int | None = None,
    windows: int | None = None,
    bos: bool = False,
    on_window: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score ``text``, tokenized in one piece without special tokens, in windows (see ``plan_windows``).

    tokenizer: a transformers tokenizer. baseline: a model that is run beside this one on the same tokens; its
    tokenizer, if given, must split the text alike. windows: the first so many (None: all). bos: put the
    tokenizer's start token in front of each window. on_window(done, total) is called before
    the first window and after each.
    Memory: the logits of one window of each model, whatever the length of the text.

    Errors: a text shorter than one window; a context longer than a model's; tokenizers or vocabularies that
    differ; logits that are not finite, with the window.
    """
    ids = _encode(tokenizer, text)
    if baseline_tokenizer is not None and _encode(baseline_tokenizer, text) != ids:
        raise HalfbyteError("the baseline's tokenizer splits the text into other tokens than the model's")
    start_token = _start_token(tokenizer) if bos else None
    for whose, checked in (("the model", model), ("the baseline", baseline)):
        _check_context(checked, context, whose)
    planned = plan_windows(len(ids), context, stride, bos=bos, limit=windows)
    tokens = torch.tensor(ids, dtype=torch.long)
    scores: list[WindowScore] = []
    if on_window:
        on_window(0, len(planned))
    for window in planned:
        try:
            scores.append(_score(window, tokens, start_token, model, baseline))
        except NonFiniteError as error:
            raise NonFiniteError(f"window {len(scores) + 1} of {len(planned)}: {error}") from None
        if on_window:
            on_window(len(scores), len(planned))

    scored = sum(score.tokens for score in scores)
    nll = mean_nll(sum(score.nll for score in scores), scored, "the model")
    return Evaluation(
        context=context,
        stride=stride or context - int(bos),
        bos=bos,
        windows=len(planned),
        windows_in_text=len(plan_windows(len(ids), context, stride, bos=bos)),
        tokens_scored=scored,
        text_tokens=len(ids),
        nll=nll,
        perplexity=math.exp(nll),
        baseline=compare(scores, nll) if baseline is not None else None,
    )


def _score(
    window: Window, tokens: torch.Tensor, start_token: int | None, model: Model, baseline: Model | None
) -> WindowScore:
    shown = tokens[window.start : window.stop]
    if start_token is not None:
        shown = torch.cat([torch.tensor([start_token]), shown])
    targets = tokens[window.first_scored : window.stop]
    logits = _predictions(model, shown, window.scored)
    if baseline is None:
        return score_window(logits, targets)
    expected = _predictions(baseline, shown, window.scored)
    if logits.shape != expected.shape:
        raise HalfbyteError(
            f"the model has {logits.shape[-1]} output tokens, the baseline {expected.shape[-1]}: "
            "their distributions cannot be compared"
        )
    return score_window(logits, targets, expected)


def _predictions(model: Model, shown: torch.Tensor, count: int) -> torch.Tensor:
    """Logits [count, V] for the last ``count`` tokens of ``shown`` [T]."""
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else shown.device
    # A cache of keys and values would cost memory and is of no use for a single pass.
    options = {"use_cache": False} if hasattr(model, "config") else {}
    output: Any = model(shown[None].to(device), **options)
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits[0, -count - 1 : -1]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _start_token(tokenizer: Any) -> int:
    if tokenizer.bos_token_id is None:
        raise HalfbyteError("the tokenizer has no start token (bos), so none can be put in front of a window")
    return int(tokenizer.bos_token_id)


def _check_context(model: Any, context: int, whose: str) -> None:
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise HalfbyteError(
            f"context {context} is longer than {whose}'s {longest} positions; accepted: 2 to {longest}"
        )
