"""The numbers that a serving kernel makes of codes and scales: what algorithms round onto and measure with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from halfbyte.algorithms.rtn import rtn
from halfbyte.formats.columns import ColumnRounding, Rounding
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.quantize import dequantize, encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.vllm_rounding import VllmRounding
from halfbyte.formats.vllm_scales import GROUP_SIZE, settle, vllm_dequantize


class Target(Protocol):
    """A kind of kernel. Weights are fp32 ``[out, in]``."""

    def rounding(self, grid: Grid, fmt: TensorFormat, shape: tuple[int, ...]) -> Rounding:
        """How a weight is rounded, on the grid that comes closest to ``grid`` and survives loading."""

    def round(self, weight: torch.Tensor, fmt: TensorFormat, grid: Grid) -> QuantizedTensor:
        """The weight rounded to nearest on that grid."""

    def decode(self, q: QuantizedTensor) -> torch.Tensor:
        """The weight that the kernel multiplies, fp32."""

    def nearest(self, weight: torch.Tensor, fmt: TensorFormat) -> torch.Tensor:
        """The weight after rounding to nearest over its whole ranges, as the kernel multiplies it."""


@dataclass(frozen=True)
class ExactScales:
    """Kernels that multiply by scales as they are stored: halfbyte's, and all that dequantize to 16 bit."""

    def rounding(self, grid: Grid, fmt: TensorFormat, shape: tuple[int, ...]) -> Rounding:
        """See :class:`Target`."""
        return ColumnRounding.of(fmt, grid, shape)

    def round(self, weight: torch.Tensor, fmt: TensorFormat, grid: Grid) -> QuantizedTensor:
        """See :class:`Target`."""
        return encode(weight, fmt, grid)

    def decode(self, q: QuantizedTensor) -> torch.Tensor:
        """See :class:`Target`."""
        return dequantize(q)

    def nearest(self, weight: torch.Tensor, fmt: TensorFormat) -> torch.Tensor:
        """See :class:`Target`."""
        return dequantize(rtn(weight, fmt))


@dataclass(frozen=True)
class VllmScales:
    """vLLM's CUTLASS W4A8 kernel: group scales and products rounded to E4M3 (:mod:`halfbyte.formats.vllm_scales`).

    Takes symmetric INT4 in groups of 128 with bf16 scales.
    """

    def rounding(self, grid: Grid, fmt: TensorFormat, shape: tuple[int, ...]) -> Rounding:
        """See :class:`Target`."""
        return VllmRounding.of(settle(grid.scales))

    def round(self, weight: torch.Tensor, fmt: TensorFormat, grid: Grid) -> QuantizedTensor:
        """See :class:`Target`."""
        rounding = self.rounding(grid, fmt, tuple(weight.shape))
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        # A table of numbers for each weight of a group is many times its size, so a group at a time.
        for start in range(0, weight.shape[-1], GROUP_SIZE):
            columns = slice(start, start + GROUP_SIZE)
            codes[..., columns] = rounding.at(columns).round(weight[..., columns])[0]
        return QuantizedTensor(fmt, codes, rounding.grid.scales)

    def decode(self, q: QuantizedTensor) -> torch.Tensor:
        """See :class:`Target`."""
        return vllm_dequantize(q)

    def nearest(self, weight: torch.Tensor, fmt: TensorFormat) -> torch.Tensor:
        """See :class:`Target`."""
        return self.decode(self.round(weight, fmt, choose_grid(Ranges.of(weight, fmt), fmt)))
