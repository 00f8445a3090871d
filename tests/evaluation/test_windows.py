from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.evaluation.windows import Window, plan_windows


def test_without_overlap_the_first_token_of_each_window_does_not_count() -> None:
    assert plan_windows(11, 4) == [Window(0, 4, 1), Window(4, 8, 5)]


def test_overlapping_windows_count_only_what_they_add() -> None:
    assert plan_windows(9, 4, 2) == [Window(0, 4, 1), Window(2, 6, 4), Window(4, 8, 6)]


def test_a_start_token_takes_a_place_and_lets_the_first_token_count() -> None:
    assert plan_windows(7, 4, bos=True) == [Window(0, 3, 0), Window(3, 6, 3)]


def test_limit_takes_the_first() -> None:
    assert plan_windows(100, 4, limit=2) == plan_windows(8, 4)


@given(tokens=st.integers(2, 200), context=st.integers(2, 40), bos=st.booleans(), data=st.data())
def test_no_token_counts_twice_and_every_one_has_the_promised_context(
    tokens: int, context: int, bos: bool, data: st.DataObject
) -> None:
    span = context - bos
    if tokens < span:
        return
    stride = data.draw(st.integers(1, span))
    windows = plan_windows(tokens, context, stride, bos=bos)
    counted = [token for window in windows for token in range(window.first_scored, window.stop)]
    assert len(counted) == len(set(counted)) == sum(window.scored for window in windows)
    for window in windows:
        assert window.stop - window.start == span
        assert window.first_scored + bos > window.start  # something is in front of every counted token
        assert window.stop <= tokens
    for window in windows[1:]:
        assert window.first_scored - window.start >= min(span - stride, 1)
    assert windows[-1].stop + stride > tokens  # no full window was left out
    if stride < span:
        assert counted == list(range(1 - bos, windows[-1].stop))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 1), "context 1 is too short, expected at least 2"),
        ((10, 4, 0), "stride 0 is outside 1 to 4"),
        ((10, 4, 5), "stride 5 is outside 1 to 4"),
        ((3, 4), "the text has 3 tokens, one window needs 4"),
    ],
)
def test_what_is_too_short_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(HalfbyteError, match=message):
        plan_windows(*arguments)


def test_no_windows_is_refused() -> None:
    with pytest.raises(HalfbyteError, match="0 windows are too few"):
        plan_windows(10, 4, limit=0)
