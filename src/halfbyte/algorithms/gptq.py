"""GPTQ: inputs are rounded one after the other, and those left make good for the errors so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halfbyte.algorithms.column_feedback import round_with_feedback
from halfbyte.algorithms.feedback import Feedback
from halfbyte.errors import HalfbyteError
from halfbyte.formats.columns import ColumnRounding, Rounding, put_columns_, take_columns
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.ranges import as_float
from halfbyte.formats.rounding import code_dtype
from halfbyte.formats.spec import TensorFormat

# Columns whose errors are in float64 at a time.
_TOGETHER = 2048


@dataclass(frozen=True)
class GptqResult:
    """quantized: codes in the weight's own order of columns.

    damping: used for each member of the weight's leading axes (row-major; one for a plain weight), as a share of the
    mean of the moment's diagonal; none where a member fell back to rounding to nearest on the same grid.
    fallback: why each one did, none for those that did not.
    """

    quantized: QuantizedTensor
    damping: tuple[float | None, ...]
    fallback: tuple[str | None, ...]


def gptq(
    weight: torch.Tensor,
    fmt: TensorFormat,
    moment: torch.Tensor,
    *,
    grid: Grid | None = None,
    rounding: Rounding | None = None,
    damping: float = 0.01,
    block: int = 128,
    elsewhere: float = 0.0,
) -> GptqResult:
    """A finite weight ``[..., out, in]`` in ``fmt`` with a small error of the layer's output.

    Source: Frantar et al., "GPTQ", 2023, algorithm 1, with inputs in descending order of their second moment and all
    scales fixed beforehand (so that the order never shows). It is computed in the form of LDLQ (Chee et al., "QuIP",
    2023, theorem 6: the same result), which needs no inverse: input k's weight is rounded after adding the errors of
    those before it, each times its share in :class:`Feedback`. Inputs that were always zero are rounded to nearest.

    moment: mean (or any multiple) of x x^T, fp32 ``[..., in, in]``, or ``[in, in]`` for all members of a stack.
    grid: what to round onto; that of :func:`halfbyte.formats.quantize.quantize` if none.
    rounding: rounds in another way than to nearest on a grid, and holds the grid that is stored; excludes ``grid``.
    damping: added to the diagonal, as a share of its mean; raised tenfold up to 1 where Cholesky's factors cannot be
        had. After that, or if the moment is zero or not finite, a member falls back to rounding to nearest.
    block: columns between two updates of all others; no influence on the result but for the last bits of sums.
    elsewhere: largest magnitude of other weights that share the outer scale per tensor.
    Rows do not know of each other: layers that read the same inputs can be quantized as one. Stacks equal their
    members. Errors: those of ``quantize``, a moment of another shape, negative damping, a block below 1.
    """
    weight = as_float(weight)
    *lead, _, size = weight.shape
    if list(moment.shape) not in ([size, size], [*lead, size, size]):
        raise HalfbyteError(
            f"a moment {list(moment.shape)} does not fit a weight {list(weight.shape)}; "
            f"accepted: {[size, size]} or {[*lead, size, size]}"
        )
    if block < 1:
        raise HalfbyteError(f"blocks of {block} columns cannot be used; accepted: 1 and more")
    if rounding is None:
        grid = choose_grid(Ranges.of(weight, fmt, elsewhere), fmt) if grid is None else grid
        rounding = ColumnRounding.of(fmt, grid, weight.shape)
    elif grid is not None:
        raise HalfbyteError("a rounding holds its own grid; accepted: a grid or a rounding, not both")
    feedback = Feedback.of(moment, damping)
    codes = _round_in_order(weight, fmt, rounding, feedback, block)
    stored = rounding.grid
    shared = math.prod(lead) // len(feedback.damping)
    return GptqResult(
        QuantizedTensor(fmt, codes, stored.scales, stored.zero_points, stored.outer_scales),
        feedback.damping * shared,
        feedback.fallback * shared,
    )


def _round_in_order(
    weight: torch.Tensor, fmt: TensorFormat, rounding: Rounding, feedback: Feedback, block: int
) -> torch.Tensor:
    """Codes ``[..., out, in]``, in the weight's own order."""
    errors = torch.empty_like(weight, dtype=torch.float32)
    codes = torch.empty_like(weight, dtype=code_dtype(fmt))
    for start in range(0, weight.shape[-1], block):
        stop = min(start + block, weight.shape[-1])
        inputs = feedback.order[..., start:stop]
        left = take_columns(weight, inputs).float()
        values = left + _taken_over(errors[..., :start], feedback.factors[..., :start, start:stop]).float()
        shares = feedback.factors[..., start:stop, start:stop]
        found, errors[..., start:stop] = round_with_feedback(rounding.at(inputs), values, left, shares)
        put_columns_(codes.view(torch.uint8), inputs, found.view(torch.uint8))
    return codes


def _taken_over(errors: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The product of errors ``[..., out, k]`` and factors ``[..., k, n]``, both fp32, as float64.

    A product's order of sums depends on the number of rows, which must not show.
    """
    total = factors.new_zeros(*errors.shape[:-1], factors.shape[-1], dtype=torch.float64)
    parts = zip(errors.split(_TOGETHER, -1), factors.split(_TOGETHER, -2), strict=True)
    for some, theirs in parts:
        total += some.double() @ theirs.double()
    return total
