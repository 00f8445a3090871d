from __future__ import annotations

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing_awq import pack_awq, unpack_awq


def test_eight_codes_by_hand() -> None:
    assert pack_awq(torch.arange(8, dtype=torch.uint8)).tolist() == [0x75316420]


@pytest.mark.parametrize("shape", [(16,), (5, 64), (2, 3, 24)])
def test_round_trip(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_awq(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 8)
    assert torch.equal(unpack_awq(packed), codes)


def test_bad_input_is_refused() -> None:
    with pytest.raises(HalfbyteError, match="eights"):
        pack_awq(torch.zeros(4, 12, dtype=torch.uint8))
    with pytest.raises(HalfbyteError, match="uint8"):
        pack_awq(torch.zeros(4, 8, dtype=torch.int8))
    with pytest.raises(HalfbyteError, match="int32"):
        unpack_awq(torch.zeros(4, 8, dtype=torch.uint8))
