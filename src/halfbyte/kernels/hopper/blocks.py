"""How the Hopper kernels want an INT4 weight: the order in which warps need it, so that one copy feeds them.

The weight ``[N, K]`` is cut into blocks of 64 output features x 128 inputs, block after block along K, N and K
padded with zero codes. A block holds, one after the other,

- 4,096 bytes of codes in the order of the matrix instruction's register fragment (``w4a8_codes``, ``w4a16_codes``,
  ``w4a8_fp8_scales_codes``): thread t of a warpgroup reads bytes 16 t to 16 t + 15 of each half; or 8,192 of 8 bits
  (``w8a8_codes``);
- the groups' scales: ``[128 / group][64]`` numbers of one, two or four bytes;
- with zero points, ``[128 / group][64]`` numbers of two bytes, in the form that the kernel takes off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS = 64
INPUTS = 128
CODE_BYTES = ROWS * INPUTS // 2


@dataclass(frozen=True)
class BlockFormat:
    """What a block holds. group_size: 32, 64 or 128. scale, zeros: dtypes of scales and zero points, if any.

    code_bytes: of all codes.
    """

    group_size: int
    scale: torch.dtype | None
    zeros: torch.dtype | None = None
    code_bytes: int = CODE_BYTES

    @property
    def groups(self) -> int:
        """Groups along a block's inputs."""
        return INPUTS // self.group_size

    @property
    def scale_bytes(self) -> int:
        """Of one scale."""
        return self.scale.itemsize if self.scale else 0

    @property
    def kept_bytes(self) -> int:
        """Scales and zero points."""
        return ROWS * self.groups * (self.scale_bytes + (self.zeros.itemsize if self.zeros else 0))

    @property
    def nbytes(self) -> int:
        return self.code_bytes + self.kept_bytes


def pack_blocks(
    fmt: BlockFormat,
    codes: torch.Tensor,
    pack_codes: Callable[[torch.Tensor], torch.Tensor],
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
) -> torch.Tensor:
    """The weight as uint8 ``[N / 64, K / 128, bytes of a block]``, rounded up.

    codes: int8 ``[N, K]`` in -8..7, which ``pack_codes`` takes padded. scales, zeros: ``[N, ceil(K / group_size)]``.
    """
    n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % INPUTS, 0, -n % ROWS))
    of_groups = [_pack_groups(values, codes.shape, fmt) for values in (scales, zeros) if values is not None]
    return torch.cat([pack_codes(codes), *of_groups], dim=-1)


def unpack_blocks(
    fmt: BlockFormat,
    packed: torch.Tensor,
    unpack_codes: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The inverse of :func:`pack_blocks`, bit for bit: codes int8, scales or none, zeros or none."""
    n, groups = shape[0], -(-shape[1] // fmt.group_size)
    scale_bytes = ROWS * fmt.groups * fmt.scale_bytes
    codes, scales, zeros = packed.split([fmt.code_bytes, scale_bytes, fmt.kept_bytes - scale_bytes], dim=-1)

    def groups_of(part: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
        return _unpack_groups(part, dtype)[:n, :groups].contiguous() if dtype else None

    return (
        unpack_codes(codes)[:n, : shape[1]].contiguous(),
        groups_of(scales, fmt.scale),
        groups_of(zeros, fmt.zeros),
    )


def _pack_groups(values: torch.Tensor, padded: torch.Size, fmt: BlockFormat) -> torch.Tensor:
    """``[N, groups]`` as bytes ``[N64, K128, groups a block x 64 x itemsize]``."""
    n, groups = padded[0], padded[1] // fmt.group_size
    values = torch.nn.functional.pad(values, (0, groups - values.shape[1], 0, n - values.shape[0]))
    blocks = values.view(n // ROWS, ROWS, padded[1] // INPUTS, fmt.groups).permute(0, 2, 3, 1)
    return blocks.contiguous().view(torch.uint8).flatten(2)


def _unpack_groups(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    n64, k128, _ = packed.shape
    blocks = packed.contiguous().view(dtype).view(n64, k128, -1, ROWS)
    return blocks.permute(0, 3, 1, 2).reshape(n64 * ROWS, -1)
