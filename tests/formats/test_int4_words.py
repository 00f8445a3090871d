from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.formats.int4_words import WORD_ORDERS

# Which word and which nibble of it holds the code of an output and an input. AutoAWQ's columns 0, 1, 2, ... of eight
# are in nibbles 0, 4, 1, 5, 2, 6, 3, 7.
PLACES = {
    "compressed-tensors": lambda row, column: (row, column // 8, column % 8),
    "awq": lambda row, column: (column, row // 8, (0, 4, 1, 5, 2, 6, 3, 7)[row % 8]),
    "gptq": lambda row, column: (column // 8, row, column % 8),
}


def codes_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)


def test_all_orders_are_known() -> None:
    assert set(PLACES) == set(WORD_ORDERS)


@pytest.mark.parametrize("order", WORD_ORDERS)
def test_each_code_is_where_the_format_says(order: str) -> None:
    codes = codes_of(16, 24, 0)
    words = WORD_ORDERS[order].pack(codes)
    assert (words.dtype, words.numel()) == (torch.int32, 16 * 24 // 8)
    for row in range(16):
        for column in range(24):
            *at, nibble = PLACES[order](row, column)
            assert (int(words[tuple(at)]) >> 4 * nibble & 0xF) - 8 == codes[row, column]


@pytest.mark.parametrize("order", WORD_ORDERS)
def test_another_number_of_inputs_is_refused(order: str) -> None:
    pack, unpack = WORD_ORDERS[order]
    with pytest.raises(HalfbyteError, match="24"):
        unpack(pack(codes_of(8, 16, 0)), 24)


@pytest.mark.parametrize("order", WORD_ORDERS)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_words_come_back(order: str, rows: int, columns: int, seed: int) -> None:
    codes = codes_of(8 * rows, 8 * columns, seed)
    pack, unpack = WORD_ORDERS[order]
    words = pack(codes)
    found = unpack(words, 8 * columns)
    assert (found.dtype, found.is_contiguous()) == (torch.int8, True)
    assert torch.equal(found, codes)
    assert torch.equal(pack(found), words)
