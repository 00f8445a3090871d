"""How the W4A8 kernel is cut for a shape: an explicit table, chosen from measurements on one H200.

``halfbyte bench tune`` measures the candidates again and prints the rows that win.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfbyte.kernels.hopper.weight_layout import CODE_BYTES, INPUTS, ROWS

MULTIPROCESSORS = 132
SHARED_BYTES = (
    227 * 1024
)  # what one block may have; two blocks have to fit into 228 KB with 1 KB each for the system
_PRODUCERS = 128


@dataclass(frozen=True)
class W4A8Config:
    """tokens, rows: one block's tile. split: blocks that divide K. share: blocks that load activations for each other.

    stages: steps of 128 inputs in flight. blocks_per_sm: for how many the registers are divided.
    """

    tokens: int
    rows: int
    split: int = 1
    share: int = 1
    stages: int = 8
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return self.rows * 2 + _PRODUCERS

    @property
    def cluster(self) -> int:
        return self.split * self.share

    def shared_bytes(self, group_size: int, block_bytes: int) -> int:
        """Dynamic shared memory, as ``struct Shared`` in ``w4a8.cu`` lays it out."""
        many, groups, warpgroups = self.tokens >= 64, INPUTS // group_size, self.rows // ROWS
        total = self.stages * self.tokens * INPUTS
        total = _up(total, 128) + self.stages * warpgroups * block_bytes
        total = _up(total, 128) + 4 * (self.tokens * 32 if many else 16)
        kept = (self.stages + 16 // groups) * (block_bytes - CODE_BYTES) if many else 16
        total = _up(total, 16) + warpgroups * kept
        total = _up(total, 16) + (1 if many else self.stages) * groups * self.tokens * 4
        partial = self.tokens * self.rows * 4
        total = _up(total, 16) + (partial if self.split > 1 else self.tokens * (self.rows + 8) * 2)
        total = _up(total, 16) + self.tokens * 4
        total = _up(total, 8) + self.stages * 16 + 5 * 8
        return _up(total, 1024)

    def blocks(self, tokens: int, features: int) -> int:
        """Blocks to launch: all tiles at once where K is split, else as many as can run, each with as many tiles."""
        tiles = _ceil(features, self.rows * self.share) * _ceil(tokens, self.tokens)
        if self.split > 1:
            return tiles * self.cluster
        rounds = _ceil(tiles, MULTIPROCESSORS * self.blocks_per_sm // self.cluster)
        return _ceil(tiles, rounds) * self.cluster


# (at most so many tokens, output features and inputs; the first row that fits counts): config
_ANY = 1 << 30
_TABLE: tuple[tuple[int, int, int, W4A8Config], ...] = (
    (8, 6144, _ANY, W4A8Config(8, 64, split=8, blocks_per_sm=4)),
    (8, 12288, _ANY, W4A8Config(8, 128, split=4, stages=6, blocks_per_sm=2)),
    (8, 32768, _ANY, W4A8Config(8, 64, blocks_per_sm=4)),
    (8, _ANY, _ANY, W4A8Config(8, 128, stages=6, blocks_per_sm=2)),
    (16, 6144, _ANY, W4A8Config(16, 64, split=8, blocks_per_sm=4)),
    (16, 12288, _ANY, W4A8Config(16, 128, split=4, stages=6, blocks_per_sm=2)),
    (16, 32768, _ANY, W4A8Config(16, 64, blocks_per_sm=4)),
    (16, _ANY, _ANY, W4A8Config(16, 128, stages=6, blocks_per_sm=2)),
    (32, 6144, 8192, W4A8Config(32, 128, split=4, stages=6, blocks_per_sm=2)),
    (32, 6144, _ANY, W4A8Config(32, 128, split=8, stages=6, blocks_per_sm=2)),
    (32, 12288, _ANY, W4A8Config(32, 128, split=2, stages=14)),
    (32, _ANY, _ANY, W4A8Config(32, 128, stages=6, blocks_per_sm=2)),
    (64, 12288, _ANY, W4A8Config(64, 128, split=2)),
    (64, _ANY, _ANY, W4A8Config(64, 128)),
    (128, 6144, _ANY, W4A8Config(64, 128, split=2, stages=5)),
    (128, 12288, _ANY, W4A8Config(128, 128, split=2, stages=4)),
    (256, 6144, _ANY, W4A8Config(128, 128, split=2, stages=4)),
    (_ANY, _ANY, _ANY, W4A8Config(128, 128, stages=5)),
)


def choose_config(tokens: int, features: int, inputs: int, group_size: int, block_bytes: int) -> W4A8Config:
    """The table's configuration for so many tokens, output features and inputs."""
    config = next(row[3] for row in _TABLE if tokens <= row[0] and features <= row[1] and inputs <= row[2])
    return fitted(config, group_size, block_bytes)


def fitted(config: W4A8Config, group_size: int, block_bytes: int) -> W4A8Config:
    """With as many stages, up to the configuration's own, as fit into shared memory.

    Wide scales, small groups and zero points take more of it.
    """
    limit = min(SHARED_BYTES, 228 * 1024 // config.blocks_per_sm - 1024)
    for stages in range(config.stages, 1, -1):
        fewer = replace(config, stages=stages)
        if fewer.shared_bytes(group_size, block_bytes) <= limit:
            return fewer
    raise AssertionError(f"no number of stages fits: {config}")  # pragma: no cover  # two stages always do


def configurations() -> list[W4A8Config]:
    """All that the table can give, each once."""
    return list(dict.fromkeys(row[3] for row in _TABLE))


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def _up(value: int, step: int) -> int:
    return _ceil(value, step) * step
