// FP8 weights x FP8 activations, a scale for each channel and token: out[m, n] = x_scale[m] channel_scale[n]
// sum_k x[m, k] w[n, k] (+ bias[n]). Sums stay in the tensor cores over all of K.
//
// Nothing is converted, so weights go from shared memory to the tensor cores as they are: a block of 64 x 128 is kept in
// the swizzle that the matrix instruction reads (w8a8_codes.py).
#include "linear.cuh"

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    alignas(1024) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    Staged staged;
    float token_scale[WARPGROUPS][TOKENS];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(BLOCK_BYTES == 64 * 128 && STAGE_BLOCKS == 1 && PARTS == 1);

constexpr int PRODUCER_REGISTERS = 32;
using Budget = Registers<PRODUCER_REGISTERS>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w8a8(
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
    const u64 weight_tile = tile_of<128>(shared_address(shared.weights[0][warpgroup]));
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

        const int blocks = segment.k_end - segment.k_begin;
        int stage = 0, before = 0;
        for (int block = 0; block < blocks; ++block) {
            barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
            mma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s)
                mma_shared(
                    sum, weight_tile + stage * (WARPGROUPS * BLOCK_BYTES / 16) + s * 2, x_tile + stage * TOKENS * 8 + s * 2, true);
            mma_commit();
            if (block > 0) {
                mma_wait<1>();
                pipeline.leave(before, place);
            }
            before = stage;
            if (++stage == STAGES) stage = 0;
        }
        mma_wait<0>();
        if (blocks > 0) pipeline.leave(before, place);

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
