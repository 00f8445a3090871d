"""Configurations of the W4A8 kernel, chosen from measurements on one H200.

``halfbyte bench tune`` measures the candidates again and shows the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat
from halfbyte.kernels.hopper.config import ANY, WAVE, Table, TileConfig, ceil_div, for_experts, up

SUMS_AT_ONCE = 8  # groups whose offsets are multiplied at once
_ROUND = 8  # blocks of K that are unrolled, where a block is one group
# Registers of a thread that multiplies, by rows of the tile, less those for addresses and the like.
_REGISTERS = {64: 184, 128: 184, 192: 116, 256: 64}
# With sums in fp16, beside which there are no offsets.
_FP16_REGISTERS = {64: 184, 128: 184, 192: 116, 256: 80}
# Of up to 128 rows, where plain codes leave nothing else to keep.
_MOST_REGISTERS = 208
# For one stage's codes.
_CODES = 16
# Of a tile with fp32 sums: up to so many, codes and a half are better.
_FEW_TOKENS = 64
# Groups along K whose sums are added up in fp16: each addition rounds, and results have to stay within 3e-3.
_MOST_GROUPS = 224


@dataclass(frozen=True)
class W4A8Config(TileConfig):
    """See :class:`TileConfig`.

    halves: codes and a half are multiplied, also where a code serves many tokens; with fp32 sums and few tokens they
    always are.
    fp16_sums: sums are kept in fp16. They take half the registers and half the operations that add them up.
    """

    halves: bool = False
    fp16_sums: bool = False

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
        return self.fp16_sums or (fmt.zeros is None and self.tokens > _FEW_TOKENS and not self.halves)

    @property
    def sent_bytes(self) -> int:
        # A thread sends 16 bytes at once: in fp16 of two eights of tokens.
        return 2 if self.fp16_sums and self.tokens // 16 % self.split == 0 else 4

    def _may_go_ahead(self, fmt: BlockFormat) -> bool:
        # For few tokens registers are better spent on more blocks, for many on longer steps. (Sums in fp16 leave room
        # for both, but it is no faster, and some versions of NVRTC run out of registers.)
        return 64 <= self.tokens <= 128 and fmt.groups == 1

    @property
    def _most(self) -> int:
        return (_FP16_REGISTERS if self.fp16_sums else _REGISTERS)[self.rows]

    def _registers(self, sums: int, codes: int) -> int:
        return (self.tokens + sums * self.columns) // (4 if self.fp16_sums else 2) + codes * _CODES

    def takes(self, fmt: BlockFormat) -> bool:
        if self.fp16_sums and (fmt.zeros is not None or fmt.scale != torch.float16):
            return False  # scales that are not normalized, or offsets, which are fp32
        longer = self.plain(fmt) and not self.fp16_sums and fmt.groups == 1 and self.rows <= 128
        most = _MOST_REGISTERS if longer else self._most
        fits = self._registers(1, 1) <= most and (self.tokens <= 128 or self.split == 1 or self.fp16_sums)
        if self.halves and (self.tokens <= _FEW_TOKENS or self.fp16_sums):
            return False  # the same kernel as without
        if self.rows == 256 and fmt.groups > 1:
            return False  # some versions of NVRTC run out of registers
        return fits and (fmt.groups > 1 or self._makes_rounds(fmt))

    def _makes_rounds(self, fmt: BlockFormat) -> bool:
        """Whether blocks that are unrolled together go through all stages, and through both sets of codes."""
        blocks = self.stages * self.stage_blocks
        if not self.plain(fmt):
            return _ROUND % blocks == 0
        return blocks <= _ROUND and not (self.ahead(fmt) and _ROUND // blocks * blocks % 2)

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
        total += self.rows * 2 * 8 if fmt.scale == torch.float16 else 8  # rows' factors
        return up(total + self.pipeline_bytes, 1024)


FP32 = Table(
    (
        (8, WAVE // 2, 2048, W4A8Config(8, 64, split=4, blocks_per_sm=4)),
        (8, WAVE // 2, ANY, W4A8Config(8, 64, split=8, blocks_per_sm=4)),
        (8, 6144, ANY, W4A8Config(8, 128, split=4, blocks_per_sm=2)),
        (8, WAVE, ANY, W4A8Config(8, 64, split=4, blocks_per_sm=4)),
        (8, WAVE * 2, ANY, W4A8Config(8, 128, split=2, blocks_per_sm=2)),
        (8, WAVE * 3, ANY, W4A8Config(8, 128, blocks_per_sm=2)),
        (8, ANY, ANY, W4A8Config(8, 256, stream=True)),
        (8, ANY, ANY, W4A8Config(8, 128, blocks_per_sm=2)),
        (16, WAVE // 2, 2048, W4A8Config(16, 128, split=4, blocks_per_sm=2)),
        (16, WAVE // 2, ANY, W4A8Config(16, 64, split=8, blocks_per_sm=4)),
        (16, WAVE, ANY, W4A8Config(16, 128, split=4, blocks_per_sm=2)),
        (16, WAVE * 2, ANY, W4A8Config(16, 128, split=2, blocks_per_sm=2)),
        (16, WAVE * 4, ANY, W4A8Config(16, 128, blocks_per_sm=2)),
        (16, ANY, ANY, W4A8Config(16, 256, stream=True)),
        (16, ANY, ANY, W4A8Config(16, 128, blocks_per_sm=2)),
        (32, WAVE // 2, ANY, W4A8Config(32, 64, split=4, blocks_per_sm=2)),
        (32, WAVE, ANY, W4A8Config(32, 64, split=2, blocks_per_sm=2)),
        (32, WAVE * 2, ANY, W4A8Config(32, 128, split=2, blocks_per_sm=2)),
        (32, ANY, ANY, W4A8Config(32, 128, blocks_per_sm=2)),
        (64, WAVE // 2, ANY, W4A8Config(64, 64, split=2, stages=4, stage_blocks=2)),
        (64, 6144, ANY, W4A8Config(64, 64, split=2, blocks_per_sm=2)),
        (64, WAVE, ANY, W4A8Config(64, 128, split=2, stages=4, stage_blocks=2)),
        (64, WAVE * 4, ANY, W4A8Config(64, 128, stages=4, stage_blocks=2)),
        (64, ANY, ANY, W4A8Config(64, 192, stages=4, stage_blocks=2, stream=True)),
        (128, WAVE // 2, 8192, W4A8Config(64, 64, stages=4, stage_blocks=2)),
        (128, WAVE // 2, ANY, W4A8Config(64, 128, split=2, stages=4, stage_blocks=2)),
        (128, 6144, ANY, W4A8Config(128, 64, split=2, blocks_per_sm=2)),
        (128, WAVE, ANY, W4A8Config(128, 128, split=2, stages=4)),
        (128, WAVE * 4, ANY, W4A8Config(128, 128, stages=4, stage_blocks=2, parts=2, halves=True)),
        (128, ANY, ANY, W4A8Config(128, 128)),
        (192, WAVE * 2 // 3, 8192, W4A8Config(64, 128, stages=4, stage_blocks=2)),
        (256, WAVE // 2, 8192, W4A8Config(64, 128, stages=4, stage_blocks=2)),
        (256, WAVE // 2, ANY, W4A8Config(128, 128, split=2, stages=4)),
        (256, WAVE * 3, ANY, W4A8Config(128, 128)),
        (256, ANY, ANY, W4A8Config(256, 128, stages=4, parts=2)),
        (256, ANY, ANY, W4A8Config(256, 128, stages=4, parts=4)),
        (512, 6144, ANY, W4A8Config(128, 128)),
        (ANY, ANY, ANY, W4A8Config(256, 128, share=2, stages=4, parts=2)),
        (ANY, ANY, ANY, W4A8Config(256, 128, share=2, stages=4, parts=4)),
    )
)

_fp16 = partial(W4A8Config, fp16_sums=True)
_FEWEST_FP16_TOKENS = 64

FP16 = Table(
    (
        *(row for row in FP32.rows if row[0] < _FEWEST_FP16_TOKENS),
        (64, WAVE // 2, 4096, _fp16(64, 64, split=2)),
        (64, WAVE // 2, ANY, _fp16(64, 64, split=4, blocks_per_sm=2)),
        (64, WAVE, ANY, _fp16(64, 64, split=2, blocks_per_sm=2)),
        (64, WAVE * 3 // 2, ANY, _fp16(64, 192, split=2, stages=4, stage_blocks=2)),
        (64, WAVE * 2, ANY, _fp16(64, 128, stages=4, stage_blocks=2)),
        (64, WAVE * 3, ANY, _fp16(64, 192, stages=4, stage_blocks=2)),
        (64, WAVE * 4, ANY, _fp16(64, 256, stages=3, stage_blocks=2)),
        (64, WAVE * 6, ANY, _fp16(64, 192, stages=4, stage_blocks=2, stream=True)),
        (64, ANY, ANY, _fp16(64, 256, stages=3, stage_blocks=2)),
        (64, ANY, ANY, _fp16(64, 192, stages=4, stage_blocks=2, stream=True)),
        (128, WAVE // 4, ANY, _fp16(64, 64, split=4, blocks_per_sm=2)),
        (128, WAVE // 2, ANY, _fp16(128, 64, split=4, blocks_per_sm=2)),
        (128, WAVE, ANY, _fp16(128, 128, split=2)),
        (128, WAVE * 2, ANY, _fp16(128, 128)),
        (128, WAVE * 3, ANY, _fp16(128, 192)),
        (128, WAVE * 4, ANY, _fp16(128, 256)),
        (128, WAVE * 6, ANY, _fp16(128, 192)),
        (128, ANY, ANY, _fp16(128, 256, rest=_fp16(128, 192))),
        (128, ANY, ANY, _fp16(128, 192)),
        (256, WAVE // 4, ANY, _fp16(128, 64, split=4, blocks_per_sm=2)),
        (256, WAVE // 2, 8192, _fp16(128, 64, split=2, blocks_per_sm=2)),
        (256, WAVE // 2, ANY, _fp16(128, 128, split=2)),
        (256, WAVE, ANY, _fp16(128, 128)),
        (256, WAVE * 3 // 2, ANY, _fp16(128, 192)),
        (256, WAVE * 2, ANY, _fp16(256, 128, stages=4, parts=2)),
        (256, WAVE * 3, ANY, _fp16(128, 192)),
        (256, ANY, ANY, _fp16(256, 128, stages=4, parts=2, rest=_fp16(128, 128))),
        (512, 2048, ANY, _fp16(128, 128, split=2)),
        (512, WAVE // 2, ANY, _fp16(128, 128)),
        (512, WAVE * 3 // 4, ANY, _fp16(128, 192)),
        (512, ANY, ANY, _fp16(256, 128, stages=4, parts=2, rest=_fp16(128, 128))),
        (ANY, ANY, ANY, _fp16(256, 128, share=2, stages=4, parts=2)),
        *(row for row in FP32.rows if row[0] >= _FEWEST_FP16_TOKENS),
    )
)
"""Sums of many tokens in fp16, where weights allow it; else, and for few tokens, as ``FP32``."""


_FEW_TOKENS_OF_EXPERTS = (
    (8, WAVE // 2, ANY, W4A8Config(8, 64, split=8, blocks_per_sm=4)),
    (8, WAVE, ANY, W4A8Config(8, 64, split=4, blocks_per_sm=4)),
    (8, WAVE * 2, ANY, W4A8Config(8, 64, split=2, blocks_per_sm=4)),
    (8, WAVE * 5, 8192, W4A8Config(8, 64, blocks_per_sm=4)),
    (8, WAVE * 5, ANY, W4A8Config(8, 128, split=2, blocks_per_sm=2)),
    (8, ANY, ANY, W4A8Config(8, 128, blocks_per_sm=2)),
    (16, ANY, ANY, W4A8Config(16, 128, blocks_per_sm=2)),
    (24, ANY, ANY, W4A8Config(24, 128, blocks_per_sm=2)),
    (32, ANY, ANY, W4A8Config(32, 128, blocks_per_sm=2)),
    (48, ANY, ANY, W4A8Config(48, 64, blocks_per_sm=2)),
)

EXPERTS_FP32 = for_experts(
    (
        *_FEW_TOKENS_OF_EXPERTS,
        (64, ANY, ANY, W4A8Config(64, 128, stages=4, stage_blocks=2)),
        (96, ANY, ANY, W4A8Config(96, 128)),
        (128, ANY, ANY, W4A8Config(128, 128)),
    )
)
"""For experts: tiles of so many tokens of one, and output features of all tiles together."""

EXPERTS_FP16 = for_experts(
    (
        *_FEW_TOKENS_OF_EXPERTS,
        (64, ANY, ANY, _fp16(64, 256, stages=3, stage_blocks=2)),
        (96, ANY, ANY, _fp16(96, 256)),
        (128, ANY, ANY, _fp16(128, 256)),
        *(row for row in EXPERTS_FP32.rows if row[0] >= _FEWEST_FP16_TOKENS),
    )
)
"""The same with sums of many tokens in fp16, where weights allow it."""


def table_for(out: torch.dtype, inputs: int, fmt: BlockFormat, fp16_sums: bool) -> Table[W4A8Config]:
    """fp16_sums: whether sums in fp16 will do. They do for bf16 results, which are coarser, of not too many groups."""
    few = inputs <= _MOST_GROUPS * fmt.group_size
    return FP16 if fp16_sums and out == torch.bfloat16 and few else FP32


def experts_table_for(out: torch.dtype, inputs: int, fmt: BlockFormat, fp16_sums: bool) -> Table[W4A8Config]:
    """The experts' table where :func:`table_for` gives the one for a layer."""
    return EXPERTS_FP16 if table_for(out, inputs, fmt, fp16_sums) is FP16 else EXPERTS_FP32
