"""Configurations of the W4A8 kernel with FP8 group scales."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.config import ANY, WAVE, Table, WholeSumsConfig, for_experts

_TABLES_BYTES = 256 * 16


@dataclass(frozen=True)
class W4A8Fp8ScalesConfig(WholeSumsConfig):
    """See :class:`TileConfig`."""

    def takes(self, fmt: BlockFormat) -> bool:
        return super().takes(fmt) and (self.tokens <= 128 or self.split == 1)

    @property
    def kept_bytes(self) -> int:
        return _TABLES_BYTES + self.warpgroups * self.tokens * 4


TABLE = Table(
    (
        (8, WAVE // 2, ANY, W4A8Fp8ScalesConfig(8, 64, split=8, blocks_per_sm=4)),
        (8, WAVE, ANY, W4A8Fp8ScalesConfig(8, 64, split=4, blocks_per_sm=4)),
        (8, WAVE * 2, ANY, W4A8Fp8ScalesConfig(8, 128, split=2, blocks_per_sm=2)),
        (8, WAVE * 6, ANY, W4A8Fp8ScalesConfig(8, 128, blocks_per_sm=2)),
        (8, ANY, ANY, W4A8Fp8ScalesConfig(8, 256, rest=W4A8Fp8ScalesConfig(8, 192))),
        (16, WAVE // 2, ANY, W4A8Fp8ScalesConfig(16, 64, split=8, stages=6, blocks_per_sm=4)),
        (16, WAVE, ANY, W4A8Fp8ScalesConfig(16, 128, split=4, stages=6, blocks_per_sm=2)),
        (16, WAVE * 2, ANY, W4A8Fp8ScalesConfig(16, 128, split=2, blocks_per_sm=2)),
        (16, WAVE * 6, ANY, W4A8Fp8ScalesConfig(16, 128, blocks_per_sm=2)),
        (16, ANY, ANY, W4A8Fp8ScalesConfig(16, 256, rest=W4A8Fp8ScalesConfig(16, 192))),
        (32, WAVE // 2, ANY, W4A8Fp8ScalesConfig(32, 64, split=4, blocks_per_sm=2)),
        (32, WAVE, ANY, W4A8Fp8ScalesConfig(32, 64, split=2, blocks_per_sm=2)),
        (32, WAVE * 2, ANY, W4A8Fp8ScalesConfig(32, 128, split=2, blocks_per_sm=2)),
        (32, ANY, ANY, W4A8Fp8ScalesConfig(32, 128, blocks_per_sm=2)),
        (64, WAVE // 2, ANY, W4A8Fp8ScalesConfig(64, 64, split=4, stages=4, blocks_per_sm=2)),
        (64, WAVE, ANY, W4A8Fp8ScalesConfig(64, 64, split=2, blocks_per_sm=2)),
        (64, WAVE * 2, ANY, W4A8Fp8ScalesConfig(64, 128)),
        (64, ANY, ANY, W4A8Fp8ScalesConfig(64, 256, stages=6, rest=W4A8Fp8ScalesConfig(64, 192))),
        (128, WAVE // 2, ANY, W4A8Fp8ScalesConfig(128, 64, split=4, blocks_per_sm=2)),
        (128, WAVE, ANY, W4A8Fp8ScalesConfig(128, 128, split=2)),
        (128, WAVE * 2, ANY, W4A8Fp8ScalesConfig(128, 128)),
        (
            128,
            ANY,
            ANY,
            W4A8Fp8ScalesConfig(128, 256, stages=4, rest=W4A8Fp8ScalesConfig(128, 192, stages=6)),
        ),
        (256, WAVE // 2, 8192, W4A8Fp8ScalesConfig(128, 64, split=2, blocks_per_sm=2)),
        (256, WAVE // 2, ANY, W4A8Fp8ScalesConfig(128, 128, split=2, stages=6)),
        (256, WAVE, ANY, W4A8Fp8ScalesConfig(256, 64, stages=4)),
        (256, WAVE * 3 // 2, ANY, W4A8Fp8ScalesConfig(128, 192, stages=6)),
        (256, ANY, ANY, W4A8Fp8ScalesConfig(256, 128, stages=4, rest=W4A8Fp8ScalesConfig(128, 128))),
        (512, WAVE // 2, ANY, W4A8Fp8ScalesConfig(256, 64, stages=4)),
        (512, WAVE * 3 // 4, ANY, W4A8Fp8ScalesConfig(128, 192, stages=6)),
        (512, WAVE, ANY, W4A8Fp8ScalesConfig(256, 128, stages=4)),
        (512, ANY, ANY, W4A8Fp8ScalesConfig(256, 128, stages=4, share=2, rest=W4A8Fp8ScalesConfig(128, 128))),
        (ANY, ANY, ANY, W4A8Fp8ScalesConfig(256, 128, stages=4, share=2)),
    )
)

_TILE = W4A8Fp8ScalesConfig

EXPERTS = for_experts(
    (
        (8, WAVE // 2, ANY, _TILE(8, 64, split=8, blocks_per_sm=4)),
        (8, WAVE, ANY, _TILE(8, 64, split=4, blocks_per_sm=4)),
        (8, WAVE * 2, ANY, _TILE(8, 64, split=2, blocks_per_sm=4)),
        (8, WAVE * 5, 8192, _TILE(8, 64, blocks_per_sm=4)),
        (8, WAVE * 5, ANY, _TILE(8, 128, split=2, blocks_per_sm=2)),
        (8, ANY, ANY, _TILE(8, 128, blocks_per_sm=2)),
        (16, ANY, ANY, _TILE(16, 128, blocks_per_sm=2)),
        (24, ANY, ANY, _TILE(24, 128, blocks_per_sm=2)),
        (32, ANY, ANY, _TILE(32, 128, blocks_per_sm=2)),
        (48, ANY, ANY, _TILE(48, 128, blocks_per_sm=2)),
        (64, ANY, ANY, _TILE(64, 256, stages=6)),
        (96, ANY, ANY, _TILE(96, 256, stages=4)),
        (128, ANY, ANY, _TILE(128, 256, stages=4)),
    )
)
"""For experts: tiles of so many tokens of one, and output features of all tiles together."""
