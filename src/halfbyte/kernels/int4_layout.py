"""The order in which torch's INT4 CPU kernel keeps its codes, so that they can be read back.

Rows of the weight (N) go in blocks; a block holds, input after input, half a byte per row. In whole blocks of
vector machines a byte joins rows n and n + half a block; elsewhere, and in the last, smaller block, rows n
and n + 1. The block's size follows the machine (64 with AVX-512, 32 with AVX2). Source:
``weight_to_int4pack_kernel`` in PyTorch's aten/src/ATen/native/cpu/int4mm_kernel.cpp. The order is no promise
of torch's, so it is checked once, by packing a matrix, before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Int4Layout:
    """block: rows in a whole block. halves: its bytes join rows n and n + block / 2, not n and n + 1."""

    block: int
    halves: bool

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes 0..15 ``[N, K]`` in this order: uint8 ``[N, K / 2]``. N is a multiple of 16, K even."""
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)

    def unpack(
        self, packed: torch.Tensor, inputs: int, dtype: torch.dtype, rows_at_once: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Codes 0..15 of the first ``inputs`` columns: rows, and ``[inputs, rows]`` in ``dtype``."""
        count, width = packed.shape[0], packed.shape[1] * 2
        whole = count // self.block * self.block
        step = max(1, rows_at_once // self.block) * self.block
        data = packed.reshape(-1)
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            blocks = data[start * width // 2 : stop * width // 2].view(-1, width, self.block // 2)
            yield slice(start, stop), _split(blocks[:, :inputs], self.halves, dtype)
        if whole < count:
            last = data[whole * width // 2 :].view(1, width, (count - whole) // 2)
            yield slice(whole, count), _split(last[:, :inputs], False, dtype)


@cache
def int4_layout() -> Int4Layout | None:
    """This machine's order, or none where torch lacks the kernel or keeps codes in an order unknown here."""
    if not hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu"):
        return None
    codes = torch.arange(240 * 6, device="cpu").remainder(11).mul(7).remainder(16).view(240, 6)
    for layout in (Int4Layout(64, True), Int4Layout(32, True), Int4Layout(32, False), Int4Layout(16, False)):
        strips = [strip for _, strip in layout.unpack(layout.pack(codes), 6, torch.int64, 128)]
        if torch.equal(torch.cat(strips, 1).T, codes):
            return layout
    return None


def _split(blocks: torch.Tensor, halves: bool, dtype: torch.dtype) -> torch.Tensor:
    """Bytes ``[blocks, inputs, half a block]`` as codes ``[inputs, blocks * block]``."""
    count, inputs, half = blocks.shape
    by_input = blocks.transpose(0, 1)
    codes = torch.empty(
        inputs, count, *((2, half) if halves else (half, 2)), dtype=dtype, device=blocks.device
    )
    low, high = (codes[:, :, 0], codes[:, :, 1]) if halves else (codes[..., 0], codes[..., 1])
    low.copy_(by_input & 15)
    high.copy_(by_input >> 4)
    return codes.view(inputs, -1)
