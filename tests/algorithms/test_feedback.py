from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.feedback import Feedback
from halfbyte.errors import HalfbyteError


def moment_of(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return inputs.T @ inputs / len(inputs)


def test_inputs_come_in_descending_order_equal_ones_in_their_own() -> None:
    feedback = Feedback.of(torch.diag(torch.tensor([1.0, 4.0, 1.0, 9.0, 4.0])), 0.01)
    assert feedback.order.tolist() == [3, 1, 4, 0, 2]


def test_the_factors_make_the_damped_moment_diagonal() -> None:
    """H = F D F^T with F one on its diagonal and D diagonal: errors e cost (e F) D (e F)^T."""
    moment = moment_of(24)
    feedback = Feedback.of(moment, 0.02)
    damped = moment.double() + 0.02 * moment.diagonal().double().mean() * torch.eye(24)
    ordered = damped[feedback.order][:, feedback.order]
    factors = feedback.factors.double().triu(1) + torch.eye(24)
    inverse = torch.linalg.inv(factors)
    costs = inverse @ ordered @ inverse.T
    assert (costs.diagonal() > 0).all()
    torch.testing.assert_close(costs, torch.diag(costs.diagonal()), rtol=0, atol=1e-6 * float(damped.norm()))
    assert (feedback.damping, feedback.fallback) == ((0.02,), (None,))


def indefinite(excess: float) -> torch.Tensor:
    """Eigenvalues 2 + excess and -excess, diagonal 1."""
    return torch.tensor([[1.0, 1.0 + excess], [1.0 + excess, 1.0]])


@pytest.mark.parametrize(
    ("moment", "given", "used"),
    [
        (indefinite(0.05), 0.01, 0.1),
        (indefinite(0.5), 0.01, 1.0),
        (indefinite(0.5), 0.3, 1.0),
        (indefinite(0.005), 0.0, 0.01),
        (torch.ones(6, 6), 0.01, 0.01),
    ],
)
def test_damping_is_raised_until_it_is_enough(moment: torch.Tensor, given: float, used: float) -> None:
    feedback = Feedback.of(moment, given)
    assert feedback.damping == (pytest.approx(used),)
    assert feedback.fallback == (None,)
    assert feedback.factors.isfinite().all()


@pytest.mark.parametrize(
    ("moment", "reason"),
    [
        (indefinite(5.0), "not positive definite"),
        (torch.zeros(2, 2), "no input was ever other than zero"),
        (-torch.eye(2), "no positive diagonal"),
        (torch.tensor([[1.0, torch.nan], [torch.nan, 1.0]]), "NaN or Inf"),
        (torch.tensor([[torch.inf, 0.0], [0.0, 1.0]]), "NaN or Inf"),
    ],
)
def test_what_cannot_be_repaired_leaves_no_feedback_and_a_reason(moment: torch.Tensor, reason: str) -> None:
    """Beside a member that is sound, which must not notice."""
    sound = moment_of(2)
    feedback = Feedback.of(torch.stack([sound, moment]), 0.01)
    assert feedback.damping == (0.01, None)
    assert feedback.fallback[0] is None
    assert reason in str(feedback.fallback[1])
    assert (feedback.factors[1] == 0).all()
    assert sorted(feedback.order[1].tolist()) == [0, 1]
    assert torch.equal(feedback.factors[0], Feedback.of(sound, 0.01).factors)


def test_members_that_need_more_damping_get_it_alone() -> None:
    members = torch.stack([indefinite(0.5), moment_of(2), indefinite(0.05), indefinite(5.0)])
    feedback = Feedback.of(members.reshape(2, 2, 2, 2), 0.01)
    assert feedback.factors.shape == (2, 2, 2, 2)
    assert feedback.damping[3] is None
    assert feedback.damping[:3] == pytest.approx((1.0, 0.01, 0.1))
    for member, factors in zip(members, feedback.factors.flatten(0, 1), strict=True):
        assert torch.equal(factors, Feedback.of(member, 0.01).factors)


@pytest.mark.parametrize("products", [0.0, 1e-25], ids=["zero", "square too small for fp32"])
def test_inputs_that_were_always_zero_are_last_and_apart(products: float) -> None:
    moment = moment_of(6)
    moment[2], moment[:, 2] = products, products
    moment[2, 2] = 0.0
    feedback = Feedback.of(moment, 0.0)
    assert feedback.order[-1] == 2
    assert (feedback.factors[:-1, -1] == 0).all()
    assert feedback.damping == (0.0,)


@pytest.mark.parametrize("damping", [-0.01, float("nan"), float("inf")])
def test_impossible_damping_is_refused(damping: float) -> None:
    with pytest.raises(HalfbyteError, match="damping"):
        Feedback.of(moment_of(2), damping)


def test_the_moment_is_left_alone() -> None:
    moment = moment_of(5)
    before = moment.clone()
    Feedback.of(moment, 0.01)
    assert torch.equal(moment, before)


def test_strides_do_not_show() -> None:
    moment = torch.stack([moment_of(24), moment_of(24, seed=1)])
    assert torch.equal(Feedback.of(moment.mT, 0.01).factors, Feedback.of(moment, 0.01).factors)
