"""Eight-bit codes as the matrix instruction reads them from shared memory: rows of 128 bytes, their pieces permuted.

Piece c of 16 bytes of row r lies at piece c ^ (r % 8) of that row (PTX ISA, 128-byte swizzle of a K-major tile).
"""

from __future__ import annotations

import torch

from halfbyte.kernels.hopper.blocks import INPUTS, ROWS, BlockFormat

FORMAT = BlockFormat(INPUTS, None, code_bytes=ROWS * INPUTS)
_PIECE = 16
_PIECES = INPUTS // _PIECE


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[N, K]``, whole blocks, as uint8 ``[N / 64, K / 128, 8192]``."""
    n, k = codes.shape
    pieces = codes.view(n // ROWS, ROWS, k // INPUTS, _PIECES, _PIECE)
    return _permuted(pieces.transpose(1, 2)).reshape(n // ROWS, k // INPUTS, FORMAT.code_bytes)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_codes`."""
    n64, k128, _ = packed.shape
    pieces = _permuted(packed.reshape(n64, k128, ROWS, _PIECES, _PIECE))
    return pieces.transpose(1, 2).reshape(n64 * ROWS, k128 * INPUTS)


def _permuted(pieces: torch.Tensor) -> torch.Tensor:
    """``[N64, K128, 64, 8, 16]`` with the pieces of each row where they belong, or back."""
    row, piece = torch.arange(ROWS, device=pieces.device), torch.arange(_PIECES, device=pieces.device)
    source = piece[None, :] ^ (row[:, None] % 8)
    return torch.gather(pieces, 3, source[None, None, :, :, None].expand(pieces.shape))
