"""A block whose group scales are FP8: what vLLM's CUTLASS W4A8 kernel has (:mod:`halfbyte.formats.vllm_scales`).

A block keeps the groups' scales as E4M3 bytes, and codes as nibbles in two's complement, of which the kernel makes
multiples by tables. With t = 32 w + 4 r + q, thread t's word p of k-step s (as in :mod:`w4a8_codes`) has rows 16 w + r
in nibbles 0 to 3 and 16 w + r + 8 in nibbles 4 to 7, inputs 32 s + 16 p + 4 q + nibble % 4.
"""

from __future__ import annotations

import torch

from halfbyte.formats.vllm_scales import GROUP_SIZE
from halfbyte.kernels.hopper.blocks import CODE_BYTES, INPUTS, ROWS, BlockFormat

FORMAT = BlockFormat(GROUP_SIZE, torch.uint8)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[N, K]``, whole blocks, as uint8 ``[N / 64, K / 128, 4096]``."""
    n, k = codes.shape
    nibbles = (codes & 15).to(torch.uint8)
    # n64, w, set, r, k128, half, step, p, q, i, low or high -> n64, k128, half, w, r, q, step, p, set, i, low or high
    ordered = nibbles.view(n // ROWS, 4, 2, 8, k // INPUTS, 2, 2, 2, 4, 2, 2)
    low, high = ordered.permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9, 10).unbind(-1)
    return (low | high << 4).reshape(n // ROWS, k // INPUTS, CODE_BYTES)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_codes`."""
    n64, k128, _ = packed.shape
    ordered = packed.reshape(n64, k128, 2, 4, 8, 4, 2, 2, 2, 2)
    nibbles = torch.stack([ordered & 15, ordered >> 4], dim=-1).to(torch.int8)
    codes = torch.where(nibbles >= 8, nibbles - 16, nibbles)
    return codes.permute(0, 3, 8, 4, 1, 2, 6, 7, 5, 9, 10).reshape(n64 * ROWS, k128 * INPUTS).to(torch.int8)
