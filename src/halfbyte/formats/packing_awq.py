"""AutoAWQ's "gemm" order: eight 4-bit codes to an int32 along the output features, interleaved."""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError

# Nibble i of a word (least significant first) holds column ORDER[i] of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """Unsigned codes 0..15 (uint8) ``[..., rows, out]`` as int32 words ``[..., rows, out / 8]``.

    Weights come transposed, ``[in, out]``; zero points, ``[in / group, out]``, take the same order and no offset.
    Errors: another dtype, columns that are no multiple of eight.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 8:
        raise HalfbyteError(
            f"AWQ packs uint8 codes in eights of columns, not {codes.dtype} {list(codes.shape)}"
        )
    eights = codes.unflatten(-1, (-1, 8))[..., list(ORDER)].int()
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (eights << shifts).sum(-1, dtype=torch.int32)


def unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """Unsigned codes 0..15 (uint8) ``[..., rows, 8 * words]`` of :func:`pack_awq`'s words. Errors: another dtype."""
    if packed.dtype != torch.int32:
        raise HalfbyteError(f"AWQ's packed codes are int32, not {packed.dtype}")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    columns = [ORDER.index(column) for column in range(8)]
    return nibbles[..., columns].flatten(-2).to(torch.uint8)
