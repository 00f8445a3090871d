from __future__ import annotations

import numpy as np
import pytest
import torch

from halfbyte.audit.row_factors import row_factors
from halfbyte.audit.written import WrittenRows
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.schemes import PRESETS


def _weight(rows: int, columns: int, tail: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    return weight * weight.abs() * 10 if tail else weight


def _rows(values: torch.Tensor, inner: torch.Tensor | None = None, unit: float = 0.0) -> WrittenRows:
    return WrittenRows(0, values.numpy(), None if inner is None else inner.numpy(), unit)


@pytest.mark.parametrize(("columns", "tail"), [(128, False), (2048, False), (2048, True)])
@pytest.mark.parametrize("scheme", ["w4a8", "w8a8-int8", "w4a8-int8", "nvfp4", "mxfp4", "fp8", "mxfp8"])
def test_factors_of_rounded_rows_are_within_their_doubt(scheme: str, columns: int, tail: bool) -> None:
    weight = _weight(200, columns, tail)
    factors = torch.logspace(-2, 2, 200)
    q = quantize(weight * factors[:, None], PRESETS[scheme].weights.with_scale("bf16"))
    found, doubt = row_factors(_rows(dequantize(q)), weight.numpy())
    assert (np.abs(found / factors.double().numpy() - 1) <= doubt).all()
    assert np.median(doubt) < 0.2


def test_clipped_weights_do_not_count() -> None:
    weight = _weight(100, 256)
    limit = 0.04  # less than a deviation: a third of all weights is clipped
    inner = weight.abs() < limit
    clipped = weight.clamp(-limit, limit)
    found, doubt = row_factors(_rows(clipped, inner), weight.numpy())
    np.testing.assert_allclose(found, 1)
    np.testing.assert_allclose(doubt, 0, atol=1e-6)
    biased, _ = row_factors(_rows(clipped), weight.numpy())
    assert (biased < 0.95).all()


def test_rows_of_saturated_codes_use_them_all() -> None:
    weight = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    found, _ = row_factors(_rows(3 * weight, torch.zeros(1, 4, dtype=torch.bool)), weight.numpy())
    np.testing.assert_allclose(found, 3)


def test_zero_rows_say_nothing() -> None:
    zero, weight = torch.zeros(1, 8), _weight(1, 8)
    for written, expected in ((zero, weight), (weight, zero), (zero, zero)):
        found, doubt = row_factors(_rows(written), expected.numpy())
        assert (found[0], doubt[0]) == (1, 0)


def test_a_factor_that_rounding_swallows_is_in_doubt() -> None:
    weight = _weight(4, 64).bfloat16().float()
    written = (weight * 1.001).bfloat16().float()
    assert torch.equal(written, weight)
    found, doubt = row_factors(_rows(written, unit=2.0**-8), weight.numpy())
    assert (np.abs(found - 1.001) <= doubt).all()


def test_another_weight_has_factors_of_both_signs() -> None:
    found, _ = row_factors(_rows(_weight(64, 128)), _weight(64, 128).flip(0).numpy())
    assert (found < 0).any()
