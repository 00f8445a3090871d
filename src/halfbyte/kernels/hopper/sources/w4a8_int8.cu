// INT4 weights in two levels x INT8 activations: out[m, n] = x_scale[m] channel_scale[n] sum_k x[m, k] w[n, k] (+ bias[n]),
// where w = (code - zero point) x group scale is an INT8 number (QServe's progressive quantization), and sums are exact
// integers that stay in the tensor cores over all of K.
//
// Four codes from 0 to 15, a byte each, times the group's scale plus 128 - zero x scale in each byte: one product and sum
// of whole words. Since every w is within [-128, 127], each byte's result is within [0, 255] and nothing carries into the
// next one. With its upper bit turned over it is w.
#include "linear.cuh"

// What a byte of scale (from 1) and zero point stands for.
struct alignas(8) Level {
    u32 factor, offset;
};
constexpr u32 UPPER_BITS = 0x80808080, CODES = 0x0F0F0F0F;

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    Level levels[256];  // of all scales and zero points
    float token_scale[WARPGROUPS][TOKENS];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(STAGE_BLOCKS == 1);
static_assert(PARTS == 1 && !ZERO_POINTS);

constexpr int PRODUCER_REGISTERS = 32;
using Budget = Registers<PRODUCER_REGISTERS>;

// Two sets of registers for codes, each for a block or, where that is too much, for half of one. (72: codes of two blocks,
// 32, a block's codes and levels, 16, addresses and the like.) A warpgroup by itself, whose conversion no other one's
// products hide, goes on in steps of a quarter, with four sets.
constexpr bool ALONE = WARPGROUPS == 1 && TOKENS > 128;
constexpr int SETS = ALONE ? 4 : 2;
constexpr int STEPS = ALONE ? 4 : ACCUMULATORS + 72 > Budget::CONSUMER ? 2 : 1;
constexpr bool EARLY = (TOKENS == 128 || ALONE) && SPLIT == 1 && STAGES > 2;

__device__ __forceinline__ Level level_of(int scale_and_zero) {
    const int scale = (scale_and_zero >> 4) + 1, zero = scale_and_zero & 15;
    return {static_cast<u32>(scale), static_cast<u32>(128 - zero * scale) * 0x01010101u};
}

// A step's codes of rows r and r + 8, which are in the low and high half of each byte.
__device__ __forceinline__ void convert(
    u32 (&a)[4 / STEPS][4], const u32 (&codes)[8 / STEPS], const Level (&levels)[GROUPS][2], int step) {
#pragma unroll
    for (int i = 0; i < 8 / STEPS; ++i) {
        const Level(&of)[2] = levels[(step * (8 / STEPS) + i) * GROUPS / 8];
        a[i / 2][i % 2 * 2] = (codes[i] & CODES) * of[0].factor + of[0].offset ^ UPPER_BITS;
        a[i / 2][i % 2 * 2 + 1] = (codes[i] >> 4 & CODES) * of[1].factor + of[1].offset ^ UPPER_BITS;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8_int8(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map, const u8* __restrict__ weights,
    const float* __restrict__ channel_scale, const float* x_scale, const Out* __restrict__ bias, Out* __restrict__ out,
    const Problem p) {
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
    const u64 x_tile = tile_of<128>(shared_address(shared.x[0]));
    for (int i = thread; i < 256; i += CONSUMERS) shared.levels[i] = level_of(i);
    named_barrier(WARPGROUPS + 1, CONSUMERS);
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base;
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        if (!STREAM || segment.k_begin == 0) fetch_scales(shared.token_scale[warpgroup], x_scale, token_base, p);
        int sum[ACCUMULATORS] = {};

        u32 a[SETS][4 / STEPS][4];
        u32 codes[8 / STEPS];
        Level levels[GROUPS][2];
        accumulate<STEPS, SETS, EARLY>(
            pipeline, phases, place, segment.k_end - segment.k_begin,
            [&](int stage, int step) {
                const u8* block = shared.weights[stage][warpgroup];
                const u8* scales = block + 4096 + row;
#pragma unroll
                for (int i = 0; step == 0 && i < 2 * GROUPS; ++i)
                    levels[i / 2][i % 2] = shared.levels[scales[i / 2 * 64 + i % 2 * 8]];
                load_codes<STEPS>(codes, block, step);
            },
            [&](int, int step, int set) { convert(a[set], codes, levels, step); },
            [&](int stage, int step, int set) {
                const u64 x = x_tile + stage * TOKENS * 8 + step * (8 / STEPS);
                mma_fence();
#pragma unroll
                for (int s = 0; s < 4 / STEPS; ++s) mma(sum, a[set][s], x + s * 2, true);
                mma_commit();
            });

        settle(sum);
        float total[ACCUMULATORS];
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; ++j) total[j] = static_cast<float>(sum[j]);
        auto total_of = [&](int j) -> float& { return total[j]; };
        if constexpr (STREAM)
            if (!finishes(p, schedule, place, segment, total_of)) continue;
        // On their way while blocks that divide K send each other sums.
        const int first = feature_base + warpgroup * 64 + row;
        const float scales[2] = {
            load_now(channel_scale + first, first < p.features),
            load_now(channel_scale + first + 8, first + 8 < p.features)};
        await_scales(shared.token_scale[warpgroup], 1);
        struct OfFeature {
            float scale, bias;
        };
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, token_base, total_of,
            [&](int n, int i) { return OfFeature{scales[i], bias && n < p.features ? bias[n].value() : 0.0f}; },
            [&](float value, int m, OfFeature of) {
                return of.scale * (shared.token_scale[warpgroup][m] * value) + of.bias;
            },
            out);
    }
    finish_stores();
    leave_together();
}
