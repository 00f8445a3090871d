from __future__ import annotations

from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.calibration.dealing import Dealer

BOS, EOS = -1, -2


def dealer(wanted: int, *lengths: int, start: bool = False, separator: bool = True) -> Dealer:
    return Dealer(wanted, lengths, [BOS] if start else [], [EOS] if separator else [], Random(0))


def ids(made: Dealer) -> list[list[int]]:
    return [sample.ids.tolist() for sample in made.samples]


def test_short_documents_are_packed_with_separators_up_to_the_length() -> None:
    made = dealer(2, 8)
    for document in ([1, 2, 3], [4, 5], [6, 7, 8], [9]):
        made.add_document(document)
    assert ids(made) == [[1, 2, 3, EOS, 4, 5, EOS, 6]]
    made.finish()
    assert ids(made)[1:] == [[9, EOS, 7, 8]]
    assert made.split == 1


def test_a_long_document_gives_one_window_until_nothing_else_is_left() -> None:
    made = dealer(4, 4, start=True)
    made.add_document(list(range(9)))
    assert len(made.samples) == 1
    made.add_document([20, 21, 22])
    assert ids(made)[1] == [BOS, 20, 21, 22]
    made.finish()
    assert [sample[0] for sample in ids(made)] == [BOS] * 4
    assert sorted(token for sample in ids(made) for token in sample[1:] if token < 20) == list(range(9))
    assert made.split == 1


def test_lengths_are_taken_in_turn() -> None:
    made = dealer(6, 2, 5, 3)
    for _ in range(6):
        made.add_document(list(range(100)))
    assert [len(sample) for sample in ids(made)] == [2, 5, 3, 2, 5, 3]


def test_a_chat_is_never_packed_and_cut_back_to_what_counts() -> None:
    made = dealer(9, 5)
    made.add_document([1, 2])
    assert made.add_chat([3, 4, 5], ["template", "", "template"])
    assert made.add_chat([1, 2, 3, 4, 5, 6, 7], ["template", "", "", "span", "span", "span", ""])
    assert not made.add_chat([1, 2, 3, 4, 5, 6], ["template"] * 5 + [""])
    assert not made.add_chat([1], ["template"])
    assert ids(made) == [[3, 4, 5], [1, 2, 3]]
    assert [sample.counts.tolist() for sample in made.samples] == [[False, True, False], [False, True, True]]
    assert made.masked == {"template": 3}
    assert made.truncated == 1


def test_token_ids_stay_by_themselves() -> None:
    made = dealer(9, 4, start=True)
    made.add_ids([1, 2])
    made.add_ids(list(range(10, 19)))
    made.finish()
    assert ids(made)[0] == [1, 2]
    assert sorted(token for sample in ids(made)[1:] for token in sample) == list(range(10, 19))
    assert max(map(len, ids(made))) == 4


def test_a_length_of_one_has_no_room_for_a_start_token() -> None:
    made = dealer(3, 1, start=True)
    made.add_document([7, 8, 9])
    made.finish()
    assert sorted(ids(made)) == [[7], [8], [9]]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    wanted=st.integers(1, 30),
    start=st.booleans(),
    separator=st.booleans(),
)
def test_no_token_is_used_twice_and_none_is_lost_while_samples_are_wanted(
    sizes: list[int], lengths: list[int], wanted: int, start: bool, separator: bool
) -> None:
    numbers = count()
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    made = dealer(wanted, *lengths, start=start, separator=separator)
    for document in documents:
        if not made.full:
            made.add_document(document)
    made.finish()
    used = [token for sample in ids(made) for token in sample if token >= 0]
    assert len(used) == len(set(used))
    assert 1 <= len(made.samples) <= wanted
    assert all(1 <= len(sample) <= max(lengths) for sample in ids(made))
    if len(made.samples) < wanted:
        assert sorted(used) == list(range(sum(sizes)))
