from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing import (
    pack_int32,
    pack_nibbles,
    pack_signed_nibbles,
    unpack_int32,
    unpack_nibbles,
    unpack_signed_nibbles,
)


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(bits)).to(torch.int8)


def test_four_bits_by_hand() -> None:
    assert pack_int32(torch.arange(-8, 0, dtype=torch.int8), 4).tolist() == [0x76543210]
    assert pack_int32(torch.tensor([-8, -8, -8, -8, -8, -8, -8, 7], dtype=torch.int8), 4).tolist() == [
        -(1 << 28)
    ]
    assert pack_int32(torch.tensor([0], dtype=torch.int8), 4).tolist() == [8]  # spare places are 0, not 8


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    dim=st.sampled_from([0, 1, -1]),
)
def test_words_follow_their_definition(bits: int, rows: int, columns: int, dim: int) -> None:
    codes = random_codes(bits, rows, columns)
    packed = pack_int32(codes, bits, dim)
    lines = codes if dim else codes.T
    words = packed if dim else packed.T
    per_word = 32 // bits
    for line, line_words in zip(lines.tolist(), words.tolist(), strict=True):
        expected = [0] * -(-len(line) // per_word)
        for i, code in enumerate(line):
            expected[i // per_word] |= (code + (1 << (bits - 1))) << (i % per_word * bits)
        assert [word % (1 << 32) for word in line_words] == expected
    assert packed.is_contiguous()
    assert torch.equal(unpack_int32(packed, bits, columns if dim else rows, dim), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(20, 128), (3, 37), (16, 8)])
def test_equal_to_compressed_tensors(bits: int, dim: int, shape: tuple[int, int]) -> None:
    ct = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(bits, *shape)
    packed = pack_int32(codes, bits, dim)
    assert torch.equal(packed, ct.pack_to_int32(codes, bits, packed_dim=dim))
    assert torch.equal(ct.unpack_from_int32(packed, bits, torch.Size(shape), packed_dim=dim), codes)


def test_zero_points_pack_along_rows_that_are_no_multiple_of_eight() -> None:
    zero_points = random_codes(4, 20, 6)
    packed = pack_int32(zero_points, 4, dim=0)
    assert packed.shape == (3, 6)
    assert torch.equal(unpack_int32(packed, 4, 20, dim=0), zero_points)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dim", [-1, -2])
def test_stacks_equal_their_members(bits: int, dim: int) -> None:
    codes = random_codes(bits, 4, 10, 33)
    packed = pack_int32(codes, bits, dim)
    assert torch.equal(packed, torch.stack([pack_int32(member, bits, dim) for member in codes]))
    assert torch.equal(unpack_int32(packed, bits, codes.shape[dim], dim), codes)


def test_long_tensors_are_packed_in_parts() -> None:
    codes = random_codes(4, 3, 1 << 20)
    packed = pack_int32(codes, 4)
    assert torch.equal(packed[:, -1:], pack_int32(codes[:, -8:], 4))
    assert torch.equal(unpack_int32(packed, 4, 1 << 20), codes)


def test_nibbles_put_the_even_column_low() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack_nibbles(packed), codes)
    assert unpack_nibbles(pack_nibbles(torch.zeros(3, 0, dtype=torch.uint8))).shape == (3, 0)


def test_nibbles_equal_compressed_tensors() -> None:
    ct = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.5]).reshape(2, 8)
    codes = torch.tensor([*range(8), *range(9, 16), 1], dtype=torch.uint8).reshape(2, 8)
    assert torch.equal(ct.pack_fp4_to_uint8(values.bfloat16()).view(torch.uint8), pack_nibbles(codes))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pack_int32(torch.zeros(8, dtype=torch.int32), 4), "int8"),
        (lambda: pack_int32(torch.zeros(8, dtype=torch.int8), 9), "2 to 8"),
        (lambda: unpack_int32(torch.zeros(8, dtype=torch.uint8), 4, 8), "int32"),
        (lambda: unpack_int32(torch.zeros(2, dtype=torch.int32), 4, 8), "1 int32 words, not 2"),
        (lambda: pack_nibbles(torch.zeros(3, dtype=torch.uint8)), "pairs"),
        (lambda: pack_nibbles(torch.zeros(4, dtype=torch.int8)), "uint8"),
        (lambda: unpack_nibbles(torch.zeros(4, dtype=torch.int32)), "uint8"),
        (lambda: pack_signed_nibbles(torch.zeros(3, dtype=torch.int8)), "pairs"),
        (lambda: pack_signed_nibbles(torch.zeros(4, dtype=torch.uint8)), "int8"),
        (lambda: unpack_signed_nibbles(torch.zeros(4, dtype=torch.uint8)), "int8"),
    ],
)
def test_bad_input_is_one_line(call: object, says: str) -> None:
    with pytest.raises(HalfbyteError, match=says):
        call()  # type: ignore[operator]


def test_signed_nibbles_by_hand() -> None:
    # -1 is 0xF and 7 is 0x7, the even column low: 0x7F. -8 is 0x8 and 0 is 0: 0x08.
    codes = torch.tensor([[-1, 7, -8, 0]], dtype=torch.int8)
    packed = torch.tensor([[0x7F, 0x08]], dtype=torch.int8)
    assert torch.equal(pack_signed_nibbles(codes), packed)
    assert torch.equal(unpack_signed_nibbles(packed), codes)


def test_every_byte_is_two_signed_nibbles() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.int8)[:, None]
    codes = unpack_signed_nibbles(every)
    want = [[(byte & 15) - 16 * (byte & 15 > 7), (byte >> 4) - 16 * (byte >> 4 > 7)] for byte in range(256)]
    assert codes.tolist() == want
    assert torch.equal(pack_signed_nibbles(codes), every)


def test_signed_nibbles_are_compressed_tensors_words_with_top_bits_flipped() -> None:
    codes = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
    words = pack_int32(codes, 4).view(torch.uint8)
    assert torch.equal(pack_signed_nibbles(codes).view(torch.uint8) ^ 0x88, words)
