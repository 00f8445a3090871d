"""How the Hopper kernels want an INT4 weight: the order in which warps need it, so that one copy feeds them.

The weight ``[N, K]`` is cut into blocks of 64 output features x 128 inputs, block after block along K, N and K
padded with zero codes. A block holds, one after the other,

- 4,096 bytes of codes in the order of the matrix instruction's register fragment (PTX ISA, wgmma, A of
  m64nNk32): thread t of a warpgroup reads bytes 16 t to 16 t + 15 of each half. With t = 32 w + 4 r + q, its word
  p of k-step s (32 inputs each; words 0, 1 of steps 0, 1 in the first half, of steps 2, 3 in the second) holds
  rows 16 w + r (set A) and 16 w + r + 8 (set B), inputs 32 s + 16 p + 4 q + i in byte i;
- the groups' scales: ``[128 / group][64]`` numbers of two or four bytes;
- with zero points, ``[128 / group][64]`` float16: -(zero point + 1/2) / 256.

A code c in -8..7 is kept as sign and magnitude of c + 1/2, which E4M3 holds exactly: the byte
``sign << 7 | m << 1 | 1`` with m = c or -c - 1 is (c + 1/2) / 256. Set A's sign is bit 7 of the byte and its m bits
3..1; set B's sign is bit 0 and its m bits 6..4. So set A takes one logical operation per four weights, set B
four. The half that is too much is taken off with the zero point, by the activations' sums over each group.
"""

from __future__ import annotations

import torch

ROWS = 64
INPUTS = 128
CODE_BYTES = ROWS * INPUTS // 2


def block_bytes(group_size: int, scale: torch.dtype, zero_points: bool) -> int:
    """Bytes of one block."""
    return CODE_BYTES + ROWS * (INPUTS // group_size) * (scale.itemsize + 2 * zero_points)


def pack_weight(
    codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """The weight as uint8 ``[N / 64, K / 128, bytes of a block]``, rounded up.

    codes: int8 ``[N, K]`` in -8..7. scales, zero_points: ``[N, ceil(K / group_size)]``.
    """
    n, k = codes.shape
    pad_n, pad_k = -n % ROWS, -k % INPUTS
    codes = torch.nn.functional.pad(codes, (0, pad_k, 0, pad_n))
    parts = [_pack_codes(codes), _pack_groups(scales, codes.shape, group_size)]
    if zero_points is not None:
        zeros = (-(zero_points.float() + 0.5) / 256).half()
        parts.append(_pack_groups(zeros, codes.shape, group_size))
    return torch.cat(parts, dim=-1)


def unpack_weight(
    packed: torch.Tensor, shape: tuple[int, int], group_size: int, scale: torch.dtype, zero_points: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inverse of :func:`pack_weight`, bit for bit: codes int8, scales, zero points int8 or none."""
    n, k = shape
    per_kind = ROWS * (INPUTS // group_size)
    sizes = [CODE_BYTES, per_kind * scale.itemsize] + ([per_kind * 2] if zero_points else [])
    parts = packed.split(sizes, dim=-1)
    codes = _unpack_codes(parts[0])[:n, :k].contiguous()
    groups = -(-k // group_size)
    scales = _unpack_groups(parts[1], scale)[:n, :groups].contiguous()
    if not zero_points:
        return codes, scales, None
    zeros = (-_unpack_groups(parts[2], torch.float16)[:n, :groups].float() * 256 - 0.5).to(torch.int8)
    return codes, scales, zeros


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    n, k = codes.shape
    sign = codes.lt(0).to(torch.uint8)
    magnitude = (codes ^ (codes >> 7)).to(torch.uint8)  # -c - 1 of a negative c
    # rows: n64, w, set, r; inputs: k128, half, step, p, q, i
    a_b = (n // ROWS, 4, 2, 8, k // INPUTS, 2, 2, 2, 4, 4)
    sign_a, sign_b = sign.view(a_b).unbind(2)
    magnitude_a, magnitude_b = magnitude.view(a_b).unbind(2)
    packed = (sign_a << 7) | (magnitude_a << 1) | sign_b | (magnitude_b << 4)
    # n64, w, r, k128, half, step, p, q, i -> n64, k128, half, w, r, q, step, p, i
    return packed.permute(0, 3, 4, 1, 2, 7, 5, 6, 8).reshape(n // ROWS, k // INPUTS, CODE_BYTES)


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    n64, k128, _ = packed.shape
    ordered = packed.reshape(n64, k128, 2, 4, 8, 4, 2, 2, 4).permute(0, 3, 4, 1, 2, 6, 7, 5, 8)
    set_a = torch.where(ordered & 0x80 != 0, -1, 0).to(torch.int8) ^ (ordered >> 1 & 7).to(torch.int8)
    set_b = torch.where(ordered & 1 != 0, -1, 0).to(torch.int8) ^ (ordered >> 4 & 7).to(torch.int8)
    return torch.stack([set_a, set_b], dim=2).reshape(n64 * ROWS, k128 * INPUTS)


def _pack_groups(values: torch.Tensor, padded: torch.Size, group_size: int) -> torch.Tensor:
    """``[N, groups]`` as bytes ``[N64, K128, groups a block x 64 x itemsize]``."""
    n, groups = padded[0], padded[1] // group_size
    values = torch.nn.functional.pad(values, (0, groups - values.shape[1], 0, n - values.shape[0]))
    blocks = values.view(n // ROWS, ROWS, padded[1] // INPUTS, INPUTS // group_size).permute(0, 2, 3, 1)
    return blocks.contiguous().view(torch.uint8).flatten(2)


def _unpack_groups(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    n64, k128, _ = packed.shape
    blocks = packed.contiguous().view(dtype).view(n64, k128, -1, ROWS)
    return blocks.permute(0, 3, 1, 2).reshape(n64 * ROWS, -1)
