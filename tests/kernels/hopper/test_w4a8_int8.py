"""Two-level weights as the INT8 kernel has them: conversion of all codes, scales and zero points, and packing."""

from __future__ import annotations

import itertools

import pytest
import torch

from halfbyte.kernels.hopper.blocks import pack_blocks, unpack_blocks
from halfbyte.kernels.hopper.w4a8_int8_codes import (
    block_format,
    pack_codes,
    pack_levels,
    unpack_codes,
    unpack_levels,
)

SCALES, ZEROS = range(1, 17), range(16)


@pytest.mark.parametrize("scale", SCALES)
def test_the_conversion_is_exact_for_whatever_is_an_int8_number(scale: int) -> None:
    """As ``Level`` in w4a8_int8.cu: one product and sum of whole words give each number plus 128.

    Four codes of a word, each of all that are INT8 numbers: products of the codes' sets, every position.
    """
    for zero in ZEROS:
        codes = [code for code in range(16) if -128 <= (code - zero) * scale <= 127]
        level = int(pack_levels(*(torch.tensor([[n]], dtype=torch.int8) for n in (scale, zero - 8))))
        factor, offset = level & 63, (level >> 6) * 0x01010101 & 0xFFFFFFFF
        ends = {codes[0], codes[-1], zero, codes[len(codes) // 2]}
        words = set(itertools.product(codes, ends, ends, ends)) | set(
            itertools.product(ends, ends, codes, codes)
        )
        for word in words:
            packed = sum(code << 8 * i for i, code in enumerate(word))
            found = packed * factor + offset & 0xFFFFFFFF
            assert [(found >> 8 * i & 255) - 128 for i in range(4)] == [
                (code - zero) * scale for code in word
            ]


def test_levels_can_be_had_back() -> None:
    scales = torch.tensor([*SCALES], dtype=torch.int8).repeat_interleave(16)
    zeros = torch.tensor([*ZEROS] * 16, dtype=torch.int8) - 8
    packed = pack_levels(scales, zeros)
    assert packed.dtype == torch.int16
    assert all(torch.equal(*pair) for pair in zip(unpack_levels(packed), (scales, zeros), strict=True))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", [(64, 128), (128, 384), (80, 192)])
def test_blocks_can_be_had_back(group: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    groups = (shape[0], -(-shape[1] // group))
    levels = torch.randint(-(2**15), 2**15, groups, generator=generator).to(torch.int16)
    fmt = block_format(group)
    packed = pack_blocks(fmt, codes, pack_codes, levels, None)
    assert packed.shape[2] == fmt.nbytes == 4096 + 2 * 64 * 128 // group
    found = unpack_blocks(fmt, packed, unpack_codes, shape)
    assert torch.equal(found[0], codes)
    assert found[1] is not None
    assert torch.equal(found[1], levels)


@pytest.mark.parametrize("shape", [(64, 128), (80, 192)])
def test_blocks_of_whole_channels_are_codes_alone(shape: tuple[int, int]) -> None:
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    packed = pack_blocks(block_format(None), codes, pack_codes, None, None)
    assert packed.shape[2] == 4096
    found = unpack_blocks(block_format(None), packed, unpack_codes, shape)
    assert torch.equal(found[0], codes)
    assert found[1:] == (None, None)


def test_a_thread_finds_its_codes() -> None:
    """Row 16 w + r and 8 below it in the halves of byte i of word p: PTX's fragment of A for m64nNk32."""
    codes = torch.randint(-8, 8, (64, 128), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    words = pack_codes(codes).view(2, 128, 2, 2, 4)  # half, thread, step in half, p, i
    for thread, half, step, p, i in itertools.product(
        range(0, 128, 7), range(2), range(2), range(2), range(4)
    ):
        w, r, q = thread // 32, thread % 32 // 4, thread % 4
        column = 32 * (2 * half + step) + 16 * p + 4 * q + i
        byte = int(words[half, thread, step, p, i])
        assert byte & 15 == int(codes[16 * w + r, column]) + 8
        assert byte >> 4 == int(codes[16 * w + r + 8, column]) + 8
