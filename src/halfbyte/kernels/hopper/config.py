"""How a linear kernel is cut for a shape. The tables of the kernels are made of this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

from halfbyte.kernels.hopper.blocks import INPUTS, ROWS, BlockFormat

MULTIPROCESSORS = 132
SHARED_BYTES = (
    227 * 1024
)  # what one block may have; several have to fit into 228 KB with 1 KB each for the system
ANY = 1 << 30
WAVE = MULTIPROCESSORS * ROWS  # features of tiles of 64 for all multiprocessors: the tables count in these
MOST_SUMS = 128 * 128  # of the blocks that one multiprocessor runs together
QUANTUM = 8  # blocks of K: what most kernels' unrolled stages take at once

_PRODUCERS = 128
_IDLE = 0.2  # so many blocks without a tile in the last round, as a part of all rounds, cost more than dividing tiles


@dataclass(frozen=True)
class Schedule:
    """blocks: to launch. streamed: tiles, the first ones, that all of them divide. quantum: K is cut at multiples of so
    many blocks of K, if at all.
    """

    blocks: int
    streamed: int
    quantum: int


@dataclass(frozen=True)
class TileConfig(ABC):
    """tokens, rows: one block's tile. split: blocks that divide K. share: blocks that load activations for each other.

    stages: in flight. blocks_per_sm: for how many the registers are divided. parts: of the tokens,
    multiplied and promoted one after the other. stream: whether the tiles of the last rounds are divided evenly among
    all blocks, along K, where whole tiles would leave too many idle. stage_blocks: of K in a stage. rest: for the
    features that would make a last round of tiles in which most multiprocessors have none. grouped: for several
    weights, each with tokens of its own.
    """

    tokens: int
    rows: int
    split: int = 1
    share: int = 1
    stages: int = 8
    blocks_per_sm: int = 1
    parts: int = 1
    stream: bool = False
    stage_blocks: int = 1
    rest: TileConfig | None = None
    grouped: bool = False

    @abstractmethod
    def shared_bytes(self, fmt: BlockFormat) -> int:
        """Dynamic shared memory, as the kernel's ``struct Shared`` lays it out."""

    def takes(self, fmt: BlockFormat) -> bool:
        """Whether the kernel can be cut so for such weights, as far as shared memory does not decide it."""
        return True

    def cut(self, fmt: BlockFormat) -> int:
        """Parts of K begin at multiples of so many blocks of K; ``QUANTUM`` is a multiple of it."""
        return 1

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

    @property
    def places(self) -> int:
        """Clusters that run together."""
        return MULTIPROCESSORS * self.blocks_per_sm // self.cluster

    def schedule(self, tokens: int, features: int, blocks_k: int, fmt: BlockFormat) -> Schedule:
        """How many blocks to launch, and what each does.

        All tiles at once where K is split, else as many blocks as can run, each with as many tiles; with ``stream``
        a last round that is far from full and the one before are divided.
        """
        tiles = ceil_div(features, self.rows * self.share) * ceil_div(tokens, self.tokens)
        if self.split > 1:
            return Schedule(tiles * self.cluster, 0, self.cut(fmt))
        places = self.places
        fits = self.tokens * self.rows * self.blocks_per_sm <= MOST_SUMS
        idle = 1 - tiles / (ceil_div(tiles, places) * places)
        if self.stream and fits and idle > _IDLE and tiles * ceil_div(blocks_k, QUANTUM) >= places:
            whole = max(tiles // places - 1, 0) * places
            return Schedule(places * self.cluster, tiles - whole, QUANTUM)
        return Schedule(ceil_div(tiles, ceil_div(tiles, places)) * self.cluster, 0, blocks_k)

    def first_features(self, tokens: int, features: int, rest: TileConfig) -> int:
        """Features for this configuration; the others go to ``rest``. As many as fill whole rounds, if the others then
        fit into one round of ``rest``; else all.
        """
        tiles = self.places // ceil_div(tokens, self.tokens) * self.share  # of features, in a round
        if not tiles or not (self.staged_tokens and rest.staged_tokens):
            return features
        whole = features // (tiles * self.rows) * tiles * self.rows
        others = ceil_div(features - whole, rest.rows) * ceil_div(tokens, rest.tokens)
        return whole if whole and 0 < others <= rest.places else features

    @property
    def staged_bytes(self) -> int:
        """For sums on their way to other blocks, and for finished tokens on their way out: ``Staged``."""
        sent = self.tokens * self.rows * self.sent_bytes // self.split * (self.split - 1)
        return sent + (self._buffered_tokens * self.rows * 2 if self.staged_tokens else 16)

    @property
    def sent_bytes(self) -> int:
        """Of one sum that goes from one of the blocks that divide K to another."""
        return 4

    @property
    def staged_tokens(self) -> int:
        """How many finished tokens one copy takes out; none where blocks that divide K have no whole eights of them."""
        if self.tokens // 8 % self.split:
            return 0
        return self._own_tokens if self._own_tokens <= 64 else 32

    @property
    def _buffered_tokens(self) -> int:
        """In all buffers."""
        own = self._own_tokens
        return own if own <= 64 else 64 if own <= 128 else 128

    @property
    def _own_tokens(self) -> int:
        """Those that one of the blocks that divide K adds up."""
        return self.tokens // self.split

    @property
    def pipeline_bytes(self) -> int:
        """For barriers: ``Pipeline``."""
        return self.stages * 16 + 8

    def defines(self, fmt: BlockFormat) -> dict[str, str | int]:
        """What ``linear.cuh`` leaves open, but for the numbers' types."""
        return {
            "TOKENS": self.tokens,
            "TILE_ROWS": self.rows,
            "SPLIT": self.split,
            "SHARE": self.share,
            "STAGES": self.stages,
            "STAGE_BLOCKS": self.stage_blocks,
            "STREAM": int(self.stream),
            "COLUMNS": self.columns,
            "SENT_BYTES": self.sent_bytes,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "GROUP_SIZE": fmt.group_size,
            "CODE_BYTES": fmt.code_bytes,
            "SCALE_BYTES": fmt.scale_bytes,
            "Total": "float",
            "ZERO_POINTS": int(fmt.zeros is not None),
            "SHARED_BYTES": self.shared_bytes(fmt),
            "GROUPED": int(self.grouped),
        }


@dataclass(frozen=True)
class WholeSumsConfig(TileConfig):
    """For a kernel whose sums stay in the tensor cores over all of K: tokens in one part, a block of K in a stage."""

    def takes(self, fmt: BlockFormat) -> bool:
        # Blocks that are unrolled together go through all stages, and through both sets where a block is one step.
        unrolled = QUANTUM // self.stages * self.stages
        return unrolled > 0 and unrolled % 2 == 0 and self.stage_blocks == self.parts == 1

    def shared_bytes(self, fmt: BlockFormat) -> int:
        total = up(self.stages * self.tokens * INPUTS + self.staged_bytes, 128)
        total += self.stages * self.warpgroups * fmt.nbytes + self.kept_bytes
        return up(total + self.pipeline_bytes, 1024)

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """Of what the kernel keeps for tokens, and of its tables."""


Config = TypeVar("Config", bound=TileConfig)


@dataclass(frozen=True)
class Table(Generic[Config]):
    """rows: (at most so many tokens, output features and inputs; the first row that fits counts): config.

    Features at which configurations change are mostly those that their tiles can have in one round.
    """

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

    def alike(self, tokens: int) -> list[Config]:
        """What the table has for so many tokens, up to what it has for any shape."""
        rows = [row for row in self.rows if tokens <= row[0]]
        last = next(i for i, row in enumerate(rows) if row[1] == row[2] == ANY)
        return [row[3] for row in rows[: last + 1]]

    def configurations(self) -> list[Config]:
        """All that the table can give, and what they leave the rest to, each once."""
        chosen = [row[3] for row in self.rows]
        return list(dict.fromkeys([*chosen, *(config.rest for config in chosen if config.rest)]))  # type: ignore[list-item]


def for_experts(rows: Sequence[tuple[int, int, int, Config]]) -> Table[Config]:
    """A table for tiles of so many tokens of one expert, by the output features of all tiles together."""
    return Table([(*row[:3], replace(row[3], grouped=True)) for row in rows])


@cache
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
