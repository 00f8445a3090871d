from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.kernels.triton.linear_layout import (
    decode_magnitude,
    decode_offset,
    encode_magnitude,
    encode_offset,
    pack_spans,
    unpack_spans,
)


def test_bytes_join_the_halves_of_a_span() -> None:
    nibbles = (torch.arange(2 * 96) * 7 % 16).to(torch.uint8).view(2, 96)
    packed = pack_spans(nibbles, 64, parts=2, filler=5)
    assert (packed.shape, packed.dtype) == ((2, 2, 32), torch.uint8)
    for row, unit in ((0, 0), (1, 31)):
        assert packed[0, row, unit] == nibbles[row, unit] | nibbles[row, 32 + unit] << 4
        assert packed[1, row, unit] == nibbles[row, 64 + unit] | 5 << 4


def test_words_join_the_quarters_of_a_span() -> None:
    nibbles = (torch.arange(256) * 7 % 16).to(torch.uint8).view(2, 128)
    packed = pack_spans(nibbles, 128, parts=4, filler=8)
    assert (packed.shape, packed.dtype) == ((1, 2, 32), torch.int16)
    want = sum(int(nibbles[1, 32 * part + 9]) << 4 * part for part in range(4))
    assert int(packed[0, 1, 9]) & 0xFFFF == want


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 300),
    form=st.sampled_from([(64, 2), (128, 2), (128, 4)]),
    seed=st.integers(0, 99),
)
def test_unpacking_is_the_inverse(rows: int, columns: int, form: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(16, (rows, columns), generator=generator).to(torch.uint8)
    span, parts = form
    assert torch.equal(unpack_spans(pack_spans(nibbles, span, parts, filler=8), columns), nibbles)


def test_codes_by_their_definitions() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)
    assert encode_offset(codes).tolist() == list(range(16))
    by_magnitude = [8 + (-code - 1) if code < 0 else code for code in range(-8, 8)]
    assert encode_magnitude(codes).tolist() == by_magnitude


@pytest.mark.parametrize(
    ("encode", "decode"), [(encode_offset, decode_offset), (encode_magnitude, decode_magnitude)]
)
def test_decoding_is_the_inverse(encode: object, decode: object) -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)
    nibbles = encode(codes)  # type: ignore[operator]
    assert nibbles.dtype == torch.uint8
    assert torch.equal(decode(nibbles), codes)  # type: ignore[operator]
