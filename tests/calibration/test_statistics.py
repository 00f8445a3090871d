"""Moments of layers' inputs against their definition."""

from __future__ import annotations

import pytest
import torch

from halfbyte.calibration.statistics import InputMoments


def moments(samples: list[torch.Tensor]) -> InputMoments:
    added = InputMoments(samples[0].shape[1], torch.device("cpu"))
    for sample in samples:
        added.add(sample)
    return added


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_over_all_tokens(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(tokens, 6, generator=generator).to(dtype) for tokens in (3, 8, 1)]
    found = moments(samples).statistics()
    tokens = torch.cat(samples).double()
    assert found.tokens == 12
    torch.testing.assert_close(found.moment.double(), tokens.T @ tokens / 12, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.absmean.double(), tokens.abs().mean(0), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.absmax.double(), tokens.abs().amax(0))


def test_the_order_of_samples_does_not_show() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn(64, 16, generator=generator) * 10.0**power for power in range(-3, 4)]
    one, other = moments(samples).statistics(), moments(samples[::-1]).statistics()
    assert torch.equal(one.moment, other.moment)
    assert torch.equal(one.absmean, other.absmean)


def test_no_token_at_all() -> None:
    found = moments([torch.zeros(0, 5)]).statistics()
    assert found.tokens == 0
    assert not found.moment.any()
    assert not found.absmean.any()
    assert not found.absmax.any()


def test_one_rank_alone_reduces_to_itself() -> None:
    added = moments([torch.ones(2, 3)])
    added.reduce()
    assert added.statistics().tokens == 2
