from __future__ import annotations

import numpy as np

from halfbyte.audit.expected import ChannelScales, Factors


def _scales(*values: float, doubt: float = 0.0) -> ChannelScales:
    return ChannelScales(np.array(values, np.float32), np.full(len(values), doubt, np.float32))


def test_columns_of_query_heads_that_share_a_value_head() -> None:
    """Two value heads of two channels, each read by two query heads."""
    found = Factors.ones((1, 8)).read(_scales(2, 3, 5, 7), width=2, repeats=2)
    assert found.columns.tolist() == [2, 3, 2, 3, 5, 7, 5, 7]
    assert found.rows.tolist() == [1]
    assert found.moves == 1
    assert not found.estimated


def test_rows_are_divided_and_doubts_add_up() -> None:
    found = Factors.ones((4, 2)).read(_scales(3, 4), width=2, repeats=1)
    found = found.put_out(_scales(2, 8, doubt=0.25), np.array([3, 1]))
    found = found.put_out(_scales(2, doubt=0.5), np.array([3]))
    assert found.rows.tolist() == [1, 0.125, 1, 0.25]
    assert found.row_doubt.tolist() == [0, 0.25, 0, 0.75]
    assert found.columns.tolist() == [3, 4]
    assert found.moves == 3
    assert found.estimated
