"""A block's codes for FP8 products: in the register fragment of m64nNk32 (PTX ISA, wgmma, A), sign and magnitude.

With t = 32 w + 4 r + q, thread t's word p of k-step s (32 inputs each; words 0, 1 of steps 0, 1 in the block's first
half, of steps 2, 3 in its second) holds rows 16 w + r (set A) and 16 w + r + 8 (set B), inputs
32 s + 16 p + 4 q + i in byte i.

A code c in -8..7 is kept as sign and magnitude of c + 1/2, which E4M3 holds exactly: the byte
``sign << 7 | m << 1 | 1`` with m = c or -c - 1 is (c + 1/2) / 256. Set A's sign is bit 7 of the byte and its m bits
3..1; set B's sign is bit 0 and its m bits 6..4. So set A takes one logical operation per four weights, set B
four. The half that is too much is taken off with the zero point, by the activations' sums over each group: a zero
point is kept as -(zero point + 1/2) / 256. Without zero points m plus the sign is the size of c itself, which takes
three and four operations and leaves nothing to take off: better where a code serves many tokens.
"""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.blocks import CODE_BYTES, INPUTS, ROWS, BlockFormat


@cache
def block_format(group_size: int, normalized: bool, zero_points: bool) -> BlockFormat:
    """Of the W4A8 kernel's weights. normalized: with scales of :mod:`w4a8_scales`, else with fp32 ones."""
    scale = torch.float16 if normalized else torch.float32
    return BlockFormat(group_size, scale, torch.float16 if zero_points else None)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[N, K]``, whole blocks, as uint8 ``[N / 64, K / 128, 4096]``."""
    n, k = codes.shape
    sign = codes.lt(0).to(torch.uint8)
    magnitude = (codes ^ (codes >> 7)).to(torch.uint8)  # -c - 1 of a negative c
    # n64, w, set, r, k128, half, step, p, q, i
    fragments = (n // ROWS, 4, 2, 8, k // INPUTS, 2, 2, 2, 4, 4)
    sign_a, sign_b = sign.view(fragments).unbind(2)
    magnitude_a, magnitude_b = magnitude.view(fragments).unbind(2)
    packed = (sign_a << 7) | (magnitude_a << 1) | sign_b | (magnitude_b << 4)
    # n64, w, r, k128, half, step, p, q, i -> n64, k128, half, w, r, q, step, p, i
    return packed.permute(0, 3, 4, 1, 2, 7, 5, 6, 8).reshape(n // ROWS, k // INPUTS, CODE_BYTES)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_codes`."""
    n64, k128, _ = packed.shape
    ordered = packed.reshape(n64, k128, 2, 4, 8, 4, 2, 2, 4).permute(0, 3, 4, 1, 2, 6, 7, 5, 8)
    set_a = torch.where(ordered & 0x80 != 0, -1, 0).to(torch.int8) ^ (ordered >> 1 & 7).to(torch.int8)
    set_b = torch.where(ordered & 1 != 0, -1, 0).to(torch.int8) ^ (ordered >> 4 & 7).to(torch.int8)
    return torch.stack([set_a, set_b], dim=2).reshape(n64 * ROWS, k128 * INPUTS)


def pack_zeros(zero_points: torch.Tensor) -> torch.Tensor:
    """int8 as float16."""
    return (-(zero_points.float() + 0.5) / 256).half()


def unpack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_zeros`."""
    return (-zeros.float() * 256 - 0.5).to(torch.int8)
