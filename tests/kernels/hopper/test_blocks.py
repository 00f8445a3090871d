from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats.vllm_scales import rounded_weight, split_scales
from halfbyte.kernels.hopper import w4a8_codes, w4a8_fp8_scales_codes, w4a16_codes
from halfbyte.kernels.hopper.blocks import CODE_BYTES, BlockFormat, pack_blocks, unpack_blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@given(
    module=st.sampled_from([w4a8_codes, w4a8_fp8_scales_codes, w4a16_codes]),
    rows=st.integers(1, 9).map(lambda n: 16 * n),
    columns=st.integers(1, 5).map(lambda n: 64 * n),
    group=st.sampled_from([32, 64, 128]),
    scale=st.sampled_from([BF16, FP16, FP32, torch.uint8]),
    zeros=st.sampled_from([None, BF16, FP16]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_every_bit_back(
    module: ModuleType,
    rows: int,
    columns: int,
    group: int,
    scale: torch.dtype,
    zeros: torch.dtype | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scales = (torch.rand(rows, groups, generator=generator) * 255).to(scale)
    offsets = torch.randn(rows, groups, generator=generator).to(zeros) if zeros else None
    fmt = BlockFormat(group, scale, zeros)

    packed = pack_blocks(fmt, codes, module.pack_codes, scales, offsets)
    found = unpack_blocks(fmt, packed, module.unpack_codes, (rows, columns))

    assert packed.shape == (-(-rows // 64), -(-columns // 128), fmt.nbytes)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], scales)
    assert found[2] is None if offsets is None else torch.equal(found[2], offsets)


def test_a_thread_finds_its_fp8_fragment() -> None:
    """Each byte against the documented place: what thread t of a warpgroup loads for each register."""
    codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    packed = w4a8_codes.pack_codes(codes)[0, 0]
    for thread in (0, 1, 5, 31, 32, 77, 127):
        w, r, q = thread // 32, thread % 32 // 4, thread % 4
        for step in range(4):
            for word in range(2):
                for i in range(4):
                    byte = int(packed[step // 2 * 2048 + thread * 16 + step % 2 * 8 + word * 4 + i])
                    column = 32 * step + 16 * word + 4 * q + i
                    set_a = (byte & 0x8E) | 1
                    set_b = (byte >> 3 & 0x0E) | (byte << 7 & 0x80) | 1
                    assert e4m3(set_a) * 256 == codes[16 * w + r, column].item() + 0.5
                    assert e4m3(set_b) * 256 == codes[16 * w + r + 8, column].item() + 0.5


@pytest.mark.parametrize(("dtype", "magic"), [(BF16, 0x4300), (FP16, 0x6400)])
def test_a_thread_finds_its_16_bit_fragment(dtype: torch.dtype, magic: int) -> None:
    codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    packed = w4a16_codes.pack_codes(codes)[0, 0]
    middle = w4a16_codes.pack_zeros(torch.zeros(1, dtype=torch.int8), dtype)
    for thread in (0, 1, 5, 31, 32, 77, 127):
        w, r, q = thread // 32, thread % 32 // 4, thread % 4
        for step in range(8):
            at = step // 4 * 2048 + thread * 16 + step % 4 * 4
            word = int.from_bytes(bytes(packed[at : at + 4].tolist()), "little")
            for register in range(4):
                pair = word >> 4 * register & 0x000F000F | magic << 16 | magic
                for e in range(2):
                    bits = torch.tensor([pair >> 16 * e & 0xFFFF], dtype=torch.int32).to(torch.uint16)
                    row, column = 16 * w + 8 * (register % 2) + r, 16 * step + 8 * (register // 2) + 2 * q + e
                    assert (bits.view(dtype) - middle).item() == codes[row, column].item()


def test_a_thread_finds_its_nibbles() -> None:
    codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    packed = w4a8_fp8_scales_codes.pack_codes(codes)[0, 0]
    for thread in (0, 1, 5, 31, 32, 77, 127):
        w, r, q = thread // 32, thread % 32 // 4, thread % 4
        for step in range(4):
            for word in range(2):
                at = step // 2 * 2048 + thread * 16 + step % 2 * 8 + word * 4
                bits = int.from_bytes(bytes(packed[at : at + 4].tolist()), "little")
                for place in range(8):
                    nibble = bits >> 4 * place & 15
                    row, column = 16 * w + 8 * (place // 4) + r, 32 * step + 16 * word + 4 * q + place % 4
                    assert (nibble ^ 8) - 8 == codes[row, column]


def test_fp8_scales_follow_their_definition() -> None:
    scales = torch.tensor([[0.02, 0.005, 0.0001]]).to(BF16)
    largest = scales.float().max()
    first = (scales.float() / (largest / 448)).to(torch.float8_e4m3fn)
    groups, channels = split_scales(scales)
    assert torch.equal(groups.float(), (first.float() / 8).to(torch.float8_e4m3fn).float())
    assert channels.item() == largest / 448 * 8


def test_a_weight_with_fp8_scales_is_rounded_twice() -> None:
    """Code times group scale rounded to E4M3, times the channel's scale: from the definition, number by number."""
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 16)
    scales = (torch.rand(3, 2, generator=torch.Generator().manual_seed(0)) * 0.1 + 1e-3).to(BF16)
    groups, channels = split_scales(scales)
    found = rounded_weight(codes, scales)
    for row in range(3):
        for column in range(256):
            product = codes[row, column].float() * groups[row, column // 128].float()
            assert found[row, column] == product.to(torch.float8_e4m3fn).float() * channels[row]


def test_zero_points_come_back() -> None:
    zero_points = torch.arange(-8, 9, dtype=torch.int8)
    assert torch.equal(w4a8_codes.unpack_zeros(w4a8_codes.pack_zeros(zero_points)), zero_points)
    for dtype in (BF16, FP16):
        packed = w4a16_codes.pack_zeros(zero_points, dtype)
        assert torch.equal(w4a16_codes.unpack_zeros(packed), zero_points)


@pytest.mark.parametrize("module", [w4a8_codes, w4a16_codes])
def test_padding_is_of_zero_codes(module: ModuleType) -> None:
    fmt = BlockFormat(64, BF16)
    codes = torch.full((16, 64), -8, dtype=torch.int8)
    packed = pack_blocks(fmt, codes, module.pack_codes, torch.ones(16, 1, dtype=BF16), None)
    assert packed.shape[2] == CODE_BYTES + 2 * 64 * 2
    codes, scales, _ = unpack_blocks(fmt, packed, module.unpack_codes, (64, 128))
    assert codes[16:].abs().max() == 0
    assert codes[:, 64:].abs().max() == 0
    assert scales[16:].abs().max() == 0


def e4m3(byte: int) -> float:
    return torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
