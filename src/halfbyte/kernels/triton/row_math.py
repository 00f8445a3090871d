# ruff: noqa: N803, N806, SIM300
"""What the kernels share that quantize a row of inputs: its scale, its codes, the sums of its groups.

A row, or a part of it, is a tile ``[group size / 8, groups, 8]`` of fp32 values, with zeros where it has ended.
The numbers are those of :mod:`halfbyte.formats.activations`, bit for bit; only the division costs thought.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter, in which tests run these functions on the CPU, knows no assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_LIFT = tl.constexpr(2.0**64)
# Added to a small fp32 number, it leaves the nearest integer, ties to even, in the lowest bits.
TO_INTEGER = tl.constexpr(1.5 * 2**23)


@triton.jit
def tile_columns(GROUPS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Where in the row the values of its first tile lie.

    With eights as the last axis, a thread loads and stores the same values; with the eights of a group as the first,
    those are in neighbouring threads.
    """
    eights = tl.arange(0, GROUP // 8)[:, None, None]
    groups = tl.arange(0, GROUPS)[None, :, None]
    return groups * GROUP + eights * 8 + tl.arange(0, 8)[None, None, :]


@triton.jit
def part_of_row(TILE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # a tuple of Triton's
    """A program's row and columns, cut as ``rows.cut_rows`` says, once the kernel in front has ended."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    return tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)


@triton.jit
def widened(values: tl.tensor) -> tl.tensor:
    """``values`` of any float dtype as fp32."""
    if values.dtype == tl.bfloat16 and ASSEMBLY:
        # BF16 is the upper half of fp32. Said so, two values take two instructions, where a cast takes three.
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return values.to(tl.float32)


@triton.jit
def rounded(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 ``values`` rounded to ``DTYPE``, as fp32."""
    if DTYPE == tl.bfloat16 and ASSEMBLY:
        # One conversion, straight to the upper half, where a cast and one back take two.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    return values.to(DTYPE).to(tl.float32)


@triton.jit
def magnitude_bits(values: tl.tensor) -> tl.tensor:
    """Magnitudes as int32, in the order of the numbers: Inf comes after all of them and NaN last."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_magnitude(values: tl.tensor) -> tl.tensor:
    """The largest of the :func:`magnitude_bits`."""
    return tl.max(magnitude_bits(values))


@triton.jit
def is_finite(magnitude: tl.tensor) -> tl.tensor:
    """Whether :func:`magnitude_bits` are those of a finite number."""
    return magnitude < _INFINITY_BITS


@triton.jit
def _add_and_compare(sum_a, largest_a, sum_b, largest_b):  # type: ignore[no-untyped-def]  # Triton's pairs
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def squares_and_largest_magnitude(values: tl.tensor, others: tl.tensor):  # type: ignore[no-untyped-def]  # a pair
    """The sum of the squares of ``values``, and the :func:`largest_magnitude` of ``others``, in one reduction."""
    if ASSEMBLY:
        return tl.reduce((values * values, magnitude_bits(others)), None, _add_and_compare)
    return tl.sum(values * values), largest_magnitude(others)  # the interpreter would take seconds


@triton.jit
def scale_for(magnitude: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """The fp32 scale of a row by its :func:`largest_magnitude`; NaN if that is not finite."""
    scale = tl.math.div_rn(magnitude.to(tl.float32, bitcast=True), LARGEST)
    return tl.where(is_finite(magnitude), tl.maximum(scale, _SMALLEST_SCALE), float("nan"))


@triton.jit
def divided(values: tl.tensor, scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """``values / scale``, so exact that its code is that of the correctly rounded quotient.

    values: fp32 that ``DTYPE`` holds exactly. scale: of their row, by :func:`scale_for`.
    """
    # An IEEE division per value would take most of the kernel's time. With the exact reciprocal, two corrections
    # give the correctly rounded quotient (Markstein, IBM J. Res. Dev. 34, 1990). One gives the right code if
    # the input has 8 or 11 significant bits: a test goes through all of them.
    CORRECTIONS: tl.constexpr = 2 if DTYPE == tl.float32 else 1
    if scale < 1 / _LIFT:
        # Or the remainders would be subnormal and lose bits.
        values = values * _LIFT
        scale = scale * _LIFT
    minus_reciprocal = tl.math.div_rn(-1.0, scale)
    minus_values = values * -1.0  # is free, where a minus sign would mean 0 - values
    quotients = minus_values * minus_reciprocal
    for _ in tl.static_range(CORRECTIONS):
        # Written so that -0 stays -0.
        quotients = tl.fma(tl.fma(quotients, scale, minus_values), minus_reciprocal, quotients)
    return quotients


@triton.jit
def int8_codes(values: tl.tensor, scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Of a tile: 0 where the scale is NaN. No quotient of a row leaves [-127, 127]."""
    integers = (divided(values, scale, DTYPE) + TO_INTEGER).to(tl.int32, bitcast=True)
    return tl.where(scale == scale, integers, 0).to(tl.int8)


@triton.jit
def store_int8(
    values: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    columns: tl.tensor,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Write the INT8 codes of a tile. Returns their sum."""
    tile = int8_codes(values, scale, DTYPE)
    tl.store(codes + columns, tile, mask=columns < COLUMNS)
    return tl.sum(tile.to(tl.int32))


@triton.jit
def sums_of_row(sums: tl.tensor, row: tl.tensor, GROUP: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Where a row's sums are: rows begin at multiples of 16 bytes."""
    return sums + row * ((COLUMNS + 4 * GROUP - 1) // (4 * GROUP) * 4)


@triton.jit
def store_fp8(
    values: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    sums: tl.tensor,
    groups: tl.tensor,
    columns: tl.tensor,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Write the E4M3 codes of a tile (the conversion saturates), and the sums of its groups.

    codes, sums: of the row. groups, columns: where the tile lies in the row.
    """
    tile = divided(values, scale, DTYPE).to(tl.float8e4nv)
    tl.store(codes + columns, tile, mask=columns < COLUMNS)
    store_sums(sums, groups, fp8_sums(tile), groups * GROUP < COLUMNS)


@triton.jit
def fp8_sums(codes: tl.tensor) -> tl.tensor:
    """Of each group of a tile."""
    return tl.sum(tl.sum(codes.to(tl.float32), axis=2), axis=0)


@triton.jit
def store_sums(sums: tl.tensor, groups: tl.tensor, totals: tl.tensor, mask: tl.tensor) -> None:
    """Write the groups' ``totals`` where the mask says so. sums: of the row."""
    if ASSEMBLY:
        # A plain store would first carry the sums to one warp, through shared memory and two barriers.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 to; setp.ne.s32 p, $4, 0; mad.wide.s32 to, $2, 4, $1; "
            "@p st.global.b32 [to], $3; mov.b32 $0, 0; }",
            "=r,l,r,r,r",
            [sums.to(tl.int64), groups, totals, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(sums + groups, totals, mask=mask)
