"""Scales of producers' channels and of consumers' columns, where query heads share the channels of a value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class SharedColumns:
    """Columns ``[channels / width, repeats, width]`` of a consumer that read ``[channels / width, width]``."""

    width: int
    repeats: int

    def to_columns(self, channels: torch.Tensor) -> torch.Tensor:
        """Values per channel ``[channels]`` as values per column ``[channels * repeats]``."""
        return channels.view(-1, 1, self.width).expand(-1, self.repeats, -1).reshape(-1)

    def mean(self, columns: torch.Tensor) -> torch.Tensor:
        """Mean over the columns ``[channels * repeats]`` that share a channel, ``[channels]``."""
        return self._grouped(columns).mean(1).reshape(-1)

    def largest(self, columns: torch.Tensor) -> torch.Tensor:
        """Maximum over the columns ``[channels * repeats]`` that share a channel, ``[channels]``."""
        return self._grouped(columns).amax(1).reshape(-1)

    def _grouped(self, columns: torch.Tensor) -> torch.Tensor:
        if columns.numel() % (self.width * self.repeats):
            raise HalfbyteError(
                f"{columns.numel()} columns cannot be shared in runs of {self.width}, each {self.repeats} times"
            )
        return columns.view(-1, self.repeats, self.width)


def unshared(channels: int) -> SharedColumns:
    """One column for each of ``channels`` channels."""
    return SharedColumns(channels, 1)
