"""Which tiles a GEMM of the portable kernels is cut into: one small table per kernel, nothing tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

# Bytes of shared memory that one block may use, by compute capability; where it is unknown, the least of them.
_SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_LEAST_SHARED_BYTES = 99 << 10

# What a kernel needs beside its stages.
_SHARED_RESERVE = 1 << 10

# What a block must have to do, at the least, to be worth a part in a sum, and how many parts a sum may have.
_FEWEST_STEPS = 4
_MOST_SPLITS = 16

# In a table by numbers of tokens: any number.
MANY = 1 << 62


@dataclass(frozen=True)
class Gpu:
    """What a plan depends on. capability: 10 * major + minor."""

    capability: int
    multiprocessors: int

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, at most, for one block."""
        return _SHARED_BYTES.get(self.capability, _LEAST_SHARED_BYTES)


@dataclass(frozen=True)
class Tile:
    """What one block computes, and with what.

    stages: at most; fewer where shared memory is small. resident: blocks that one multiprocessor should have,
    so that enough loads are in flight; K is split until it has them.
    """

    tokens: int
    rows: int
    warps: int
    stages: int
    resident: int


@dataclass(frozen=True)
class Plan:
    """A tile, with its stages settled, and how many blocks share one tile's inputs, ``steps`` steps each."""

    tile: Tile
    splits: int
    steps: int


def plan(tile: Tile, tokens: int, rows: int, steps: int, step_bytes: int, gpu: Gpu) -> Plan:
    """tokens, rows: of the result (M and N). steps: along K; each reads ``step_bytes`` into shared memory."""
    buffers = (gpu.shared_bytes - _SHARED_RESERVE) // step_bytes
    # Before Hopper, the stage that is being computed needs no buffer next to those being loaded.
    stages = max(1, min(tile.stages, buffers if gpu.capability >= 90 else buffers + 1))
    blocks = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    splits = max(1, min(tile.resident * gpu.multiprocessors // blocks, steps // _FEWEST_STEPS, _MOST_SPLITS))
    each = -(-steps // splits)
    return Plan(replace(tile, stages=stages), -(-steps // each), each)


def tile_for(table: dict[int, Tile], tokens: int) -> Tile:
    """The tile of the first entry, by ascending number of tokens, that takes as many."""
    return next(tile for most, tile in table.items() if tokens <= most)


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU that ``device`` names."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(10 * properties.major + properties.minor, properties.multi_processor_count)
