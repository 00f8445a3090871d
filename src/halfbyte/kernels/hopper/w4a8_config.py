"""Configurations of the W4A8 kernel, chosen from measurements on one H200.

``halfbyte bench tune`` measures the candidates again and shows the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat
from halfbyte.kernels.hopper.config import ANY, Table, TileConfig, up

_BATCH = 16  # groups whose offsets are multiplied at once


@dataclass(frozen=True)
class W4A8Config(TileConfig):
    """See :class:`TileConfig`."""

    @property
    def many(self) -> bool:
        """Whether offsets are a matrix product; four warpgroups have no registers left for it."""
        return self.tokens >= 64 and self.rows < 256

    @property
    def ahead(self) -> bool:
        """Whether the next stage's codes have registers of their own."""
        return self.many and self.rows <= 128 and self.tokens <= 128

    def columns(self, fmt: BlockFormat) -> int:
        """Tokens that are multiplied at a time."""
        if self.tokens > 128 or (self.tokens == 128 and fmt.groups > 1):
            return 64
        return self.tokens

    def takes(self, fmt: BlockFormat) -> bool:
        return not self.many or _BATCH // fmt.groups % self.stages == 0

    def shared_bytes(self, fmt: BlockFormat) -> int:
        total = self.stages * self.tokens * INPUTS
        total = up(total, 128) + self.stages * self.warpgroups * fmt.nbytes
        total = up(total, 128) + 4 * (self.tokens * _BATCH * 2 if self.many else 16)
        kept = (self.stages + _BATCH // fmt.groups) * fmt.kept_bytes if self.many else 16
        total = up(total, 16) + self.warpgroups * kept
        total = up(total, 16) + (1 if self.many else self.stages) * fmt.groups * self.tokens * 4
        return up(self._with_output(total) + self.tokens * 4 + 32, 1024)


TABLE = Table(
    (
        (8, 6144, ANY, W4A8Config(8, 64, split=8, blocks_per_sm=4)),
        (8, 12288, ANY, W4A8Config(8, 128, split=4, stages=6, blocks_per_sm=2)),
        (8, 32768, ANY, W4A8Config(8, 64, blocks_per_sm=4)),
        (8, ANY, ANY, W4A8Config(8, 128, stages=6, blocks_per_sm=2)),
        (16, 6144, ANY, W4A8Config(16, 64, split=8, blocks_per_sm=4)),
        (16, 12288, ANY, W4A8Config(16, 128, split=4, stages=6, blocks_per_sm=2)),
        (16, 32768, ANY, W4A8Config(16, 64, blocks_per_sm=4)),
        (16, ANY, ANY, W4A8Config(16, 128, stages=6, blocks_per_sm=2)),
        (32, 6144, 8192, W4A8Config(32, 128, split=4, stages=6, blocks_per_sm=2)),
        (32, 6144, ANY, W4A8Config(32, 128, split=8, stages=6, blocks_per_sm=2)),
        (32, 12288, ANY, W4A8Config(32, 128, split=2, stages=14)),
        (32, ANY, ANY, W4A8Config(32, 128, stages=6, blocks_per_sm=2)),
        (64, 12288, ANY, W4A8Config(64, 128, split=2)),
        (64, ANY, ANY, W4A8Config(64, 256, stages=6)),
        (128, 6144, ANY, W4A8Config(64, 128, split=2, stages=4)),
        (128, 12288, ANY, W4A8Config(128, 128, split=2, stages=4)),
        (256, 6144, ANY, W4A8Config(128, 128, split=2, stages=4)),
        (ANY, ANY, ANY, W4A8Config(128, 128, stages=4)),
    )
)
