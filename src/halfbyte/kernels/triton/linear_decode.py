# ruff: noqa: N803, SIM300
"""Codes to what tensor cores take, several at a time: PTX for what Triton would do one by one.

Every function works on each unit by itself, wherever the compiler put it. Without assembly (in Triton's
interpreter, where tests run the kernels on the CPU) each does what its description says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.row_math import ASSEMBLY

# (word >> 4 i) & 0x000f | the bits of a power of two, for two words at once.
_SPLIT_WORDS = """{
.reg .b32 s;
lop3.b32 $0, $4, 0x000f000f, POWER, 0xea;
shr.b32 s, $4, 4;
lop3.b32 $1, s, 0x000f000f, POWER, 0xea;
shr.b32 s, $4, 8;
lop3.b32 $2, s, 0x000f000f, POWER, 0xea;
shr.b32 s, $4, 12;
lop3.b32 $3, s, 0x000f000f, POWER, 0xea;
}"""
WORDS_TO_BF16 = tl.constexpr(_SPLIT_WORDS.replace("POWER", "0x43004300"))  # 128
WORDS_TO_FP16 = tl.constexpr(_SPLIT_WORDS.replace("POWER", "0x64006400"))  # 1024
MAGNITUDES_TO_E4M3 = tl.constexpr("""{
.reg .b32 m, s;
and.b32 m, $2, 0x07070707;
shr.b32 s, $2, 3;
and.b32 s, s, 0x01010101;
mad.lo.u32 $0, s, 129, m;
shr.b32 m, $2, 4;
and.b32 m, m, 0x07070707;
shr.b32 s, $2, 7;
and.b32 s, s, 0x01010101;
mad.lo.u32 $1, s, 129, m;
}""")
OFFSETS_TO_E4M3 = tl.constexpr("""{
.reg .b32 d, s, f;
lop3.b32 d, $2, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 d, d, $3;
not.b32 s, d;
shr.b32 s, s, 7;
and.b32 s, s, 0x01010101;
mul.lo.u32 f, s, 127;
xor.b32 f, f, 0x80808080;
xor.b32 d, d, f;
add.u32 $0, d, s;
shr.b32 d, $2, 4;
lop3.b32 d, d, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 d, d, $3;
not.b32 s, d;
shr.b32 s, s, 7;
and.b32 s, s, 0x01010101;
mul.lo.u32 f, s, 127;
xor.b32 f, f, 0x80808080;
xor.b32 d, d, f;
add.u32 $1, d, s;
}""")
OFFSETS_TO_INT8 = tl.constexpr("""{
.reg .b32 d;
lop3.b32 d, $2, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 d, d, $3;
xor.b32 $0, d, 0x80808080;
shr.b32 d, $2, 4;
lop3.b32 d, d, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 d, d, $3;
xor.b32 $1, d, 0x80808080;
}""")
INT8_TO_FP16 = tl.constexpr("""{
.reg .b32 u;
xor.b32 u, $2, 0x80808080;
prmt.b32 $0, u, 0x64646464, 0x4140;
prmt.b32 $1, u, 0x64646464, 0x4342;
}""")
INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 u, a, b;
xor.b32 u, $2, 0x80808080;
prmt.b32 a, u, 0x4b000000, 0x7650;
prmt.b32 b, u, 0x4b000000, 0x7651;
add.rn.f32 a, a, 0fCB000080;
add.rn.f32 b, b, 0fCB000080;
prmt.b32 $0, a, b, 0x7632;
prmt.b32 a, u, 0x4b000000, 0x7652;
prmt.b32 b, u, 0x4b000000, 0x7653;
add.rn.f32 a, a, 0fCB000080;
add.rn.f32 b, b, 0fCB000080;
prmt.b32 $1, a, b, 0x7632;
}""")


@triton.jit
def words_to_floats(
    words: tl.tensor, DTYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """16-bit words of four nibbles u as four tiles of 128 + u in bf16, or of 1024 + u in fp16: exact.

    The nibble becomes the lowest bits of a number whose unit they are.
    """
    if not ASSEMBLY:
        base = 1024.0 if DTYPE == tl.float16 else 128.0
        return (
            ((words & 15).to(tl.float32) + base).to(DTYPE),
            ((words >> 4 & 15).to(tl.float32) + base).to(DTYPE),
            ((words >> 8 & 15).to(tl.float32) + base).to(DTYPE),
            ((words >> 12 & 15).to(tl.float32) + base).to(DTYPE),
        )
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            WORDS_TO_FP16,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            WORDS_TO_BF16,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def magnitudes_to_e4m3(units: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Bytes of two nibbles, a sign over a code or -code - 1, as two tiles of code / 512 in E4M3: exact.

    A byte n below 16 is the E4M3 number n / 512; a sign adds 1 to the magnitude and 128 for itself.
    """
    if not ASSEMBLY:
        low = (units & 7) + (units >> 3 & 1) * 129
        high = (units >> 4 & 7) + (units >> 7) * 129
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    return tl.inline_asm_elementwise(
        MAGNITUDES_TO_E4M3,
        "=&r,=&r,r",
        [units],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@triton.jit
def offsets_to_e4m3(units: tl.tensor, zeros: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Bytes of two nibbles u and zeros z in 0..15 (uint8) as two tiles of (u - z) / 512 in E4M3: exact.

    d = 128 + u - z never borrows from its neighbour. Where it is below 128, the number is negative and its
    byte is -d, of which the sign bit is part; elsewhere it is d - 128.
    """
    if not ASSEMBLY:
        low = ((units & 15).to(tl.float32) - zeros.to(tl.float32)) / 512.0
        high = ((units >> 4).to(tl.float32) - zeros.to(tl.float32)) / 512.0
        return low.to(tl.float8e4nv), high.to(tl.float8e4nv)
    return tl.inline_asm_elementwise(
        OFFSETS_TO_E4M3,
        "=&r,=&r,r,r",
        [units, zeros],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@triton.jit
def offsets_to_int8(units: tl.tensor, zeros: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Bytes of two nibbles u and zeros z in 0..15 (uint8) as two tiles of u - z in INT8."""
    if not ASSEMBLY:
        low = (units & 15).to(tl.int8) - zeros.to(tl.int8)
        high = (units >> 4).to(tl.int8) - zeros.to(tl.int8)
        return low, high
    return tl.inline_asm_elementwise(
        OFFSETS_TO_INT8,
        "=&r,=&r,r,r",
        [units, zeros],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def int8_to_floats(codes: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """INT8 codes as bf16 or fp16: exact. A code + 128 is put below a power of two whose unit is 1."""
    if not ASSEMBLY:
        return codes.to(tl.float32).to(DTYPE)
    elif DTYPE == tl.float16:
        above = tl.inline_asm_elementwise(
            INT8_TO_FP16,
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
        return above - 1152.0
    else:
        # bf16 has too few bits for the power of two; fp32 has not, and its upper half is the bf16 number.
        return tl.inline_asm_elementwise(
            INT8_TO_BF16,
            "=&r,=&r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
