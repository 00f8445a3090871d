"""From a stack of weights to quantized ones: ranges, then codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.algorithms.clip import clip_mse_grid, clip_output_grid
from halfbyte.algorithms.gptq import gptq
from halfbyte.algorithms.qoq import qoq_grid
from halfbyte.algorithms.targets import Target
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method


@dataclass(frozen=True)
class Rounded:
    """quantized: codes ``[members, out, in]``. By member: narrowed, the share of ranges that are narrower than the
    weights', none without clipping; damping and fallback, see :class:`GptqResult`."""

    quantized: QuantizedTensor
    narrowed: tuple[float | None, ...]
    damping: tuple[float | None, ...]
    fallback: tuple[str | None, ...]


def round_stack(
    weight: torch.Tensor,
    fmt: TensorFormat,
    method: Method,
    moment: torch.Tensor | None,
    target: Target,
    *,
    elsewhere: float = 0.0,
) -> Rounded:
    """Weights ``[members, out, in]``, fp32, in ``fmt`` by ``method`` for ``target``; members as each would be alone.

    moment: mean of x x^T of the members' inputs, fp32 ``[members, in, in]``; none if ``method`` needs no data.
    elsewhere: largest magnitude of other weights that share the outer scale per tensor.
    """
    nothing = (None,) * len(weight)
    whole = choose_grid(Ranges.of(weight, fmt, elsewhere), fmt)
    grid, narrowed = whole, nothing
    if method.clip != "none":
        grid = clipped_grid(weight, fmt, method.clip, moment, elsewhere)
        narrower = grid.scales.float() < whole.scales.float()
        narrowed = tuple(narrower.flatten(1).float().mean(1).tolist())
    if method.rounding != "gptq":
        return Rounded(target.round(weight, fmt, grid), narrowed, nothing, nothing)
    assert moment is not None
    result = gptq(weight, fmt, moment, rounding=target.rounding(grid, fmt, tuple(weight.shape)))
    return Rounded(result.quantized, narrowed, result.damping, result.fallback)


def clipped_grid(
    weight: torch.Tensor, fmt: TensorFormat, clip: str, moment: torch.Tensor | None, elsewhere: float
) -> Grid:
    """The grid of least error, of the weight (``mse``) or of the layer's outputs (``output``, with ``moment``)."""
    measured = moment if clip == "output" else None
    assert clip != "output" or moment is not None
    if fmt.scale == "int8":
        return qoq_grid(weight, fmt, measured)
    if measured is None:
        return clip_mse_grid(weight, fmt, elsewhere=elsewhere)
    return clip_output_grid(weight, fmt, measured, elsewhere=elsewhere)
