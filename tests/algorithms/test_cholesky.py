from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms import cholesky
from halfbyte.algorithms.cholesky import cholesky_


def definite(count: int, size: int, seed: int = 0) -> torch.Tensor:
    inputs = torch.randn(count, 2 * size, size, generator=torch.Generator().manual_seed(seed))
    return inputs.mT @ inputs / (2 * size) + 0.01 * torch.eye(size)


@pytest.mark.parametrize("size", [1, 5, 40, 41])
def test_the_product_is_the_matrix(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "_BLOCK", 8)
    monkeypatch.setattr(cholesky, "_PART", 12)
    matrix = definite(3, size)
    factors = matrix.clone()
    assert not cholesky_(factors).any()
    assert torch.equal(factors, factors.tril())
    torch.testing.assert_close(factors.double() @ factors.double().mT, matrix.double(), rtol=0, atol=5e-7)
    torch.testing.assert_close(factors, torch.linalg.cholesky(matrix.double()).float(), rtol=1e-5, atol=1e-5)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, in_blocks = definite(2, 100), definite(2, 100)
    cholesky_(whole)
    monkeypatch.setattr(cholesky, "_BLOCK", 7)
    cholesky_(in_blocks)
    torch.testing.assert_close(in_blocks, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_matrix_without_factors_is_named_and_disturbs_no_other(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky, "_BLOCK", 8)
    matrix = definite(3, 40)
    matrix[1, place, place] = -1.0
    alone = matrix[2:].clone()
    cholesky_(alone)
    assert cholesky_(matrix).tolist() == [False, True, False]
    assert torch.equal(matrix[2], alone[0])
