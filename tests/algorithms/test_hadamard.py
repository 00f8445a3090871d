from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.hadamard import hadamard, random_hadamard
from halfbyte.errors import HalfbyteError

HADAMARD_SIZES = [1, 2, 4, 12, 20, 24, 28, 36, 60, 64, 76, 108, 148, 256, 576, 896, 1536]
OTHER_SIZES = [3, 6, 7, 172, 188, 200, 344]


def assert_orthogonal(matrix: torch.Tensor) -> None:
    identity = torch.eye(len(matrix), dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.t(), identity, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_all_entries_have_one_size(size: int) -> None:
    matrix = hadamard(size)
    assert matrix.dtype == torch.float64
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5), rtol=0, atol=1e-12)
    assert_orthogonal(matrix)


@pytest.mark.parametrize("size", OTHER_SIZES)
def test_other_sizes_are_orthogonal_and_seeded(size: int) -> None:
    matrix = hadamard(size, seed=3)
    assert matrix.shape == (size, size)
    assert_orthogonal(matrix)
    assert torch.equal(matrix, hadamard(size, seed=3))


def test_what_has_no_hadamard_matrix_here_depends_on_the_seed() -> None:
    assert not torch.equal(hadamard(172, seed=0), hadamard(172, seed=1))
    assert torch.equal(hadamard(36, seed=0), hadamard(36, seed=1))


@pytest.mark.parametrize("size", [16, 36, 172])
def test_random_signs_turn_the_inputs(size: int) -> None:
    matrix = random_hadamard(size, 7)
    assert_orthogonal(matrix)
    signs = (matrix @ hadamard(size, seed=7).t()).diagonal()
    torch.testing.assert_close(signs.abs(), torch.ones(size, dtype=torch.float64))
    assert {-1.0, 1.0} == set(signs.round().tolist())
    assert torch.equal(matrix, random_hadamard(size, 7))
    assert not torch.equal(matrix, random_hadamard(size, 8))


def test_an_outlier_is_spread_over_all_channels() -> None:
    spread = torch.eye(64, dtype=torch.float64)[3] @ hadamard(64)
    assert spread.abs().max() == pytest.approx(1 / 8)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(HalfbyteError, match="size 0"):
        hadamard(0)
