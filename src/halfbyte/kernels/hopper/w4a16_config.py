"""Configurations of the W4A16 kernel, chosen from measurements on one H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat
from halfbyte.kernels.hopper.config import ANY, WAVE, Table, TileConfig, for_experts, up


@dataclass(frozen=True)
class W4A16Config(TileConfig):
    """See :class:`TileConfig`.

    rounded: each weight is multiplied by its scale and rounded to bfloat16 once, and sums stay in the tensor cores.
    Else scales are applied to fp32 sums of each group.
    """

    rounded: bool = False

    @property
    def tight(self) -> bool:
        """With ``rounded``: whether a thread has registers for two quarters of a block's codes, not for four halves."""
        return self.rows > 128

    def takes(self, fmt: BlockFormat) -> bool:
        # Registers of a thread, less those for addresses.
        most = {64: 196, 128: 196, 192: 124, 256: 84}[self.rows]
        # Of two quarters of a block's codes, or four halves; or one part's sums and a block's codes.
        others = (16 if self.tight else 64) if self.rounded else self.columns // 2 + 32
        fits = self.tokens // 2 + others <= most
        if self.rounded and (self.parts > 1 or self.stages not in (2, 3, 4, 6, 8)):
            return False  # the kernel's rounds are whole turns of the sets
        return fits and self.stage_blocks == 1 and (self.tokens <= 128 or self.split == 1)

    def shared_bytes(self, fmt: BlockFormat) -> int:
        total = up(self.stages * self.tokens * INPUTS * 2 + self.staged_bytes, 128)
        return up(total + self.stages * self.warpgroups * fmt.nbytes + self.pipeline_bytes, 1024)


_FEW_TOKENS = (
    (8, WAVE // 2, ANY, W4A16Config(8, 64, split=8, blocks_per_sm=4)),
    (8, WAVE, ANY, W4A16Config(8, 128, split=4, stages=6, blocks_per_sm=2)),
    (8, WAVE * 2, ANY, W4A16Config(8, 128, split=2, stages=6, blocks_per_sm=2)),
    (8, WAVE * 4, ANY, W4A16Config(8, 64, blocks_per_sm=4)),
    (8, ANY, ANY, W4A16Config(8, 128, stages=6, blocks_per_sm=2)),
    (16, WAVE // 2, ANY, W4A16Config(16, 64, split=8, blocks_per_sm=4)),
    (16, WAVE, ANY, W4A16Config(16, 128, split=4, stages=6, blocks_per_sm=2)),
    (16, WAVE * 2, ANY, W4A16Config(16, 128, split=2, stages=6, blocks_per_sm=2)),
    (16, WAVE * 4, ANY, W4A16Config(16, 64, blocks_per_sm=4)),
    (16, ANY, ANY, W4A16Config(16, 128, stages=6, blocks_per_sm=2)),
    (32, WAVE // 2, ANY, W4A16Config(32, 64, split=4, stages=6, blocks_per_sm=2)),
    (32, WAVE, ANY, W4A16Config(32, 64, split=2, stages=6, blocks_per_sm=2)),
    (32, WAVE * 2, ANY, W4A16Config(32, 128, split=2, stages=5, blocks_per_sm=2)),
    (32, ANY, ANY, W4A16Config(32, 128, stages=5, blocks_per_sm=2)),
    (64, WAVE // 2, ANY, W4A16Config(64, 64, split=4, stages=4, blocks_per_sm=2)),
    (64, 6144, ANY, W4A16Config(64, 64, split=2, stages=4, blocks_per_sm=2)),
    (64, WAVE, ANY, W4A16Config(64, 128, split=2, stages=6)),
    (64, ANY, ANY, W4A16Config(64, 128, stages=6)),
    (128, WAVE // 2, ANY, W4A16Config(128, 64, split=4, stages=2, blocks_per_sm=2)),
    (128, WAVE, ANY, W4A16Config(128, 128, split=2, stages=3)),
    (128, WAVE * 2, ANY, W4A16Config(128, 128, stages=4)),
)

_MORE_TOKENS = (
    (256, WAVE // 2, ANY, W4A16Config(128, 128, split=2, stages=3)),
    (256, WAVE * 3, ANY, W4A16Config(128, 128, stages=4)),
    (1024, 6144, ANY, W4A16Config(128, 128, share=2, stages=5)),
)

EXACT = Table(
    (
        *_FEW_TOKENS,
        (128, ANY, ANY, W4A16Config(128, 128, stages=4)),
        *_MORE_TOKENS,
        (256, ANY, ANY, W4A16Config(128, 128, stages=4)),
        (ANY, ANY, ANY, W4A16Config(128, 128, share=2, stages=5)),
    )
)
"""For any weights and activations."""

_ROUNDED_MANY = W4A16Config(256, 128, stages=2, rounded=True)

ROUNDED = Table(
    (
        *_FEW_TOKENS,
        (128, ANY, ANY, W4A16Config(128, 256, stages=3, rounded=True)),
        *_MORE_TOKENS,
        (512, ANY, ANY, replace(_ROUNDED_MANY, rest=W4A16Config(128, 128, stages=4, rounded=True))),
        (ANY, ANY, ANY, replace(_ROUNDED_MANY, share=2)),
    )
)
"""For bfloat16 scales and activations: many tokens take about as long as with weights in bfloat16."""


def table_for(fmt: BlockFormat, dtype: torch.dtype) -> Table[W4A16Config]:
    """The table for activations of ``dtype``."""
    return ROUNDED if fmt.scale == dtype == torch.bfloat16 else EXACT


_FEW_TOKENS_OF_EXPERTS = (
    (8, WAVE // 2, ANY, W4A16Config(8, 64, split=8, blocks_per_sm=4)),
    (8, WAVE, ANY, W4A16Config(8, 64, split=4, blocks_per_sm=4)),
    (8, WAVE * 2, ANY, W4A16Config(8, 64, split=2, blocks_per_sm=4)),
    (8, WAVE * 5, ANY, W4A16Config(8, 64, blocks_per_sm=4)),
    (8, ANY, ANY, W4A16Config(8, 128, stages=6, blocks_per_sm=2)),
    (16, ANY, ANY, W4A16Config(16, 128, stages=6, blocks_per_sm=2)),
    (24, ANY, ANY, W4A16Config(24, 128, stages=6, blocks_per_sm=2)),
    (32, ANY, ANY, W4A16Config(32, 128, stages=5, blocks_per_sm=2)),
    (48, ANY, ANY, W4A16Config(48, 64, stages=4, blocks_per_sm=2)),
    (64, ANY, ANY, W4A16Config(64, 128, stages=6)),
)

EXPERTS_EXACT = for_experts(
    (
        *_FEW_TOKENS_OF_EXPERTS,
        (96, ANY, ANY, W4A16Config(96, 128, stages=4)),
        (128, ANY, ANY, W4A16Config(128, 128, stages=4)),
    )
)
"""For experts: tiles of so many tokens of one, and output features of all tiles together."""

EXPERTS_ROUNDED = for_experts(
    (
        *_FEW_TOKENS_OF_EXPERTS,
        (96, ANY, ANY, W4A16Config(96, 256, stages=3, rounded=True)),
        (128, ANY, ANY, W4A16Config(128, 256, stages=3, rounded=True)),
    )
)
"""The same for bfloat16 scales and activations."""


def experts_table_for(fmt: BlockFormat, dtype: torch.dtype) -> Table[W4A16Config]:
    """The experts' table for activations of ``dtype``."""
    return EXPERTS_ROUNDED if fmt.scale == dtype == torch.bfloat16 else EXPERTS_EXACT
