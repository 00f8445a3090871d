"""Rounding a weight to the nearest number that vLLM's W4A8 kernel can make of a code, column by column."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.formats.floats import encode_float8
from halfbyte.formats.grid import Grid
from halfbyte.formats.vllm_scales import GROUP_SIZE, VLLM_W4A8, split_scales


@dataclass(frozen=True)
class VllmRounding:
    """The 16 numbers ``e4m3(code * group) * channel`` of each group, a :class:`halfbyte.formats.columns.Rounding`.

    numbers: fp32 ``[..., out, groups, 16]``, ascending with the codes. bounds: fp32 ``[..., out, groups, 15]``; a value
    above a bound belongs to the next code. group_of: int64 ``[in]``, a column's group.
    """

    grid: Grid
    numbers: torch.Tensor
    bounds: torch.Tensor
    group_of: torch.Tensor

    @classmethod
    def of(cls, scales: torch.Tensor) -> VllmRounding:
        """For scales as they are stored, bfloat16 ``[..., out, groups]``, of symmetric INT4 groups of 128."""
        groups, channels = split_scales(scales)
        codes = torch.arange(VLLM_W4A8.qmin, VLLM_W4A8.qmax + 1, device=scales.device)
        elements = encode_float8(codes.float() * groups.float().unsqueeze(-1), "e4m3").float()
        channels = channels.unsqueeze(-1).unsqueeze(-1)
        # Halved before they are scaled, where E4M3 makes that exact.
        middles = (elements[..., :-1] + elements[..., 1:]) / 2 * channels
        # Ties go to the even code: where that is the upper one, the middle itself must be above the bound.
        below = torch.nextafter(middles, torch.full_like(middles, -torch.inf))
        bounds = torch.where(codes[1:] % 2 == 0, below, middles)
        columns = torch.arange(scales.shape[-1], device=scales.device)
        return cls(Grid(scales), elements * channels, bounds, columns.repeat_interleave(GROUP_SIZE))

    def at(self, columns: torch.Tensor | slice) -> VllmColumns:
        """See :class:`halfbyte.formats.columns.Rounding`."""
        groups = self.group_of[columns]
        return VllmColumns(_take_groups(self.numbers, groups), _take_groups(self.bounds, groups))

    def round(self, values: torch.Tensor, columns: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 codes of values (fp32 ``[..., out, n]``) that stand in the given columns, and their numbers, fp32."""
        return self.at(columns).round(values)


@dataclass(frozen=True)
class VllmColumns:
    """Numbers ``[..., out, n, 16]`` and bounds ``[..., out, n, 15]`` of n columns."""

    numbers: torch.Tensor
    bounds: torch.Tensor

    def round(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`halfbyte.formats.columns.Columns`."""
        places = (values.unsqueeze(-1) > self.bounds).sum(-1)
        decoded = self.numbers.gather(-1, places.unsqueeze(-1)).squeeze(-1)
        return (places + VLLM_W4A8.qmin).to(torch.int8), decoded

    def each(self) -> list[VllmColumns]:
        """See :class:`halfbyte.formats.columns.Columns`."""
        parts = zip(self.numbers.split(1, -2), self.bounds.split(1, -2), strict=True)
        return [VllmColumns(numbers, bounds) for numbers, bounds in parts]


def _take_groups(table: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Lines of a table ``[..., out, groups, k]`` as ``[..., out, n, k]``: int64 ``[n]``, or ``[..., n]`` per member."""
    if groups.ndim == 1:
        return table.index_select(-2, groups)
    return torch.take_along_dim(table, groups.unsqueeze(-2).unsqueeze(-1), -2)
