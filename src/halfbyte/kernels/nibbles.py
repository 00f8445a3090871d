"""Two 4-bit codes to a byte, read back strip by strip while a layer runs.

The order is that of compressed-tensors' packed INT4 words and of FP4 bytes: the even column in the low nibble.
"""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.formats.floats import decode_e2m1


def nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Words or bytes ``[R, ...]`` as their nibbles, 0..15 in uint8 ``[R, columns]``, new memory."""
    # One byte becomes a 16-bit number with a nibble in each of its bytes.
    wide = packed.view(torch.uint8).to(torch.int16)
    wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F)
    return wide.view(torch.uint8)[:, :columns].contiguous()


def e2m1_values(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """CPU bytes ``[R, ...]`` of E2M1 codes as fp32 ``[R, columns]``: one look-up finds both values of a byte."""
    pairs = torch.index_select(_e2m1_pairs(), 0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(packed.shape[0], -1)[:, :columns].contiguous()


@cache
def _e2m1_pairs() -> torch.Tensor:
    """By byte: the values of its low and its high nibble, as one 8-byte element."""
    with torch.inference_mode(False), torch.device("cpu"):
        values = decode_e2m1(torch.arange(16))
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
        return pairs.view(torch.complex64).view(256)
