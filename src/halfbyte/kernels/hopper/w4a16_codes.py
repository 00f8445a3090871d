"""A block's codes for BF16 and FP16 products: in the register fragment of m64nNk16 (PTX ISA, wgmma, A), as nibbles.

With t = 32 w + 4 r + q, thread t's word s % 4 of the block's half s / 4 holds k-step s (16 inputs). Its nibble
j + 4 e with j = h + 2 p is row 16 w + 8 h + r, input 16 s + 8 p + 2 q + e, as code + 8. So nibbles j and j + 4 are the
two numbers of register j, each in the last bits of 128 (BF16) or 1,024 (FP16) after one shift and one logical
operation. What is then too much, 136 or 1,032 and the zero point, is subtracted; with zero points it is kept so.
"""

from __future__ import annotations

import torch

from halfbyte.kernels.hopper.blocks import CODE_BYTES, INPUTS, ROWS

_MIDDLE = {torch.bfloat16: 136, torch.float16: 1032}


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[N, K]``, whole blocks, as uint8 ``[N / 64, K / 128, 4096]``."""
    n, k = codes.shape
    nibbles = (codes + 8).to(torch.uint8)
    # n64, w, h, r, k128, half, step, p, q, e -> n64, k128, half, w, r, q, step, e, p, h
    ordered = nibbles.view(n // ROWS, 4, 2, 8, k // INPUTS, 2, 4, 2, 4, 2).permute(
        0, 4, 5, 1, 3, 8, 6, 9, 7, 2
    )
    low, high = ordered.unbind(-1)
    return (low | high << 4).reshape(n // ROWS, k // INPUTS, CODE_BYTES)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_codes`."""
    n64, k128, _ = packed.shape
    ordered = packed.reshape(n64, k128, 2, 4, 8, 4, 4, 2, 2)
    nibbles = torch.stack([ordered & 15, ordered >> 4], dim=-1)
    natural = nibbles.permute(0, 3, 9, 4, 1, 2, 6, 8, 5, 7)
    return natural.reshape(n64 * ROWS, k128 * INPUTS).to(torch.int8) - 8


def pack_zeros(zero_points: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 as what is subtracted in ``dtype``, the activations' one."""
    return (zero_points.to(torch.int32) + _MIDDLE[dtype]).to(dtype)


def unpack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_zeros`."""
    return (zeros.to(torch.int32) - _MIDDLE[zeros.dtype]).to(torch.int8)
