from __future__ import annotations

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.evaluation.gate import Gate
from halfbyte.evaluation.result import Comparison, Evaluation


def _evaluation(baseline: Comparison | None) -> Evaluation:
    return Evaluation(64, 64, False, 2, 9, 126, 600, 1.5, 4.48, baseline)


WORSE = _evaluation(
    Comparison(
        perplexity=4.0,
        nll=1.386,
        perplexity_increase=0.12,
        extra_nll=0.113,
        extra_nll_se=0.01,
        kl_mean=0.2,
        kl_p99=1.0,
        top1_agreement=0.8,
    )
)


def test_each_limit_says_what_broke_it() -> None:
    assert Gate(max_ppl_increase=10).failures(WORSE) == ["perplexity rose by 12.00 %, allowed 10 %"]
    assert Gate(max_kl=0.1).failures(WORSE) == ["mean KL is 0.2000, allowed 0.1"]
    assert Gate(min_top1=0.9).failures(WORSE) == ["top-1 agreement is 0.8000, wanted 0.9"]
    assert len(Gate(10, 0.1, 0.9).failures(WORSE)) == 3


def test_a_limit_that_is_met_exactly_passes() -> None:
    assert Gate(12.0, 0.2, 0.8).failures(WORSE) == []


def test_a_limit_of_zero_is_a_limit() -> None:
    assert Gate(max_kl=0.0).is_set
    assert Gate(max_kl=0.0).failures(WORSE)
    assert not Gate().is_set


def test_a_limit_without_a_baseline_is_refused() -> None:
    assert Gate().failures(_evaluation(None)) == []
    with pytest.raises(HalfbyteError, match="baseline"):
        Gate(max_kl=1).failures(_evaluation(None))
