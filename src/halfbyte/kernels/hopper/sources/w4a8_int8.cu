// INT4 weights x INT8 activations: out[m, n] = x_scale[m] channel_scale[n] sum_k x[m, k] w[n, k] (+ bias[n]), where w is
// an INT8 number: (code - zero point) x group scale (QServe's progressive quantization), or with one group per channel
// code - zero point. Sums are exact integers that stay in the tensor cores over all of K.
//
// Bytes without a sign are multiplied: w plus an offset that is the same for a whole channel, 128 or the channel's zero
// point. What that is too much is the offset times the sum of the token's codes, which goes off in the end. (int32 may
// wrap around on the way; whatever the sum is in the end, it is exact.)
#include "linear.cuh"

constexpr bool LEVELS = SCALE_BYTES > 0;  // else one group per channel
constexpr u32 CODES = 0x0F0F0F0F;
constexpr int SIGN_OFFSET = 128;

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    float token_scale[WARPGROUPS][TOKENS];
    int token_sum[WARPGROUPS][TOKENS];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(STAGE_BLOCKS == 1 && PARTS == 1 && !ZERO_POINTS);
static_assert(!LEVELS || SCALE_BYTES == 2);

constexpr int PRODUCER_REGISTERS = 32;
using Budget = Registers<PRODUCER_REGISTERS>;

// Two sets of registers for codes, each for a block or, where that is too much, for half of one. (72: codes of two blocks,
// 32, a block's codes and levels, 16, addresses and the like.) Measured (docs/kernel-log.md): four warpgroups that take
// many tokens are faster in quarters, and codes fetched a step early pay for 128 tokens and one or two warpgroups alone.
constexpr int SETS = 2;
constexpr int STEPS = WARPGROUPS == 4 && TOKENS >= 128 ? 4 : ACCUMULATORS + 72 > Budget::CONSUMER ? 2 : 1;
constexpr bool EARLY = LEVELS && TOKENS == 128 && WARPGROUPS <= 2 && SPLIT == 1 && STAGES > 2;

// What codes of a row's group become, as w4a8_int8_codes.py packs it: code x factor + 128 - zero point x factor. Four
// codes from 0 to 15 are a product and a sum of whole words, which is exact: each byte of the result is from 0 to 255.
struct Level {
    u32 factor, offset;
    __device__ __forceinline__ void unpack(int packed) {
        factor = packed & 63;
        offset = static_cast<u32>(packed >> 6) * 0x01010101u;
    }
    __device__ __forceinline__ u32 of(u32 codes) const { return LEVELS ? codes * factor + offset : codes; }
};

// A step's codes of rows r and r + 8, which are in the low and high half of each byte.
__device__ __forceinline__ void convert(
    u32 (&a)[4 / STEPS][4], const u32 (&codes)[8 / STEPS], const Level (&levels)[GROUPS][2], int step) {
#pragma unroll
    for (int i = 0; i < 8 / STEPS; ++i) {
        const Level(&of)[2] = levels[(step * (8 / STEPS) + i) * GROUPS / 8];
        a[i / 2][i % 2 * 2] = of[0].of(codes[i] & CODES);
        a[i / 2][i % 2 * 2 + 1] = of[1].of(codes[i] >> 4 & CODES);
    }
}

// channel_offset: zero points, null where there are levels. x_sum: of each token's codes.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8_int8(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map, const u8* __restrict__ weights,
    const float* __restrict__ channel_scale, const int* __restrict__ channel_offset, const float* x_scale,
    const int* x_sum, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
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
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base, vectors = segment.vectors(p);
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        if (!STREAM || segment.k_begin == 0) {
            fetch_of_tokens(shared.token_scale[warpgroup], x_scale, token_base, p);
            fetch_of_tokens(shared.token_sum[warpgroup], x_sum, token_base, p);
        }
        int sum[ACCUMULATORS] = {};

        u32 a[SETS][4 / STEPS][4];
        u32 codes[8 / STEPS];
        Level levels[GROUPS][2];
        accumulate<STEPS, SETS, EARLY>(
            pipeline, phases, place, segment.k_end - segment.k_begin,
            [&](int stage, int step) {
                const u8* block = shared.weights[stage][warpgroup];
                const short* packed = reinterpret_cast<const short*>(block + 4096) + row;
#pragma unroll
                for (int i = 0; LEVELS && step == 0 && i < 2 * GROUPS; ++i)
                    levels[i / 2][i % 2].unpack(packed[i / 2 * 64 + i % 2 * 8]);
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
        auto total_of = [&](int j) -> int& { return sum[j]; };
        if constexpr (STREAM)
            if (!finishes(p, schedule, place, segment, total_of)) continue;
        // On their way while blocks that divide K send each other sums.
        const int first = feature_base + warpgroup * 64 + row;
        float scales[2];
        int offsets[2] = {SIGN_OFFSET, SIGN_OFFSET};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scales[i] = load_now(channel_scale + vectors + first + i * 8, first + i * 8 < p.features);
            if (!LEVELS) offsets[i] = load_now(channel_offset + vectors + first + i * 8, first + i * 8 < p.features);
        }
        copied_numbers();
        struct OfFeature {
            float scale;
            int offset;
            float bias;
        };
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, segment, total_of,
            [&](int n, int i) {
                return OfFeature{scales[i], offsets[i], bias && n < p.features ? bias[vectors + n].value() : 0.0f};
            },
            [&](int value, int m, OfFeature of) {
                const int exact = value - of.offset * shared.token_sum[warpgroup][m];
                return of.scale * (shared.token_scale[warpgroup][m] * static_cast<float>(exact)) + of.bias;
            },
            out);
    }
    finish_stores();
    leave_together();
}
