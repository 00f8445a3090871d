"""Random weights for a checkpoint of any size, at the speed of the disk: one pool of numbers, over and over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from halfbyte.checkpoint.reader import Checkpoint

POOL_ELEMENTS = (1 << 26) + 1
"""Odd, so that what the pool begins anew with lies at another place in a row of weights."""
_WEIGHT_STD = 0.02


def fill_with_random_weights(checkpoint: Path, *, pool_elements: int = POOL_ELEMENTS, seed: int = 0) -> None:
    """Overwrites the data of a BF16 checkpoint, tensor after tensor, with a pool of normal numbers (std 0.02).

    Norms become 1.0. The same seed writes the same bytes. Memory: 6 bytes for each element of the pool.
    """
    tensors = Checkpoint.open(checkpoint).tensors.values()
    elements = min(pool_elements, sum(info.nbytes for info in tensors) // 2 | 1)
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(seed)).mul_(_WEIGHT_STD)
    pool = numbers.bfloat16().view(torch.int16).numpy().data.cast("B")
    del numbers
    start = 0
    for info in tensors:
        with info.file.open("r+b") as file:
            file.seek(info.offset)
            if info.name.endswith("norm.weight"):
                file.write(torch.ones(info.shape, dtype=torch.bfloat16).view(torch.int16).numpy().data)
                continue
            for part in _pieces(pool, start, info.nbytes):
                file.write(part)
            start = (start + info.nbytes) % len(pool)


def _pieces(pool: memoryview, start: int, nbytes: int) -> Iterator[memoryview]:
    """``nbytes`` of a pool that begins anew where it ends, from ``start`` on."""
    while nbytes:
        piece = pool[start : start + nbytes]
        yield piece
        nbytes -= len(piece)
        start = 0
