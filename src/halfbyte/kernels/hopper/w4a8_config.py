"""Configurations of the W4A8 kernel, chosen from measurements on one H200.

``halfbyte bench tune`` measures the candidates again and shows the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat
from halfbyte.kernels.hopper.config import ANY, Table, TileConfig, ceil_div, up

SUMS_AT_ONCE = 8  # groups whose offsets are multiplied at once
_ROUND = 8  # blocks of K that are unrolled, where a block is one group
# Registers of a thread that multiplies, by rows of the tile, less those for addresses and the like.
_REGISTERS = {64: 184, 128: 184, 192: 116, 256: 64}
_MOST_REGISTERS = 208  # the same where plain codes leave nothing else to keep: of 128 rows
_FEW_TOKENS = 64  # of a tile: up to so many, codes and a half are better
_CODES = 16  # registers for one stage's codes


@dataclass(frozen=True)
class W4A8Config(TileConfig):
    """See :class:`TileConfig`.

    halves: codes and a half are multiplied, also where a code serves many tokens; for few they always are.
    """

    halves: bool = False

    def sums(self, fmt: BlockFormat) -> int:
        """Two where one step can be promoted while the next one is multiplied."""
        in_rounds = self._may_go_ahead(fmt)
        fits = self._registers(2, 2 if in_rounds else 1) <= self._most
        return 2 if (in_rounds or self.parts * fmt.groups > 1) and fits else 1

    def ahead(self, fmt: BlockFormat) -> bool:
        """Whether the next block's codes have registers of their own, so that products run on from block to block."""
        return self._may_go_ahead(fmt) and self._registers(self.sums(fmt), 2) <= self._most

    def plain(self, fmt: BlockFormat) -> bool:
        """Whether codes are multiplied as they are. Codes and a half are made in fewer operations, but take a product
        of their own with the activations' sums, as zero points do: better where a code serves few tokens.
        """
        return fmt.zeros is None and self.tokens > _FEW_TOKENS and not self.halves

    def _may_go_ahead(self, fmt: BlockFormat) -> bool:
        # For few tokens registers are better spent on more blocks, for many on longer steps.
        return 64 <= self.tokens <= 128 and fmt.groups == 1

    @property
    def _most(self) -> int:
        return _REGISTERS[self.rows]

    def _registers(self, sums: int, codes: int) -> int:
        return self.tokens // 2 + sums * self.columns // 2 + codes * _CODES

    def takes(self, fmt: BlockFormat) -> bool:
        most = _MOST_REGISTERS if self.plain(fmt) and fmt.groups == 1 and self.rows <= 128 else self._most
        fits = self._registers(1, 1) <= most and (self.tokens <= 128 or self.split == 1)
        if self.halves and self.tokens <= _FEW_TOKENS:
            return False  # the same kernel as without
        if self.rows == 256 and fmt.groups > 1:
            return False  # some versions of NVRTC run out of registers
        return fits and (fmt.groups > 1 or _ROUND % (self.stages * self.stage_blocks) == 0)

    def cut(self, fmt: BlockFormat) -> int:
        # The copy engine reads sums from where 16 bytes begin: four groups.
        return max(4 // fmt.groups, 1)

    def shared_bytes(self, fmt: BlockFormat) -> int:
        blocks = self.stages * self.stage_blocks
        total = up(blocks * self.tokens * INPUTS + self.staged_bytes, 128)
        total = up(total + blocks * self.warpgroups * fmt.nbytes, 256)
        octets = ceil_div(blocks * fmt.groups, SUMS_AT_ONCE) + 2
        total += 16 if self.plain(fmt) else octets * self.tokens * 32
        total += self.warpgroups * self.tokens * 4
        return up(total + self.pipeline_bytes, 1024)


TABLE = Table(
    (
        (8, 6144, 2048, W4A8Config(8, 64, split=4, blocks_per_sm=4)),
        (8, 6144, ANY, W4A8Config(8, 64, split=8, blocks_per_sm=4)),
        (8, 12288, ANY, W4A8Config(8, 64, split=4, blocks_per_sm=4)),
        (8, 24576, ANY, W4A8Config(8, 128, blocks_per_sm=2)),
        (8, ANY, ANY, W4A8Config(8, 256, stream=True)),
        (8, ANY, ANY, W4A8Config(8, 128, blocks_per_sm=2)),
        (16, 6144, 2048, W4A8Config(16, 128, split=4, blocks_per_sm=2)),
        (16, 6144, ANY, W4A8Config(16, 64, split=8, blocks_per_sm=4)),
        (16, 12288, ANY, W4A8Config(16, 128, split=4, blocks_per_sm=2)),
        (16, 32768, ANY, W4A8Config(16, 128, blocks_per_sm=2)),
        (16, ANY, ANY, W4A8Config(16, 256, stream=True)),
        (16, ANY, ANY, W4A8Config(16, 128, blocks_per_sm=2)),
        (32, 6144, 8192, W4A8Config(32, 128, split=4, blocks_per_sm=2)),
        (32, 6144, ANY, W4A8Config(32, 128, split=8, blocks_per_sm=2)),
        (32, 12288, ANY, W4A8Config(32, 128, split=2)),
        (32, ANY, ANY, W4A8Config(32, 128, blocks_per_sm=2)),
        (64, 6144, ANY, W4A8Config(64, 64, split=2, stages=4, stage_blocks=2)),
        (64, 12288, ANY, W4A8Config(64, 128, split=2, stages=4, stage_blocks=2)),
        (64, 32768, ANY, W4A8Config(64, 128, stages=4, stage_blocks=2)),
        (64, ANY, ANY, W4A8Config(64, 192, stages=4, stage_blocks=2, stream=True)),
        (128, 6144, 8192, W4A8Config(64, 64, stages=4, stage_blocks=2)),
        (128, 6144, ANY, W4A8Config(64, 128, split=2, stages=4, stage_blocks=2)),
        (128, 12288, ANY, W4A8Config(128, 128, split=2, stages=4)),
        (128, 32768, ANY, W4A8Config(128, 128, stages=4, stage_blocks=2, parts=2, halves=True)),
        (128, ANY, ANY, W4A8Config(128, 128)),
        (256, 6144, 8192, W4A8Config(64, 128, stages=4, stage_blocks=2)),
        (256, 6144, ANY, W4A8Config(128, 128, split=2, stages=4)),
        (256, 24576, ANY, W4A8Config(128, 128)),
        (256, ANY, ANY, W4A8Config(256, 128, stages=4, parts=2)),
        (256, ANY, ANY, W4A8Config(256, 128, stages=4, parts=4)),
        (512, 6144, ANY, W4A8Config(128, 128)),
        (ANY, ANY, ANY, W4A8Config(256, 128, share=2, stages=4, parts=2)),
        (ANY, ANY, ANY, W4A8Config(256, 128, share=2, stages=4, parts=4)),
    )
)
