// A block's codes as the left operand of FP8 products. Part of w4a8.cu, and the counterpart of w4a8_codes.py.
#pragma once

// Codes of set A and of set B as E4M3 bytes: c + 1/2, or with PLAIN c, in 1/256. ones: 0x01010101 in a register; an
// instruction takes one immediate. What is negative is kept as -c - 1, so PLAIN adds its sign to its size.
__device__ __forceinline__ void convert(u32 (&a)[4][4], const uint4* words, u32 ones) {
    const uint4 first = words[0], second = words[128];
    const u32 codes[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 low = codes[i] >> 3;
        u32 &set_a = a[i / 2][i % 2 * 2], &set_b = a[i / 2][i % 2 * 2 + 1];
        if constexpr (PLAIN) {
            set_a = (codes[i] & 0x8E8E8E8E) + ((codes[i] & 0x80808080) >> 6);
            set_b = (low & 0x0E0E0E0E) + (codes[i] & 0x01010101) * 0x82;
            continue;
        }
        const u32 sign = codes[i] << 7;
        asm("lop3.b32 %0, %1, 0x8E8E8E8E, %2, 0xEA;" : "=r"(set_a) : "r"(codes[i]), "r"(ones));
        asm("lop3.b32 %0, %1, 0x0E0E0E0E, %2, 0xEA;" : "=r"(set_b) : "r"(low), "r"(ones));
        asm("lop3.b32 %0, %1, 0x80808080, %2, 0xEA;" : "=r"(set_b) : "r"(sign), "r"(set_b));
    }
}
