"""How a linear kernel is cut for a shape. The tables of the kernels are made of this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from halfbyte.kernels.hopper.blocks import ROWS, BlockFormat

MULTIPROCESSORS = 132
SHARED_BYTES = (
    227 * 1024
)  # what one block may have; several have to fit into 228 KB with 1 KB each for the system
ANY = 1 << 30

_PRODUCERS = 128


@dataclass(frozen=True)
class TileConfig(ABC):
    """tokens, rows: one block's tile. split: blocks that divide K. share: blocks that load activations for each other.

    stages: steps of 128 inputs in flight. blocks_per_sm: for how many the registers are divided. parts: of the tokens,
    multiplied and promoted one after the other.
    """

    tokens: int
    rows: int
    split: int = 1
    share: int = 1
    stages: int = 8
    blocks_per_sm: int = 1
    parts: int = 1

    @abstractmethod
    def shared_bytes(self, fmt: BlockFormat) -> int:
        """Dynamic shared memory, as the kernel's ``struct Shared`` lays it out."""

    def takes(self, fmt: BlockFormat) -> bool:
        """Whether the kernel can be cut so for such weights, as far as shared memory does not decide it."""
        return True

    @property
    def threads(self) -> int:
        return self.rows * 2 + _PRODUCERS

    @property
    def columns(self) -> int:
        """Tokens of one part."""
        return self.tokens // self.parts

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.rows // ROWS

    @property
    def cluster(self) -> int:
        return self.split * self.share

    def blocks(self, tokens: int, features: int) -> int:
        """Blocks to launch: all tiles at once where K is split, else as many as can run, each with as many tiles."""
        tiles = ceil_div(features, self.rows * self.share) * ceil_div(tokens, self.tokens)
        if self.split > 1:
            return tiles * self.cluster
        rounds = ceil_div(tiles, MULTIPROCESSORS * self.blocks_per_sm // self.cluster)
        return ceil_div(tiles, rounds) * self.cluster

    def defines(self, fmt: BlockFormat) -> dict[str, str | int]:
        """What ``linear.cuh`` leaves open, but for the numbers' types."""
        return {
            "TOKENS": self.tokens,
            "TILE_ROWS": self.rows,
            "SPLIT": self.split,
            "SHARE": self.share,
            "STAGES": self.stages,
            "COLUMNS": self.columns,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "GROUP_SIZE": fmt.group_size,
            "ZERO_POINTS": int(fmt.zeros is not None),
            "SHARED_BYTES": self.shared_bytes(fmt),
        }

    def _with_output(self, shared: int) -> int:
        """``shared`` bytes with the staged tile and the pipeline's barriers behind them."""
        staged = min(self.tokens, 64 if self.tokens % 64 == 0 else 32)
        tile = self.tokens * self.rows * 4 if self.split > 1 else staged * (self.rows + 8) * 2
        return up(up(shared, 16) + tile, 16) + self.stages * 16 + 8


Config = TypeVar("Config", bound=TileConfig)


@dataclass(frozen=True)
class Table(Generic[Config]):
    """rows: (at most so many tokens, output features and inputs; the first row that fits counts): config."""

    rows: Sequence[tuple[int, int, int, Config]]

    def choose(self, tokens: int, features: int, inputs: int, fmt: BlockFormat) -> Config:
        """The configuration of the first row that fits and takes such weights, with as many stages as fit."""
        for row in self.rows:
            if (
                tokens <= row[0]
                and features <= row[1]
                and inputs <= row[2]
                and (config := fitted(row[3], fmt))
            ):
                return config
        raise AssertionError(f"the table's last row does not take {fmt}")  # pragma: no cover  # tests try all

    def configurations(self) -> list[Config]:
        """All that the table can give, each once."""
        return list(dict.fromkeys(row[3] for row in self.rows))


def fitted(config: Config, fmt: BlockFormat) -> Config | None:
    """With as many stages, up to the configuration's own, as fit into shared memory; none where two do not.

    Wide scales, small groups and zero points take more of it.
    """
    limit = min(SHARED_BYTES, 228 * 1024 // config.blocks_per_sm - 1024)
    for stages in range(config.stages, 1, -1):
        fewer = replace(config, stages=stages)
        if fewer.takes(fmt) and fewer.shared_bytes(fmt) <= limit:
            return fewer
    return None


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def up(value: int, step: int) -> int:
    """The next multiple of ``step``."""
    return ceil_div(value, step) * step
