// In which numbers the tensor cores' sums over a group, and their sums times the groups' scales, are kept. A thread has
// those of two rows, 8 apart, and of COLUMNS tokens. Part of w4a8.cu.
#pragma once

template <bool IN_FP16>
struct Sums;

template <>
struct Sums<false> {
    using Word = float;
    static constexpr int WORDS = COLUMNS / 2;
    static __device__ __forceinline__ int row_of(int word) { return word / 2 % 2; }
    static __device__ __forceinline__ Word scale(Scale scale) { return scale.value(); }
    static __device__ __forceinline__ void add(Word& total, Word scale, Word sum) { total += scale * sum; }
    static __device__ __forceinline__ void add_offsets(Word (&total)[WORDS], const u32 (&offsets)[4], u64 token_sums) {
        mma_tf32(total, offsets, token_sums, true);
    }
    static __device__ __forceinline__ float number(const Word (&words)[WORDS], int j) { return words[j]; }
};

// Two tokens' sums in a word. Codes count in 1/256 and a row's largest scale is below 1/8, so that neither 128 products
// (at most 448 * 8 / 256 each) nor 224 groups of them exceed what fp16 holds: w4a8_scales.py.
template <>
struct Sums<true> {
    using Word = u32;
    static constexpr int WORDS = COLUMNS / 4;
    static __device__ __forceinline__ int row_of(int word) { return word % 2; }
    static __device__ __forceinline__ Word scale(Half scale) { return scale.bits * 0x10001u; }
    static __device__ __forceinline__ void add(Word& total, Word scale, Word sum) {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(total) : "r"(scale), "r"(sum));
    }
    static __device__ __forceinline__ void add_offsets(Word (&)[WORDS], const u32 (&)[4], u64) {}  // plain codes have none
    static __device__ __forceinline__ float number(const Word (&words)[WORDS], int j) {
        return Half::of_pair(words[j / 2], j % 2).value();
    }
};
