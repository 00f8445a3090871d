"""What one window says about a model: loss, and the distance to a baseline's distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.errors import NonFiniteError

_CHUNK_VALUES = 8_000_000
"""Logits that are softmaxed at once: 32 MB as float32."""


@dataclass(frozen=True)
class WindowScore:
    """Sums over the scored tokens of one window, in nats. ``kl`` holds one value per token (float32)."""

    tokens: int
    nll: float
    baseline_nll: float = 0.0
    kl: torch.Tensor | None = None
    agreements: int = 0


def score_window(
    logits: torch.Tensor, targets: torch.Tensor, baseline: torch.Tensor | None = None
) -> WindowScore:
    """Score ``logits`` [T, V] (any float dtype) for the tokens ``targets`` [T] that they predict.

    ``baseline``: another model's logits of the same shape. Then ``kl`` is KL(baseline || model) per
    position and ``agreements`` counts positions where both have their largest logit at the same token (the
    first, in a tie). Softmax in float32, a block of positions at a time; sums in float64. A logit of -inf
    (a masked token) is fine.

    Errors: NaN or +inf among the logits, a token that the model gives no probability.
    """
    nll = baseline_nll = 0.0
    agreements = 0
    divergences: list[torch.Tensor] = []
    step = max(1, _CHUNK_VALUES // logits.shape[-1])
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        log_q = _log_softmax(logits[part], "the model")
        nll += _nll(log_q, targets[part])
        if baseline is not None:
            log_p = _log_softmax(baseline[part].to(log_q.device), "the baseline")
            baseline_nll += _nll(log_p, targets[part])
            agreements += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            p = log_p.exp()
            divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
            divergences.append(divergence.clamp(min=0).cpu())  # rounding can leave it at -1e-8
    kl = torch.cat(divergences) if divergences else None
    if kl is not None and not kl.isfinite().all():
        raise NonFiniteError("the model rules out (-inf logit) a token that the baseline does not")
    return WindowScore(len(targets), nll, baseline_nll, kl, agreements)


def _log_softmax(logits: torch.Tensor, whose: str) -> torch.Tensor:
    log_probabilities = logits.float().log_softmax(-1)
    if log_probabilities.isnan().any():
        raise NonFiniteError(f"{whose}'s logits hold NaN or Inf")
    return log_probabilities


def _nll(log_probabilities: torch.Tensor, targets: torch.Tensor) -> float:
    chosen = log_probabilities.gather(-1, targets.to(log_probabilities.device)[:, None])
    nll = -float(chosen.double().sum())
    if nll == float("inf"):
        raise NonFiniteError("a token of the text has probability 0 (its logit is -inf)")
    return nll
