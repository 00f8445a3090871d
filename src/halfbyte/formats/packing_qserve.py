"""The order in which QServe's kernels find INT4 codes, scales and zeros: what OmniServe's files hold.

Codes lie in tiles of 32 output features x 32 inputs, 512 bytes each, tile after tile along the inputs. A tile is what
a warp's 32 lanes load in 16 bytes each: lane 4 r + q has rows r, r + 8, r + 16 and r + 24, and of each the inputs
4 q + i and 16 + 4 q + i; its byte 8 p + 4 b + i is row r + 8 b (low half) and row r + 8 b + 16 (high half), input
16 p + 4 q + i. Scales and zeros of groups are ``[groups, out]`` with the 32 features of a tile as 4 r + s for feature
8 s + r.
Source: OmniServe, w4a8_linear.py, "from_linear".
"""

from __future__ import annotations

import torch

_TILE = 32


def pack_qserve(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[out, in]`` in 0..15, any integer dtype, as int8 ``[out, in / 2]``. Both sizes: multiples of 32."""
    rows, columns = codes.shape
    # n32, half, b, r, k32, p, q, i
    tiles = codes.to(torch.uint8).view(rows // _TILE, 2, 2, 8, columns // _TILE, 2, 4, 4)
    low, high = tiles.unbind(1)
    # n32, b, r, k32, p, q, i -> n32, k32, r, q, p, b, i
    packed = (low | high << 4).permute(0, 3, 2, 5, 4, 1, 6)
    return packed.reshape(rows, columns // 2).view(torch.int8)


def unpack_qserve(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_qserve`: uint8 codes in 0..15."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    tiles = packed.contiguous().view(torch.uint8).view(rows // _TILE, columns // _TILE, 8, 4, 2, 2, 4)
    ordered = tiles.permute(0, 5, 2, 1, 4, 3, 6)  # n32, b, r, k32, p, q, i
    return torch.stack([ordered & 15, ordered >> 4], dim=1).reshape(rows, columns)


def pack_qserve_groups(values: torch.Tensor) -> torch.Tensor:
    """A number of each group, ``[out, groups]``, as ``[groups, out]`` in the kernels' order."""
    rows, groups = values.shape
    return values.T.reshape(groups, rows // _TILE, 4, 8).transpose(-2, -1).reshape(groups, rows)


def unpack_qserve_groups(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_qserve_groups`."""
    groups, rows = packed.shape
    return packed.view(groups, rows // _TILE, 8, 4).transpose(-2, -1).reshape(groups, rows).T.contiguous()
