# ruff: noqa: N803
"""Rounding columns one after the other, each one's error passed on to those behind it: a GPTQ block in one launch.

``torch.ops.halfbyte``: ``round_integers_with_feedback`` and ``round_to_numbers_with_feedback``. Column by column in
torch, this is a dozen launches for each input of a layer, and they take ten times what the arithmetic does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.errors import HalfbyteError
from halfbyte.formats.qoq import PROTECTED_RANGE
from halfbyte.kernels.triton.row_math import TO_INTEGER
from halfbyte.kernels.triton.rows import described, on_device

_PROTECTED = tl.constexpr(float(PROTECTED_RANGE))
# A program is one warp, which waits for no other, and has a row's 128 columns in four values of each thread.
_ROWS = 4


@triton.jit
def _nearest(value: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The nearest integer, ties to even, between two integers."""
    return tl.minimum(tl.maximum(value, low), high) + TO_INTEGER - TO_INTEGER


@triton.jit
def feedback_kernel(
    values: tl.tensor,
    left: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    outer: tl.tensor,
    numbers: tl.tensor,
    bounds: tl.tensor,
    shares: tl.tensor,
    codes: tl.tensor,
    errors: tl.tensor,
    rows: tl.tensor,
    share_member: tl.tensor,
    smallest: tl.tensor,
    largest: tl.tensor,
    TWO_LEVELS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Some rows of one member, onto integers times scales, or onto the numbers of each element if there are any.

    Of the shares, those above the diagonal count. A value above a bound is the next number's.
    """
    member = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    there = row < rows
    first = (member * rows + row) * COLUMNS
    inside = there[:, None] & (column < COLUMNS)[None, :]
    elements = first[:, None] + column[None, :]
    waiting = tl.load(values + elements, mask=inside, other=0.0)
    chosen = tl.zeros([ROWS, PADDED], tl.float32)
    shares += member * share_member
    choice = tl.arange(0, NUMBERS)
    channel = tl.full([ROWS], 1.0, tl.float32)
    if outer is not None:
        channel = tl.load(outer + member * rows + row, mask=there, other=1.0)
    for step in range(COLUMNS):
        here = (column == step)[None, :]
        value = tl.sum(tl.where(here, waiting, 0.0), axis=1)
        if numbers is not None:
            bound = tl.load(
                bounds + (first + step)[:, None] * (NUMBERS - 1) + choice[None, :],
                mask=there[:, None] & (choice < NUMBERS - 1)[None, :],
                other=float("inf"),
            )
            place = tl.sum((value[:, None] > bound).to(tl.int32), axis=1)
            decoded = tl.load(numbers + (first + step) * NUMBERS + place, mask=there, other=0.0)
            code = place.to(tl.float32) + smallest
        else:
            scale = tl.load(scales + first + step, mask=there, other=1.0)
            divisor = scale
            if outer is not None:
                if TWO_LEVELS:
                    value = _nearest(tl.math.div_rn(value, channel), -_PROTECTED, _PROTECTED)
                else:
                    divisor = scale * channel
            zero_point = tl.zeros([ROWS], tl.float32)
            if zero_points is not None:
                zero_point = tl.load(zero_points + first + step, mask=there, other=0.0)
            steps = _nearest(tl.math.div_rn(value, divisor), smallest - zero_point, largest - zero_point)
            decoded = steps * scale
            if outer is not None:
                decoded = decoded * channel
            code = steps + zero_point
        error = tl.load(left + first + step, mask=there, other=0.0) - decoded
        chosen = tl.where(here, code[:, None], chosen)
        behind = (column > step) & (column < COLUMNS)
        share = tl.load(shares + step * COLUMNS + column, mask=behind, other=0.0)
        # What has been rounded waits no longer: its error is kept in its place.
        waiting = tl.where(here, error[:, None], waiting + error[:, None] * share[None, :])
    tl.store(codes + elements, chosen.to(tl.int8), mask=inside)
    tl.store(errors + elements, waiting, mask=inside)


@torch.library.custom_op("halfbyte::round_integers_with_feedback", mutates_args=())
def round_integers_with_feedback(
    values: torch.Tensor,
    left: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    outer: torch.Tensor | None,
    shares: torch.Tensor,
    smallest: int,
    largest: int,
    two_levels: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and errors (fp32) ``[members, out, n]`` of n columns, with everything else fp32.

    values: what is rounded, with the errors of all columns before these. left: the weights themselves, which errors are
    counted from. scales, zero points: ``[1 or members, 1 or out, n]``; outer: ``[1 or members, 1 or out, 1]``.
    shares: ``[1 or members, n, n]``, above the diagonal what column j passes on of its error to column k.
    two_levels: values are rounded to multiples of ``outer`` first, as QoQ's are.
    """
    members, rows, columns = _checked("round_integers_with_feedback", values, left, shares)

    def spread(part: torch.Tensor | None, width: int) -> torch.Tensor | None:
        return None if part is None else part.expand(members, rows, width).contiguous()

    grid = (spread(scales, columns), spread(zero_points, columns), spread(outer, 1), None, None)
    return _launch(values, left, grid, shares, smallest, largest, two_levels)


@torch.library.custom_op("halfbyte::round_to_numbers_with_feedback", mutates_args=())
def round_to_numbers_with_feedback(
    values: torch.Tensor,
    left: torch.Tensor,
    numbers: torch.Tensor,
    bounds: torch.Tensor,
    shares: torch.Tensor,
    smallest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for elements that have a list of numbers each: code ``smallest`` stands for the first one.

    numbers: ``[members, out, n, c]``, ascending, c a power of two; bounds: ``[members, out, n, c - 1]``, a value above
    bound i is at least number i + 1.
    """
    members, rows, columns = _checked("round_to_numbers_with_feedback", values, left, shares)
    count = numbers.shape[-1]
    tables = [
        part.expand(members, rows, columns, width).contiguous()
        for part, width in ((numbers, count), (bounds, count - 1))
    ]
    return _launch(values, left, (None, None, None, *tables), shares, smallest, smallest + count - 1, False)


@round_integers_with_feedback.register_fake
@round_to_numbers_with_feedback.register_fake
def _outputs(values: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values, dtype=torch.int8), torch.empty_like(values)


def _launch(
    values: torch.Tensor,
    left: torch.Tensor,
    grid: tuple[torch.Tensor | None, ...],
    shares: torch.Tensor,
    smallest: int,
    largest: int,
    two_levels: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """grid: scales, zero points, outer scales, numbers and their bounds, each spread over all it is for."""
    members, rows, columns = values.shape
    codes, errors = _outputs(values)
    if values.numel():
        with on_device(values):
            feedback_kernel[(triton.cdiv(rows, _ROWS), members)](
                values,
                left,
                *grid,
                shares,
                codes,
                errors,
                rows,
                0 if len(shares) == 1 else shares.stride(0),
                float(smallest),
                float(largest),
                TWO_LEVELS=two_levels,
                NUMBERS=grid[3].shape[-1] if grid[3] is not None else 1,
                ROWS=_ROWS,
                COLUMNS=columns,
                PADDED=triton.next_power_of_2(columns),
                num_warps=1,
            )
    return codes, errors


def _checked(op: str, values: torch.Tensor, left: torch.Tensor, shares: torch.Tensor) -> tuple[int, int, int]:
    """Members, rows and columns. Errors: what the kernels do not take."""
    if not values.is_cuda and not triton.knobs.runtime.interpret:
        raise HalfbyteError(f"{op} runs on a CUDA device, not on {values.device.type}")
    members, rows, columns = values.shape
    fits = values.shape == left.shape and shares.shape in ((1, columns, columns), (members, columns, columns))
    plain = all(part.dtype == torch.float32 and part.is_contiguous() for part in (values, left, shares))
    if not (fits and plain):
        raise HalfbyteError(
            f"{op} takes contiguous float32 values and weights [members, out, n] and shares [1 or members, n, n], "
            f"not {described(values)}, {described(left)} and {described(shares)}"
        )
    return members, rows, columns
