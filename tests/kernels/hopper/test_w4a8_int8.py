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
    """As ``convert`` in w4a8_int8.cu: one product and sum of whole words, then the upper bits are turned over.

    Four codes of a word, each of all that are INT8 numbers: products of the codes' sets, every position.
    """
    for zero in ZEROS:
        codes = [code for code in range(16) if -128 <= (code - zero) * scale <= 127]
        offset = (128 - zero * scale) * 0x01010101 & 0xFFFFFFFF
        ends = {codes[0], codes[-1], zero, codes[len(codes) // 2]}
        words = set(itertools.product(codes, ends, ends, ends)) | set(
            itertools.product(ends, ends, codes, codes)
        )
        for word in words:
            packed = sum(code << 8 * i for i, code in enumerate(word))
            found = (packed * scale + offset & 0xFFFFFFFF) ^ 0x80808080
            signed = [(found >> 8 * i & 255) - 256 * (found >> 8 * i + 7 & 1) for i in range(4)]
            assert signed == [(code - zero) * scale for code in word]


def test_levels_are_a_byte() -> None:
    scales = torch.tensor([*SCALES], dtype=torch.int8).repeat_interleave(16)
    zeros = torch.tensor([*ZEROS] * 16, dtype=torch.int8) - 8
    packed = pack_levels(scales, zeros)
    assert packed.tolist() == [*range(256)]
    assert all(torch.equal(*pair) for pair in zip(unpack_levels(packed), (scales, zeros), strict=True))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", [(64, 128), (128, 384), (80, 192)])
def test_blocks_can_be_had_back(group: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    levels = torch.randint(0, 256, (shape[0], -(-shape[1] // group)), generator=generator).to(torch.uint8)
    fmt = block_format(group)
    packed = pack_blocks(fmt, codes, pack_codes, levels, None)
    assert packed.shape[2] == fmt.nbytes == 4096 + 64 * 128 // group
    found = unpack_blocks(fmt, packed, unpack_codes, shape)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], levels)


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
