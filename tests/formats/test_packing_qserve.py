"""QServe's order of codes, scales and zeros, from the definition one number at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats.packing_qserve import (
    pack_qserve,
    pack_qserve_groups,
    unpack_qserve,
    unpack_qserve_groups,
)


def omniserve(codes: torch.Tensor) -> torch.Tensor:
    """As OmniServe's converter goes: a view of ten axes, permuted so that what shares a byte comes first."""
    n, k = codes.shape
    w = codes.view(n // 32, 2, 2, 8, 1, k // 32, 1, 2, 4, 4).permute(1, 0, 5, 6, 3, 8, 7, 2, 4, 9)
    return ((w[1] << 4) + w[0]).reshape(n, k // 2)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_codes_lie_where_the_kernels_look(tall: int, wide: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (32 * tall, 32 * wide), generator=generator, dtype=torch.int32)
    packed = pack_qserve(codes)
    assert packed.dtype == torch.int8
    assert packed.shape == (32 * tall, 16 * wide)
    assert torch.equal(packed.view(torch.uint8), omniserve(codes).to(torch.uint8))
    assert torch.equal(unpack_qserve(packed).int(), codes)


def test_each_byte_of_a_lane() -> None:
    codes = torch.randint(0, 16, (64, 96), generator=torch.Generator().manual_seed(0))
    packed = pack_qserve(codes).view(torch.uint8).view(2, 3, 32, 16)  # tiles down, tiles across, lane, byte
    for lane in range(32):
        r, q = divmod(lane, 4)
        for byte in range(16):
            p, b, i = byte // 8, byte // 4 % 2, byte % 4
            row, column = 32 + r + 8 * b, 64 + 16 * p + 4 * q + i
            found = int(packed[1, 2, lane, byte])
            assert (found & 15, found >> 4) == (int(codes[row, column]), int(codes[row + 16, column]))


@given(st.integers(1, 4), st.integers(1, 5))
def test_groups_of_32_features_are_reordered(tall: int, groups: int) -> None:
    values = torch.arange(32 * tall * groups).view(32 * tall, groups)
    packed = pack_qserve_groups(values)
    for feature in range(32 * tall):
        tile, inside = divmod(feature, 32)
        place = 32 * tile + inside % 8 * 4 + inside // 8
        assert packed[:, place].tolist() == values[feature].tolist()
    assert torch.equal(unpack_qserve_groups(packed), values)
