"""Weights as OmniServe's converter leaves them, from the definition one number at a time."""

from __future__ import annotations

import torch

GROUP = 128


def place_of_code(row: int, column: int, columns: int) -> tuple[int, int]:
    """Index in the flat bytes of ``qweight``, and how far to shift a nibble there.

    Codes are cut into tiles of 32 rows and 32 columns, 512 bytes each. Of a row's number in the tile, the highest bit
    says which half of the byte, the next one and the lowest three which byte.
    """
    tile = row // 32 * (columns // 32) + column // 32
    r, c = row % 32, column % 32
    byte = (r % 8) * 64 + (c % 16 // 4) * 16 + (c // 16) * 8 + (r % 16 // 8) * 4 + c % 4
    return tile * 512 + byte, 4 * (r // 16)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[out, in / 2]`` of codes 0..15 ``[out, in]``."""
    rows, columns = codes.shape
    flat = [0] * (rows * columns // 2)
    for row, values in enumerate(codes.tolist()):
        for column, value in enumerate(values):
            index, shift = place_of_code(row, column, columns)
            flat[index] |= value << shift
    return torch.tensor(flat, dtype=torch.uint8).view(torch.int8).reshape(rows, columns // 2)


def packed_groups(values: torch.Tensor) -> torch.Tensor:
    """int8 ``[groups, out]`` of numbers ``[out, groups]`` (any integers, kept modulo 256)."""
    rows, groups = values.shape
    out = torch.empty(groups, rows, dtype=torch.int8)
    for row in range(rows):
        place = row // 32 * 32 + row % 8 * 4 + row % 32 // 8
        for group in range(groups):
            out[group, place] = (int(values[row, group]) + 128) % 256 - 128
    return out


def two_levels(
    module: str, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, channels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``(codes * scales + offsets) * channels``: integers ``[out, in]``, twice ``[out, groups]``; fp16 ``[out]``."""
    return {
        f"{module}.qweight": packed(codes),
        f"{module}.s1_scales": channels.half(),
        f"{module}.s2_scales": packed_groups(scales),
        f"{module}.s2_zeros": packed_groups(offsets),
    }


def per_channel(
    module: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``codes * scales - zeros * scales``, the product rounded to fp16; scales fp16 ``[out]``, zeros ``[out]``."""
    return {
        f"{module}.qweight": packed(codes),
        f"{module}.s1_scales": scales.half(),
        f"{module}.s1_szeros": (zeros.double() * scales.half().double()).half(),
    }
