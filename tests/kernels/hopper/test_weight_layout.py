from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.kernels.hopper.weight_layout import CODE_BYTES, block_bytes, pack_weight, unpack_weight


@given(
    rows=st.integers(1, 9).map(lambda n: 16 * n),
    columns=st.integers(1, 5).map(lambda n: 64 * n),
    group=st.sampled_from([32, 64, 128]),
    scale=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    zero_points=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_unpacking_gives_every_bit_back(
    rows: int, columns: int, group: int, scale: torch.dtype, zero_points: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scales = torch.randn(rows, groups, generator=generator).to(scale)
    zeros = torch.randint(-8, 9, (rows, groups), generator=generator, dtype=torch.int8)

    packed = pack_weight(codes, scales, zeros if zero_points else None, group)
    found = unpack_weight(packed, (rows, columns), group, scale, zero_points)

    assert packed.shape == (-(-rows // 64), -(-columns // 128), block_bytes(group, scale, zero_points))
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], scales)
    assert found[2] is None if not zero_points else torch.equal(found[2], zeros)


def test_a_thread_finds_its_fragment() -> None:
    """Each byte against the documented place: what thread t of a warpgroup loads for each register."""
    codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    packed = pack_weight(codes, torch.ones(64, 1), None, 128)[0, 0, :CODE_BYTES]
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


def test_padding_is_of_zero_codes() -> None:
    packed = pack_weight(
        torch.full((16, 64), -8, dtype=torch.int8), torch.ones(16, 1, dtype=torch.bfloat16), None, 64
    )
    codes, scales, _ = unpack_weight(packed, (64, 128), 64, torch.bfloat16, False)
    assert codes[16:].abs().max() == 0
    assert codes[:, 64:].abs().max() == 0
    assert scales[16:].abs().max() == 0


def e4m3(byte: int) -> float:
    return torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
