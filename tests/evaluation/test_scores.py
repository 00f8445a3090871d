from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import NonFiniteError
from halfbyte.evaluation import scores
from halfbyte.evaluation.scores import score_window


def test_against_the_definition_in_float64() -> None:
    torch.manual_seed(0)
    logits, baseline = 4 * torch.randn(50, 37), 4 * torch.randn(50, 37)
    targets = torch.randint(37, (50,))
    found = score_window(logits, targets, baseline)

    q, p = logits.double().softmax(-1), baseline.double().softmax(-1)
    assert found.tokens == 50
    assert found.nll == pytest.approx(-sum(math.log(q[i, t]) for i, t in enumerate(targets)), rel=1e-6)
    assert found.baseline_nll == pytest.approx(
        -sum(math.log(p[i, t]) for i, t in enumerate(targets)), rel=1e-6
    )
    assert found.kl is not None
    assert found.kl.double() == pytest.approx((p * (p / q).log()).sum(-1), rel=1e-4)
    assert found.agreements == sum(int(a.argmax() == b.argmax()) for a, b in zip(q, p, strict=True))


def test_known_values() -> None:
    # softmax of (0, ln 3) is (1/4, 3/4); the baseline is (1/2, 1/2).
    found = score_window(torch.tensor([[0.0, math.log(3)]]), torch.tensor([0]), torch.tensor([[1.0, 1.0]]))
    assert found.nll == pytest.approx(math.log(4))
    assert found.baseline_nll == pytest.approx(math.log(2))
    assert found.kl is not None
    assert found.kl.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3)])
    assert found.agreements == 0  # a tie goes to the first token


def test_a_model_against_itself_differs_in_nothing() -> None:
    logits = 30 * torch.randn(20, 100, generator=torch.Generator().manual_seed(1))
    found = score_window(logits, torch.zeros(20, dtype=torch.long), logits)
    assert found.kl is not None
    assert found.kl.tolist() == [0.0] * 20
    assert found.agreements == 20
    assert found.nll == found.baseline_nll


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    logits, baseline, targets = torch.randn(33, 11), torch.randn(33, 11), torch.randint(11, (33,))
    whole = score_window(logits, targets, baseline)
    monkeypatch.setattr(scores, "_CHUNK_VALUES", 5 * 11)
    parts = score_window(logits, targets, baseline)
    assert parts.nll == pytest.approx(whole.nll)
    assert torch.equal(parts.kl, whole.kl)
    assert parts.agreements == whole.agreements


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=6, max_size=6),
    others=st.lists(st.floats(-80, 80, width=32), min_size=6, max_size=6),
)
def test_extreme_logits_give_numbers_or_a_refusal(values: list[float], others: list[float]) -> None:
    try:
        found = score_window(torch.tensor([others]), torch.tensor([3]), torch.tensor([values]))
    except NonFiniteError:
        assert max(values) - min(values) > 3.4e38  # the difference does not fit float32
        return
    assert math.isfinite(found.nll)
    assert found.kl is not None
    assert found.kl.isfinite().all()
    assert (found.kl >= 0).all()


def test_masked_tokens_do_not_matter() -> None:
    masked = torch.tensor([[0.0, 0.0, -math.inf]])
    found = score_window(masked, torch.tensor([1]), masked)
    assert found.nll == pytest.approx(math.log(2))
    assert found.kl is not None
    assert found.kl.item() == 0


@pytest.mark.parametrize(
    ("model", "baseline", "message"),
    [
        ([math.nan, 0.0], None, "the model's logits hold NaN"),
        ([math.inf, 0.0], None, "the model's logits hold NaN or Inf"),
        ([0.0, 0.0], [math.nan, 0.0], "the baseline's logits hold NaN"),
        ([-math.inf, 0.0], None, "a token of the text has probability 0"),
        ([0.0, -math.inf], [0.0, 0.0], "the model rules out"),
    ],
)
def test_broken_logits_are_refused(model: list[float], baseline: list[float] | None, message: str) -> None:
    with pytest.raises(NonFiniteError, match=message):
        score_window(
            torch.tensor([model]),
            torch.tensor([0]),
            None if baseline is None else torch.tensor([baseline]),
        )
