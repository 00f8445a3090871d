"""Configurations of the kernel for FP8 weights."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat
from halfbyte.kernels.hopper.config import ANY, WAVE, Table, TileConfig, for_experts, up


@dataclass(frozen=True)
class W8A8Config(TileConfig):
    """See :class:`TileConfig`."""

    def takes(self, fmt: BlockFormat) -> bool:
        return self.stage_blocks == self.parts == 1 and (self.tokens <= 128 or self.split == 1)

    def shared_bytes(self, fmt: BlockFormat) -> int:
        total = up(self.stages * self.tokens * INPUTS, 1024)
        total = up(total + self.stages * self.warpgroups * fmt.nbytes, 1024) + self.staged_bytes
        return up(total + self.warpgroups * self.tokens * 4 + self.pipeline_bytes + 8, 1024)


_TILE = W8A8Config

TABLE = Table(
    (
        (8, WAVE // 2, ANY, _TILE(8, 64, split=8, stages=6, blocks_per_sm=4)),
        (8, WAVE, ANY, _TILE(8, 64, split=4, stages=6, blocks_per_sm=4)),
        (8, WAVE * 2, ANY, _TILE(8, 64, split=2, stages=6, blocks_per_sm=4)),
        (8, ANY, ANY, _TILE(8, 128, stages=6, blocks_per_sm=2)),
        (16, ANY, ANY, _TILE(16, 128, stages=6, blocks_per_sm=2)),
        (24, ANY, ANY, _TILE(24, 128, stages=5, blocks_per_sm=2)),
        (32, ANY, ANY, _TILE(32, 128, stages=5, blocks_per_sm=2)),
        (48, ANY, ANY, _TILE(48, 128, stages=4, blocks_per_sm=2)),
        (64, ANY, ANY, _TILE(64, 128, stages=4, blocks_per_sm=2)),
        (96, ANY, ANY, _TILE(96, 256, stages=4)),
        (ANY, ANY, ANY, _TILE(128, 256, stages=4)),
    )
)
"""For a layer's tokens. Taken over from the kernels for INT4; not measured yet."""

EXPERTS = for_experts(TABLE.rows)
"""The same for experts."""
