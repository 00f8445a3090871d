from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.shared_columns import SharedColumns, unshared
from halfbyte.errors import HalfbyteError

# Two value heads of two channels, each read by two query heads.
SHARED = SharedColumns(width=2, repeats=2)
COLUMNS = torch.tensor([1.0, 2.0, 5.0, 10.0, 7.0, 0.0, 3.0, 4.0])


def test_channels_reach_all_their_columns() -> None:
    assert SHARED.to_columns(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]


def test_columns_are_brought_together_by_channel() -> None:
    assert SHARED.mean(COLUMNS).tolist() == [3.0, 6.0, 5.0, 2.0]
    assert SHARED.largest(COLUMNS).tolist() == [5.0, 10.0, 7.0, 4.0]


def test_unshared_columns_are_their_channels() -> None:
    alone = unshared(8)
    for same in (alone.to_columns(COLUMNS), alone.mean(COLUMNS), alone.largest(COLUMNS)):
        assert torch.equal(same, COLUMNS)


def test_columns_that_do_not_divide_are_refused() -> None:
    with pytest.raises(HalfbyteError, match="6 columns"):
        SHARED.mean(COLUMNS[:6])
