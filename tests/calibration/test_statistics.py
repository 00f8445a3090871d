"""Moments of layers' inputs against their definition."""

from __future__ import annotations

import pytest
import torch

from halfbyte.calibration import statistics
from halfbyte.calibration.statistics import InputMoments


def moments(samples: list[torch.Tensor]) -> InputMoments:
    added = InputMoments(samples[0].shape[1], torch.device("cpu"))
    for sample in samples:
        added.add(sample[None])
    return added


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_over_all_tokens(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(tokens, 6, generator=generator).to(dtype) for tokens in (3, 8, 1)]
    found = moments(samples).finish()[0]
    tokens = torch.cat(samples).double()
    assert found.tokens == 12
    torch.testing.assert_close(found.moment.double(), tokens.T @ tokens / 12, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.absmean.double(), tokens.abs().mean(0), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.absmax.double(), tokens.abs().amax(0))


def test_the_order_of_samples_does_not_show() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn(64, 16, generator=generator) * 10.0**power for power in range(-3, 4)]
    one, other = moments(samples).finish()[0], moments(samples[::-1]).finish()[0]
    assert torch.equal(one.moment, other.moment)
    assert torch.equal(one.absmean, other.absmean)


def test_no_token_at_all() -> None:
    found = moments([torch.zeros(0, 5)]).finish()[0]
    assert found.tokens == 0
    assert not found.moment.any()
    assert not found.absmean.any()
    assert not found.absmax.any()


def test_one_rank_alone_reduces_to_itself() -> None:
    added = moments([torch.ones(2, 3)])
    added.reduce()
    assert added.finish()[0].tokens == 2


def test_members_of_a_stack_see_inputs_of_their_own() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(5, 7, 6, generator=generator)
    added = InputMoments(6, torch.device("cpu"), members=5)
    for sample in (inputs[:, :3], inputs[:, 3:]):
        added.add(sample[:2])
        added.add(sample[2:], first=2)
    for found, tokens in zip(added.finish(), inputs.double(), strict=True):
        assert found.tokens == 7
        torch.testing.assert_close(found.moment.double(), tokens.T @ tokens / 7, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.absmean.double(), tokens.abs().mean(0), rtol=1e-6, atol=1e-6)
        assert torch.equal(found.absmax.double(), tokens.abs().amax(0))


def test_wide_inputs_are_added_up_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_FEWEST_ROWS", 3)
    inputs = torch.randn(2, 9, 37, generator=torch.Generator().manual_seed(3))
    added = InputMoments(37, torch.device("cpu"), members=2)
    added.add(inputs)
    for found, tokens in zip(added.finish(), inputs.double(), strict=True):
        torch.testing.assert_close(found.moment.double(), tokens.T @ tokens / 9, rtol=1e-6, atol=1e-6)
        assert torch.equal(found.moment, found.moment.T)
