from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.audit.codes import code_table
from halfbyte.audit.elements import as_array, float_table, padding_is_zero, unpack_nibbles, unpack_words

REFERENCE = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("element", REFERENCE)
def test_every_code_of_a_float_format_is_what_ml_dtypes_says(element: str) -> None:
    codes = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    expected = codes.view(REFERENCE[element]).astype(np.float32)
    np.testing.assert_array_equal(float_table(element), expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(float_table(element)[finite]), np.signbit(expected[finite]))


def test_an_unknown_format_has_no_table() -> None:
    with pytest.raises(ValueError, match="e3m2"):
        float_table("e3m2")


def test_bf16_is_the_upper_half_of_float32() -> None:
    words = np.array([0x3F80, 0xC000, 0x0001, 0x7F80, 0x8000], "<u2")
    expected = words.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(as_array(words.view(np.uint8), "BF16"), expected)


def _packed(codes: list[list[int]], bits: int) -> np.ndarray:
    """Code i of a row at bits ``i * bits`` of its words, by the definition, in Python's integers."""
    per_word = 32 // bits
    rows = []
    for row in codes:
        pieces = [row[at : at + per_word] for at in range(0, len(row), per_word)]
        rows.append([sum(code << (bits * place) for place, code in enumerate(piece)) for piece in pieces])
    return np.array(rows, dtype=np.uint32).view(np.int32)


@given(st.data())
def test_words_are_unpacked_by_the_definition(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 3, 4, 5, 6, 7, 8]))
    rows, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    code = st.integers(0, (1 << bits) - 1)
    codes = data.draw(st.lists(st.lists(code, min_size=size, max_size=size), min_size=rows, max_size=rows))
    words = _packed(codes, bits)
    assert unpack_words(words, bits, size).tolist() == codes
    assert padding_is_zero(words, bits, size)


@pytest.mark.parametrize(("bits", "size"), [(4, 12), (3, 10), (3, 7), (8, 5)])
def test_a_padding_bit_is_seen(bits: int, size: int) -> None:
    words = _packed([[0] * size], bits)
    words[0, -1] |= np.int32(-(2**31))
    assert not padding_is_zero(words, bits, size)


def test_a_full_word_has_no_padding() -> None:
    assert padding_is_zero(np.array([[-1]], np.int32), 4, 8)


def test_the_even_column_is_the_low_nibble() -> None:
    assert unpack_nibbles(np.array([[0x21, 0x43]], np.uint8)).tolist() == [[1, 2, 3, 4]]


def test_integers_saturate_at_the_ends_and_round_between() -> None:
    table = code_table("int4")
    assert table.value.tolist() == list(range(-8, 8))
    assert table.low.tolist() == [-np.inf, *(code - 0.5 for code in range(-7, 8))]
    assert table.high.tolist() == [*(code + 0.5 for code in range(-8, 7)), np.inf]


def test_signed_bytes_outside_their_range_are_no_numbers() -> None:
    table = code_table("int4", signed_bytes=True)
    assert table.value[0xF8] == -8
    assert table.value[7] == 7
    assert np.isnan(table.value[[8, 0xF7]]).all()
    assert table.partial


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_bounds_of_floats_are_the_middles_between_neighbours(element: str) -> None:
    table = code_table(element)
    levels = np.unique(table.value[np.isfinite(table.value)]).astype(np.float64)
    for code, value in enumerate(table.value):
        if np.isfinite(value):
            at = int(np.searchsorted(levels, value))
            assert table.low[code] == (-np.inf if at == 0 else (levels[at - 1] + levels[at]) / 2)
            assert table.high[code] == (
                np.inf if at == len(levels) - 1 else (levels[at] + levels[at + 1]) / 2
            )
