from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.algorithms.shared_columns import SharedColumns
from halfbyte.algorithms.smoothquant import smoothquant_scales
from halfbyte.errors import HalfbyteError
from tests.algorithms.inputs import outlier_inputs, statistics_of
from tests.formats.hostile import VALUES


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_equation_four(alpha: float) -> None:
    inputs, weights = outlier_inputs(32, 24), [normal(8, 24), normal(4, 24, seed=1)]
    scales = smoothquant_scales(weights, statistics_of(inputs), alpha)
    for channel in range(24):
        x = float(inputs[:, channel].abs().max())
        w = max(float(weight[:, channel].abs().max()) for weight in weights)
        assert float(scales[channel]) == pytest.approx(x**alpha / w ** (1 - alpha), rel=1e-5)


def test_a_half_makes_inputs_and_weights_equally_large() -> None:
    inputs, weight = outlier_inputs(32, 24), normal(8, 24)
    scales = smoothquant_scales([weight], statistics_of(inputs))
    torch.testing.assert_close((inputs / scales).abs().amax(0), (weight * scales).abs().amax(0))


def test_columns_that_read_one_channel_share_its_largest_magnitudes() -> None:
    inputs, weight = outlier_inputs(32, 24), normal(8, 24)
    scales = smoothquant_scales([weight], statistics_of(inputs), shared=SharedColumns(width=4, repeats=3))
    for channel in range(8):
        columns = [channel // 4 * 12 + repeat * 4 + channel % 4 for repeat in range(3)]
        x, w = (float(part[:, columns].abs().max()) for part in (inputs, weight))
        assert float(scales[channel]) == pytest.approx((x / w) ** 0.5, rel=1e-5)


@given(
    st.lists(st.sampled_from(VALUES), min_size=8, max_size=8),
    st.lists(st.sampled_from(VALUES), min_size=8, max_size=8),
)
def test_hostile_channels_have_finite_positive_scales(inputs: list[float], weights: list[float]) -> None:
    x, w = torch.tensor([inputs]), torch.tensor([weights])
    scales = smoothquant_scales([w], statistics_of(x))
    assert (scales.isfinite() & (scales >= 1e-4) & (scales <= 1e4)).all()
    assert scales[((x == 0) | (w == 0))[0]].eq(1).all()


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_other_alphas_are_refused(alpha: float) -> None:
    with pytest.raises(HalfbyteError, match="alpha"):
        smoothquant_scales([normal(2, 4)], statistics_of(outlier_inputs(2, 4)), alpha)
