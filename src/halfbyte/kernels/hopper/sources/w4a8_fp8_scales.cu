// INT4 weights x FP8 activations with group scales in FP8: out[m, n] = x_scale[m] channel_scale[n] sum_k x[m, k] w[n, k]
// (+ bias[n]), where w is code x group scale rounded to E4M3, and sums stay in the tensor cores over all of K.
//
// These are the numbers of vLLM's CUTLASS kernel. A code selects one of the eight negative multiples of its group's scale
// that a block holds ready (blocks.py, w4a8_fp8_scales.py), or the positive one of the same size.
#include "linear.cuh"

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    Staged staged;
    alignas(16) float token_scale[TOKENS];
    alignas(16) float channel_scale[TILE_ROWS];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(GROUPS == 1 && PARTS == 1 && STAGES % 2 == 0);

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
    const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ channel_scale,
    const float* x_scale, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Pipeline& pipeline = shared.pipeline;
    const int thread = threadIdx.x;
    const Place place(p);

    const int role = start(pipeline);
    if (role >= 0) {
        give_registers<PRODUCER_REGISTERS>();
        u8 nothing[1][WARPGROUPS][1];
        if (role == 0) load_weights<0>(pipeline, shared.weights, nothing, p, place, weights);
        if (role == 1)
            load_tokens<1>(pipeline, shared.x, p, place, x_map, NothingMore());
        else if (SHARE > 1)
            cluster_wait();
        leave_together();
        return;
    }

    take_registers<Budget::CONSUMER>();
    const int lane = thread & 31, warpgroup = thread / 128;
    const int row = thread / 32 % 4 * 16 + lane / 4;
    const u32 order = 0x32103210 + (static_cast<u32>(p.tokens) >> 31);
    const u32 x_low = tile_low(shared_address(shared.x[0]));
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    const Tiles tiles(p);
    Phases phases;
    for (int item = place.first_item; item < tiles.count(); item += place.item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const int feature_base = (feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        const bool is_token = thread < TOKENS && token_base + thread < p.tokens;
        const bool is_feature = thread < TILE_ROWS && feature_base + thread < p.features;
        const float of_token = is_token ? x_scale[token_base + thread] : 0.0f;
        const float of_feature = is_feature ? channel_scale[feature_base + thread] : 0.0f;
        float sum[ACCUMULATORS] = {};

        auto wait_and_convert = [&](int stage, u32(&a)[4][4]) {
            barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
            convert(a, shared.weights[stage][warpgroup], thread, row, order);
        };
        // follows: products of the stage before are still running. carries: this one's go on under the next one's.
        u32 a[2][4][4];
        auto unit = [&](int stage, bool last, bool follows, bool carries) {
            mma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s) mma(sum, a[stage % 2][s], x_low + stage * TOKENS * 8 + s * 2, true);
            mma_commit();
            if (follows) {
                mma_wait<1>();
                pipeline.leave(stage - 1, place);
            }
            if (!last) wait_and_convert((stage + 1) % STAGES, a[(stage + 1) % 2]);
            if (!carries) {
                mma_wait<0>();
                pipeline.leave(stage, place);
            }
        };
        int left = place.k_end - place.k_begin;
        if (left > 0) wait_and_convert(0, a[0]);
        for (; left >= STAGES; left -= STAGES) {  // whole rounds have no branches: products do not outlive one
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) {
                const bool ends = stage == STAGES - 1;
                unit(stage, ends && left == STAGES, stage > 0, !ends);
            }
        }
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (left > 0) unit(stage, left == 1, false, false);
            --left;
        }

        if (thread < TOKENS) shared.token_scale[thread] = of_token;
        if (thread < TILE_ROWS) shared.channel_scale[thread] = of_feature;
        named_barrier(1, CONSUMERS);  // and the tile before this one has left the staging buffer
        store_tile(
            pipeline, shared.staged, p, place, feature_base, token_base, [&](int j) { return sum[j]; },
            [&](float value, int m, int n) {
                const float scaled = shared.token_scale[m] * (shared.channel_scale[n - feature_base] * value);
                return Out::of(scaled + (bias && n < p.features ? bias[n].value() : 0.0f));
            },
            out);
    }
    leave_together();
}
