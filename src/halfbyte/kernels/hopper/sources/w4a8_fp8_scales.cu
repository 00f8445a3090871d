// INT4 weights x FP8 activations with group scales in FP8: out[m, n] = x_scale[m] channel_scale[n] sum_k x[m, k] w[n, k]
// (+ bias[n]), where w is code x group scale rounded to E4M3, and sums stay in the tensor cores over all of K.
//
// These are the numbers of vLLM's CUTLASS kernel. A code selects one of the eight negative multiples of its group's scale
// that a block holds ready (blocks.py, w4a8_fp8_scales.py), or the positive one of the same size.
#include "linear.cuh"

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    float token_scale[WARPGROUPS][TOKENS];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(STAGE_BLOCKS == 1);
static_assert(GROUPS == 1 && PARTS == 1);

constexpr int SETS = 2;  // of registers for a block's codes

constexpr int PRODUCER_REGISTERS = 32;
using Budget = Registers<PRODUCER_REGISTERS>;

// The positive multiples in the same order, and zero in the place of 8 s.
__device__ __forceinline__ Multiples positive(const Multiples& negative) {
    return {(negative.low ^ 0x80808080) & 0xFFFFFF00, negative.high ^ 0x80808080};
}

// Four codes, indices and signs in the nibbles of index and select, as E4M3 bytes.
__device__ __forceinline__ u32 choose(const Multiples& positive, const Multiples& negative, u32 index, u32 select) {
    return __byte_perm(
        __byte_perm(positive.low, positive.high, index), __byte_perm(negative.low, negative.high, index), select);
}

// Codes of rows r and r + 8, in the low and high half of each word. order: 0x32103210 in a register; an instruction
// takes one immediate.
__device__ __forceinline__ void convert(u32 (&a)[4][4], const u8* block, int thread, int row, u32 order) {
    const uint4* words = reinterpret_cast<const uint4*>(block) + thread % 128;
    const uint4 first = words[0], second = words[128];
    const u32 codes[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    const Multiples* multiples = reinterpret_cast<const Multiples*>(block + 4096) + row;
    const Multiples negative[2] = {multiples[0], multiples[8]};
    const Multiples plus[2] = {positive(negative[0]), positive(negative[1])};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 index = codes[i] & 0x77777777;
        u32 select;  // byte i of the positive ones or, with the sign in bit 2, of the negative ones
        asm("lop3.b32 %0, %1, 0x44444444, %2, 0xEA;" : "=r"(select) : "r"(codes[i] >> 1), "r"(order));
        a[i / 2][i % 2 * 2] = choose(plus[0], negative[0], index, select);
        a[i / 2][i % 2 * 2 + 1] = choose(plus[1], negative[1], index >> 16, select >> 16);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8_fp8_scales(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map, const u8* __restrict__ weights, const float* __restrict__ channel_scale,
    const float* x_scale, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Pipeline& pipeline = shared.pipeline;
    const int thread = threadIdx.x;
    const Place place;

    const int role = start(pipeline);
    if (role >= 0) {
        give_registers<PRODUCER_REGISTERS>();
        feed<1>(role, shared, p, place, weights, x_map, NothingMore());
        return;
    }

    take_registers<Budget::CONSUMER>();
    const int lane = thread & 31, warpgroup = thread / 128;
    const int row = thread / 32 % 4 * 16 + lane / 4;
    const u32 order = 0x32103210 + (static_cast<u32>(p.tokens) >> 31);
    const u64 x_tile = tile_of<128>(shared_address(shared.x[0]));
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base;
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        if (!STREAM || segment.k_begin == 0) fetch_scales(shared.token_scale[warpgroup], x_scale, token_base, p);
        float sum[ACCUMULATORS] = {};

        u32 a[SETS][4][4];
        accumulate<1, SETS>(
            pipeline, phases, place, segment.k_end - segment.k_begin,
            [&](int stage, int, int set) { convert(a[set], shared.weights[stage][warpgroup], thread, row, order); },
            [&](int stage, int, int set) {
                mma_fence();
#pragma unroll
                for (int s = 0; s < 4; ++s) mma(sum, a[set][s], x_tile + stage * TOKENS * 8 + s * 2, true);
                mma_commit();
            });

        settle(sum);
        auto total_of = [&](int j) -> float& { return sum[j]; };
        if constexpr (STREAM)
            if (!finishes(p, schedule, place, segment, total_of)) continue;
        await_scales(shared.token_scale[warpgroup], 1);
        struct OfFeature {
            float scale, bias;
        };
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, token_base, total_of,
            [&](int n, int) {
                return n < p.features ? OfFeature{channel_scale[n], bias ? bias[n].value() : 0.0f} : OfFeature{0.0f, 0.0f};
            },
            [&](float value, int m, OfFeature of) {
                return of.scale * (shared.token_scale[warpgroup][m] * value) + of.bias;
            },
            out);
    }
    finish_stores();
    leave_together();
}
