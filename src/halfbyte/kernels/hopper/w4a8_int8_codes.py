"""INT4 codes for INT8 tensor cores, and what a group's codes become: QoQ's second level (:mod:`halfbyte.formats.qoq`).

With t = 32 w + 4 r + q, byte i of thread t's word p of k-step s (as in :mod:`w4a8_codes`) has input
32 s + 16 p + 4 q + i:
row 16 w + r in the low half and row 16 w + r + 8 in the high half, as code + 8. A group is 16 bits: its scale in the
lower 6, and above, with a sign, what is added to scale times code + 8, so that the result is the INT8 number plus 128.
"""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import CODE_BYTES, INPUTS, ROWS, BlockFormat

_SCALE_BITS = 6


@cache
def block_format(group_size: int | None) -> BlockFormat:
    """Of groups of 32, 64 or 128 inputs; with none, of whole channels, about which blocks say nothing."""
    return BlockFormat(group_size or INPUTS, torch.int16 if group_size else None)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[N, K]`` in -8..7, whole blocks, as uint8 ``[N / 64, K / 128, 4096]``."""
    n, k = codes.shape
    # n64, w, set, r, k128, half, step, p, q, i
    fragments = (codes + 8).to(torch.uint8).view(n // ROWS, 4, 2, 8, k // INPUTS, 2, 2, 2, 4, 4)
    low, high = fragments.unbind(2)
    # n64, w, r, k128, half, step, p, q, i -> n64, k128, half, w, r, q, step, p, i
    packed = (low | high << 4).permute(0, 3, 4, 1, 2, 7, 5, 6, 8)
    return packed.reshape(n // ROWS, k // INPUTS, CODE_BYTES)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_codes`."""
    n64, k128, _ = packed.shape
    ordered = packed.reshape(n64, k128, 2, 4, 8, 4, 2, 2, 4).permute(0, 3, 4, 1, 2, 6, 7, 5, 8)
    codes = torch.stack([ordered & 15, ordered >> 4], dim=2).to(torch.int8) - 8
    return codes.reshape(n64 * ROWS, k128 * INPUTS)


def pack_levels(scales: torch.Tensor, zero_points: torch.Tensor) -> torch.Tensor:
    """int8 scales from 1 and zero points as int16."""
    factors = scales.to(torch.int16)
    return (128 - (zero_points.to(torch.int16) + 8) * factors) << _SCALE_BITS | factors


def unpack_levels(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`pack_levels`. Padding, which is zero, becomes the scale zero."""
    factors = levels & ((1 << _SCALE_BITS) - 1)
    zeros = (128 - (levels >> _SCALE_BITS)).div(factors.clamp(min=1), rounding_mode="floor")
    return factors.to(torch.int8), (zeros - 8).to(torch.int8)
