// INT4 weights x FP8 activations with group scales in FP8: out[m, n] = x_scale[m] channel_scale[n] sum_k x[m, k] w[n, k]
// (+ bias[n]), where w is code x group scale rounded to E4M3, and sums stay in the tensor cores over all of K.
//
// These are the numbers of vLLM's CUTLASS kernel. A code selects from two tables of its scale, which a block of threads
// holds ready for all E4M3 numbers.
#include "linear.cuh"

// One scale's multiples, so that the sum of what a code selects from both tables, and ONCE, is its multiple. A byte
// permutation gives a nibble's byte or, where the nibble's bit 3 is set, eight times the byte's bit 7: the codes from 0 on
// select from `nonnegative`, and their complements, which have bit 3 set, nothing but 0 or 255; codes below 0 the other way
// round. Every byte's sum carries one into the next byte.
struct alignas(16) Tables {
    u32 nonnegative[2], negative[2];
};
constexpr u32 ONCE = 0x7F7F7F80;

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    Tables tables[256];  // of all E4M3 scales
    float token_scale[WARPGROUPS][TOKENS];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(STAGE_BLOCKS == 1);
static_assert(GROUPS == 1 && PARTS == 1);

constexpr int PRODUCER_REGISTERS = 32;
using Budget = Registers<PRODUCER_REGISTERS>;

// Two sets of registers for codes, each for a block or, where that is too much, for half of one. (72: codes of two blocks,
// 32, two rows' tables, 8, what is fetched early, 8, addresses and the like.) A warpgroup by itself, whose conversion no
// other one's products hide, goes on in steps of a quarter, with four sets.
constexpr bool ALONE = WARPGROUPS == 1 && TOKENS > 128;
constexpr int SETS = ALONE ? 4 : 2;
constexpr int STEPS = ALONE ? 4 : ACCUMULATORS + 72 > Budget::CONSUMER ? 2 : 1;
// A scale and then its tables are two waits for shared memory, one after the other. Measured (docs/kernel-log.md): it does
// not pay with fewer tokens, nor with K divided, where blocks are few, nor for two warpgroups of 256 tokens.
constexpr bool EARLY = (TOKENS == 128 || ALONE) && SPLIT == 1 && STAGES > 2;

// Sizes of four multiples of `scale`, rounded to E4M3.
__device__ __forceinline__ u32 multiples(float scale, float first) {
    return fp8_pair(scale * first, scale * (first + 1)) | fp8_pair(scale * (first + 2), scale * (first + 3)) << 16;
}

__device__ __forceinline__ Tables tables_of(u32 scale) {
    if ((scale & 0x7F) == 0x7F) return {{0xFFFFFFFF, 0xFFFFFFFF}, {0, 0}};  // all that is selected is NaN
    const float size = fp8_value(scale & 0x7F);
    Tables sizes = {{multiples(size, 0), multiples(size, 4)}, {multiples(size, 1), multiples(size, 5)}};
    // 128 + n and 0 make 256 + n, whose byte is n; n + 1 and 255 make 256 + 128 + n, whose byte is -n.
    const bool is_negative = scale & 0x80;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sizes.nonnegative[i] += is_negative ? 0x01010101 : 0x80808080;
        sizes.negative[i] += is_negative ? 0x80808080 : 0x01010101;
    }
    return sizes;
}

// Four codes in the lower half of a word. ones: all bits set, in a register: the complement by a product, which other
// units compute than permutations and sums.
__device__ __forceinline__ u32 choose(const Tables& tables, u32 codes, u32 ones) {
    return permute(tables.nonnegative, codes) + permute(tables.negative, codes * ones + ones) + ONCE;
}

// A step's codes of rows r and r + 8, which are in the low and high half of each word.
__device__ __forceinline__ void convert(
    u32 (&a)[4 / STEPS][4], const u32 (&codes)[8 / STEPS], const Tables (&tables)[2], u32 ones) {
#pragma unroll
    for (int i = 0; i < 8 / STEPS; ++i) {
        a[i / 2][i % 2 * 2] = choose(tables[0], codes[i], ones);
        a[i / 2][i % 2 * 2 + 1] = choose(tables[1], codes[i] >> 16, ones);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8_fp8_scales(
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
    const u32 ones = ~(static_cast<u32>(p.tokens) >> 31);
    const u64 x_tile = tile_of<128>(shared_address(shared.x[0]));
    for (int scale = thread; scale < 256; scale += CONSUMERS) shared.tables[scale] = tables_of(scale);
    named_barrier(WARPGROUPS + 1, CONSUMERS);
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base, vectors = segment.vectors(p);
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        if (!STREAM || segment.k_begin == 0) fetch_of_tokens(shared.token_scale[warpgroup], x_scale, token_base, p);
        float sum[ACCUMULATORS] = {};

        u32 a[SETS][4 / STEPS][4];
        u32 codes[8 / STEPS];
        Tables tables[2];
        accumulate<STEPS, SETS, EARLY>(
            pipeline, phases, place, segment.k_end - segment.k_begin,
            [&](int stage, int step) {
                const u8* block = shared.weights[stage][warpgroup];
                const u8* scales = block + 4096 + row;
                if (step == 0) tables[0] = shared.tables[scales[0]], tables[1] = shared.tables[scales[8]];
                load_codes<STEPS>(codes, block, step);
            },
            [&](int, int, int set) { convert(a[set], codes, tables, ones); },
            [&](int stage, int step, int set) {
                const u64 x = x_tile + stage * TOKENS * 8 + step * (8 / STEPS);
                mma_fence();
#pragma unroll
                for (int s = 0; s < 4 / STEPS; ++s) mma(sum, a[set][s], x + s * 2, true);
                mma_commit();
            });

        settle(sum);
        auto total_of = [&](int j) -> float& { return sum[j]; };
        if constexpr (STREAM)
            if (!finishes(p, schedule, place, segment, total_of)) continue;
        // On their way while blocks that divide K send each other sums.
        const int first = feature_base + warpgroup * 64 + row;
        const float scales[2] = {
            load_now(channel_scale + vectors + first, first < p.features),
            load_now(channel_scale + vectors + first + 8, first + 8 < p.features)};
        await_scales(shared.token_scale[warpgroup], 1);
        struct OfFeature {
            float scale, bias;
        };
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, segment, total_of,
            [&](int n, int i) { return OfFeature{scales[i], bias && n < p.features ? bias[vectors + n].value() : 0.0f}; },
            [&](float value, int m, OfFeature of) {
                return of.scale * (shared.token_scale[warpgroup][m] * value) + of.bias;
            },
            out);
    }
    finish_stores();
    leave_together();
}
