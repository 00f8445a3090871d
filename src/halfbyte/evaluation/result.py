"""The numbers of an evaluation and the conditions under which they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from halfbyte.errors import NonFiniteError
from halfbyte.evaluation.scores import WindowScore

_LARGEST_NLL = 700.0
"""exp of more does not fit a float64; a uniform guess over a million tokens has 14."""


@dataclass(frozen=True)
class Comparison:
    """A model against a baseline on the same tokens.

    perplexity, nll: the baseline's own. perplexity_increase: relative, 0.05 is 5 % worse.
    extra_nll: mean loss minus the baseline's, in nats per token; extra_nll_se: standard error of that mean, from
    the differences of the windows (None with a single window). kl_mean, kl_p99: KL(baseline || model) per
    token, in nats. top1_agreement: share of tokens with the same most likely token.
    """

    perplexity: float
    nll: float
    perplexity_increase: float
    extra_nll: float
    extra_nll_se: float | None
    kl_mean: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class Evaluation:
    """Token-level perplexity of a model on one text.

    context: tokens a window shows to the model. stride: tokens from one window's start to the next.
    bos: whether each window starts with the start token. tokens_scored: tokens that the means are over.
    text_tokens, windows_in_text: what the whole text holds. nll: mean loss in nats per token.
    """

    context: int
    stride: int
    bos: bool
    windows: int
    windows_in_text: int
    tokens_scored: int
    text_tokens: int
    nll: float
    perplexity: float
    baseline: Comparison | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)


def mean_nll(total: float, tokens: int, whose: str) -> float:
    """Errors: a loss so large that the perplexity is no number, which only a broken model has."""
    nll = total / tokens
    if nll > _LARGEST_NLL:
        raise NonFiniteError(f"{whose} has a loss of {nll:.0f} nats per token: its answers are broken")
    return nll


def compare(scores: Sequence[WindowScore], nll: float) -> Comparison:
    """Put the windows together; ``nll`` is the model's mean loss over them."""
    tokens = sum(score.tokens for score in scores)
    baseline_nll = mean_nll(sum(score.baseline_nll for score in scores), tokens, "the baseline")
    kl = np.concatenate([score.kl.numpy() for score in scores if score.kl is not None]).astype(np.float64)
    return Comparison(
        perplexity=math.exp(baseline_nll),
        nll=baseline_nll,
        perplexity_increase=math.expm1(nll - baseline_nll),
        extra_nll=nll - baseline_nll,
        extra_nll_se=_paired_standard_error(scores),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.percentile(kl, 99)),
        top1_agreement=sum(score.agreements for score in scores) / tokens,
    )


def _paired_standard_error(scores: Sequence[WindowScore]) -> float | None:
    """Windows are the independent units: tokens within one share their context and their topic."""
    if len(scores) < 2:
        return None
    differences = np.array([(score.nll - score.baseline_nll) / score.tokens for score in scores])
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))
