"""From weights that read one input to quantized ones: ranges, then codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.algorithms.clip import clip_mse_grid, clip_output_grid
from halfbyte.algorithms.gptq import gptq
from halfbyte.algorithms.qoq import qoq_grid
from halfbyte.algorithms.targets import Target
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method

# Elements of the weights that are rounded as one: GPTQ keeps their errors in float64.
_TOGETHER = 1 << 28


@dataclass(frozen=True)
class Rounded:
    """narrowed: share of ranges that are narrower than the weights', none without clipping. See :class:`GptqResult`."""

    quantized: QuantizedTensor
    narrowed: float | None
    damping: float | None = None
    fallback: str | None = None


def round_weights(
    weights: Sequence[torch.Tensor],
    fmt: TensorFormat,
    method: Method,
    moment: torch.Tensor | None,
    elsewhere: Sequence[float],
    target: Target,
) -> list[Rounded]:
    """Weights ``[out_i, in]``, fp32, of layers that read the same input, in ``fmt`` by ``method`` for ``target``.

    moment: mean of x x^T of that input, fp32 ``[in, in]``; none if ``method`` needs no data. elsewhere: for each
    weight the largest magnitude of others that share its outer scale per tensor.
    Rows that do not know of each other are rounded together, which gives the same and takes one decomposition.
    """
    by_rows = fmt.granularity in ("group", "channel") and fmt.outer != "tensor"
    if not by_rows:
        return [
            _round(weight, fmt, method, moment, absmax, target)
            for weight, absmax in zip(weights, elsewhere, strict=True)
        ]
    rounded: list[Rounded] = []
    for some in _batches(weights):
        whole = _round(torch.cat(some), fmt, method, moment, 0.0, target)
        start = 0
        for weight in some:
            rows = slice(start, start + len(weight))
            rounded.append(replace(whole, quantized=_rows(whole.quantized, rows)))
            start = rows.stop
    return rounded


def _batches(weights: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    batches: list[list[torch.Tensor]] = []
    for weight in weights:
        if batches and sum(w.numel() for w in batches[-1]) + weight.numel() <= _TOGETHER:
            batches[-1].append(weight)
        else:
            batches.append([weight])
    return batches


def _round(
    weight: torch.Tensor,
    fmt: TensorFormat,
    method: Method,
    moment: torch.Tensor | None,
    elsewhere: float,
    target: Target,
) -> Rounded:
    whole = choose_grid(Ranges.of(weight, fmt, elsewhere), fmt)
    grid, narrowed = whole, None
    if method.clip != "none":
        grid = clipped_grid(weight, fmt, method.clip, moment, elsewhere)
        narrowed = float((grid.scales.float() < whole.scales.float()).float().mean())
    if method.rounding != "gptq":
        return Rounded(target.round(weight, fmt, grid), narrowed)
    assert moment is not None
    result = gptq(weight, fmt, moment, rounding=target.rounding(grid, fmt, tuple(weight.shape)))
    return Rounded(result.quantized, narrowed, result.damping[0], result.fallback[0])


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


def _rows(q: QuantizedTensor, rows: slice) -> QuantizedTensor:
    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows]

    return QuantizedTensor(q.format, q.codes[rows], q.scales[rows], part(q.zero_points), part(q.outer_scales))
