from __future__ import annotations

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing_gptq import pack_gptq, pack_gptq_zeros, unpack_gptq, unpack_gptq_zeros


def as_stream(packed: torch.Tensor) -> int:
    """One column's words as one number, the first word lowest."""
    return sum((word % (1 << 32)) << (32 * i) for i, word in enumerate(packed.tolist()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_a_dense_stream_along_the_input(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 5), generator=torch.Generator().manual_seed(bits)).to(
        torch.uint8
    )
    packed = pack_gptq(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (64 * bits // 32, 5)
    for column in range(5):
        expected = sum(code << (bits * i) for i, code in enumerate(codes[:, column].tolist()))
        assert as_stream(packed[:, column]) == expected
    assert torch.equal(unpack_gptq(packed, bits), codes)


def test_three_bits_split_codes_10_and_21() -> None:
    codes = torch.zeros(32, 1, dtype=torch.uint8)
    codes[10] = codes[21] = 0b101
    # Code 10: two low bits at 30 of word 0, one in word 1. Code 21: one low bit at 31 of word 1, two in word 2.
    assert [word % (1 << 32) for word in pack_gptq(codes, 3)[:, 0].tolist()] == [1 << 30, 1 | 1 << 31, 0b10]


def test_stacks_equal_their_members() -> None:
    codes = torch.randint(0, 8, (4, 32, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack_gptq(codes, 3)
    assert torch.equal(packed, torch.stack([pack_gptq(member, 3) for member in codes]))
    assert torch.equal(unpack_gptq(packed, 3), codes)


def test_symmetric_zeros_by_hand() -> None:
    eights = torch.full((1, 8), 8, dtype=torch.uint8)
    assert pack_gptq_zeros(eights, 4, "gptq").tolist() == [[0x77777777]]
    assert pack_gptq_zeros(eights, 4, "gptq_v2").tolist() == [[0x88888888 - (1 << 32)]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_zero_point_survives_v2(bits: int) -> None:
    zeros = torch.arange(1 << bits).repeat(32).reshape(32, -1).to(torch.uint8).T.contiguous()
    packed = pack_gptq_zeros(zeros, bits, "gptq_v2")
    assert torch.equal(unpack_gptq_zeros(packed, bits, "gptq_v2"), zeros.to(torch.int16))
    again = pack_gptq_zeros(unpack_gptq_zeros(packed, bits, "gptq_v2").to(torch.uint8), bits, "gptq_v2")
    assert torch.equal(again, packed)


def test_v1_keeps_1_to_15_and_refuses_0() -> None:
    zeros = torch.arange(1, 16, dtype=torch.uint8).reshape(15, 1).repeat(1, 8)
    packed = pack_gptq_zeros(zeros, 4, "gptq")
    assert torch.equal(unpack_gptq_zeros(packed, 4, "gptq"), zeros.to(torch.int16))
    with pytest.raises(HalfbyteError, match="zero point 0 cannot be stored"):
        pack_gptq_zeros(torch.zeros(1, 8, dtype=torch.uint8), 4, "gptq")


def test_a_stored_15_is_a_zero_of_16_in_v1() -> None:
    stored = torch.tensor([[-1]], dtype=torch.int32)
    assert unpack_gptq_zeros(stored, 4, "gptq").tolist() == [[16] * 8]


def test_bad_input_is_refused() -> None:
    with pytest.raises(HalfbyteError, match="5 bits"):
        pack_gptq(torch.zeros(32, 1, dtype=torch.uint8), 5)
    with pytest.raises(HalfbyteError, match="runs of 32"):
        pack_gptq(torch.zeros(40, 1, dtype=torch.uint8), 3)
    with pytest.raises(HalfbyteError, match="uint8"):
        pack_gptq(torch.zeros(32, 1, dtype=torch.int8), 4)
    with pytest.raises(HalfbyteError, match="int32"):
        unpack_gptq(torch.zeros(32, 1, dtype=torch.uint8), 4)
    with pytest.raises(HalfbyteError, match="3 words"):
        unpack_gptq(torch.zeros(4, 1, dtype=torch.int32), 3)
    with pytest.raises(HalfbyteError, match="16 is no 4-bit code"):
        pack_gptq_zeros(torch.full((1, 8), 16, dtype=torch.uint8), 4, "gptq_v2")
    with pytest.raises(HalfbyteError, match="'v3'"):
        unpack_gptq_zeros(torch.zeros(1, 1, dtype=torch.int32), 4, "v3")
