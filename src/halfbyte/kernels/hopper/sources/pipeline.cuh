// How weights and activations come to the warps that multiply, stage by stage. Part of linear.cuh.
#pragma once

// How stages fill and empty, and where sums of a tile's blocks meet.
struct Pipeline {
    alignas(8) u64 full[STAGES];
    alignas(8) u64 empty[STAGES];
    alignas(8) u64 reduced;

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ void init() {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&full[stage]), 2);  // weights and tokens
            barrier_init(shared_address(&empty[stage]), SHARE * CONSUMERS / 32);
        }
        barrier_init(shared_address(&reduced), 1);
        barrier_init_fence();
        if constexpr (SPLIT > 1) barrier_expect(shared_address(&reduced), (SPLIT - 1) * OWN_PIECES * 16);
    }

    // By a warp that has read all it needs of a stage, all its threads at once.
    __device__ __forceinline__ void leave(int stage, const Place& place) {
        const int lane = threadIdx.x & 31;
        if constexpr (SHARE > 1) {
            if (lane < SHARE) barrier_arrive_remote(shared_address(&empty[stage]), place.rank - place.neighbour + lane);
        } else {
            if (lane == 0) barrier_arrive(shared_address(&empty[stage]));
        }
    }
};

__device__ __forceinline__ void meet_warpgroup() { named_barrier(1 + threadIdx.x / 128, 128); }

// Nobody leaves while others may still send activations. (Parts of sums are waited for by who receives them.)
__device__ __forceinline__ void leave_together() {
    if constexpr (SHARE > 1) {
        __syncwarp();
        cluster_arrive_last();
        cluster_wait();
    }
}

// One warp: the blocks of weights, stage by stage, into weights[stage][warpgroup]. Weights do not depend on the previous
// kernel, so this does not wait for it.
template <class Weights>
__device__ __forceinline__ void load_weights(
    Pipeline& pipeline, Weights& to, const Problem& p, const Place& place, const u8* weights) {
    const u64 policy = policy_evict_first();
    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const u8* from[WARPGROUPS];
#pragma unroll
        for (int w = 0; w < WARPGROUPS; ++w) {
            const int row64 = min((segment.feature_tile + static_cast<int>(place.neighbour)) * WARPGROUPS + w, p.rows64 - 1);
            const int row = GROUPED ? segment.expert * p.rows64 + row64 : row64;
            from[w] = weights + (static_cast<u64>(row) * p.blocks_k + segment.k_begin) * BLOCK_BYTES;
        }
        for (int k = segment.k_begin, stage = 0; k < segment.k_end; k += STAGE_BLOCKS) {
            const u32 barrier = shared_address(&pipeline.full[stage]);
            const int bytes = min(segment.k_end - k, STAGE_BLOCKS) * BLOCK_BYTES;
            barrier_wait(shared_address(&pipeline.empty[stage]), phases.next(stage) ^ 1);
            expect_once(barrier, WARPGROUPS * bytes);
#pragma unroll
            for (int w = 0; w < WARPGROUPS; ++w) {
                copy_bulk(shared_address(to[stage][w]), from[w], bytes, barrier, policy);
                from[w] += bytes;
            }
            if (++stage == STAGES) stage = 0;
        }
    }
}

// A box of activations, this block's share of it, to all blocks that share.
__device__ __forceinline__ void load_box(
    u32 to, const TensorMap& map, int column, int token_base, u32 barrier, const Place& place) {
    constexpr int ROWS = TOKENS / SHARE;
    if constexpr (SHARE > 1)
        copy_tile_multicast(
            to + place.neighbour * ROWS * 128, map, column, token_base + place.neighbour * ROWS, barrier,
            ((1 << SHARE) - 1) << (place.rank - place.neighbour));
    else
        copy_tile(to, map, column, token_base, barrier);
}

struct NothingMore {
    __device__ __forceinline__ int bytes(int) const { return 0; }
    __device__ __forceinline__ void load(int, int, int, u32) const {}
};

// Another warp: the activations, BOXES of 128 bytes of each token and block of K, into x[stage]. more: what comes with
// the stage that begins with a segment's block `done`, bytes(done) and load(done, k, token_base, barrier).
template <int BOXES, class X, class More>
__device__ __forceinline__ void load_tokens(
    Pipeline& pipeline, X& x, const Problem& p, const Place& place, const TensorMap& x_map, More more) {
    constexpr int BOX_BYTES = TOKENS * 128;
    prefetch_map(x_map);
    wait_for_previous_kernel();
    if constexpr (SHARE > 1) cluster_wait();
    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base;
        for (int k = segment.k_begin, stage = 0; k < segment.k_end; k += STAGE_BLOCKS) {
            const u32 barrier = shared_address(&pipeline.full[stage]);
            const int boxes = min(segment.k_end - k, STAGE_BLOCKS) * BOXES;
            barrier_wait(shared_address(&pipeline.empty[stage]), phases.next(stage) ^ 1);
            expect_once(barrier, boxes * BOX_BYTES + more.bytes(k - segment.k_begin));
            for (int box = 0; box < boxes; ++box)
                load_box(
                    shared_address(x[stage]) + box * BOX_BYTES, x_map, k * 128 + box * (128 / BOXES),
                    token_base, barrier, place);
            more.load(k - segment.k_begin, k, token_base, barrier);
            if (++stage == STAGES) stage = 0;
        }
    }
}

// The block's beginning, by all its threads. Returns a warp's role: from 0 on those that load, below those that multiply.
// Warps of one role stay together, so that the compiler can keep addresses in uniform registers.
__device__ __forceinline__ int start(Pipeline& pipeline) {
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive();
    let_next_kernel_start();
    return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0) - CONSUMERS / 32;
}

// What a warp does that loads. more: as `load_tokens` takes it.
template <int BOXES, class Shared, class More>
__device__ __forceinline__ void feed(
    int role, Shared& shared, const Problem& p, const Place& place, const u8* weights, const TensorMap& x_map, More more) {
    if (role == 0) load_weights(shared.pipeline, shared.weights, p, place, weights);
    if (role == 1)
        load_tokens<BOXES>(shared.pipeline, shared.x, p, place, x_map, more);
    else if (SHARE > 1)
        cluster_wait();
    leave_together();
}

// A thread's eight words of a block's codes, four in each half of the block, are gone through in STEPS steps: those of
// one step.
template <int STEPS>
__device__ __forceinline__ void load_codes(u32 (&codes)[8 / STEPS], const u8* block, int step) {
    constexpr int WORDS = STEPS == 1 ? 4 : 8 / STEPS, VECTORS = 8 / STEPS / WORDS, IN_HALF = 4 / WORDS;
    struct alignas(WORDS * 4) Vector {
        u32 words[WORDS];
    };
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int half = (step * VECTORS + i) / IN_HALF, in_half = (step * VECTORS + i) % IN_HALF;
        const Vector vector = reinterpret_cast<const Vector*>(block)[(half * 128 + threadIdx.x % 128) * IN_HALF + in_half];
#pragma unroll
        for (int j = 0; j < WORDS; ++j) codes[i * WORDS + j] = vector.words[j];
    }
}

// A warpgroup's products of `blocks` blocks of K whose sums stay in the tensor cores, each in STEPS steps. SETS: how many
// steps' codes have registers of their own: the next step's are converted while this one's and the one before are
// multiplied. EARLY: meanwhile the codes of the step after the next one are on their way from shared memory.
// load(stage, step): fetches codes. take(stage, step, set): converts them. multiply(stage, step, set): begins products and
// commits them.
template <int STEPS, int SETS, bool EARLY, class Load, class Take, class Multiply>
__device__ __forceinline__ void accumulate(
    Pipeline& pipeline, Phases& phases, const Place& place, int blocks, Load load, Take take, Multiply multiply) {
    constexpr int BLOCKS = 8 / STAGES * STAGES, ROUND = BLOCKS * STEPS;  // unrolled, so that stages and sets are constants
    static_assert(ROUND > 0 && ROUND % SETS == 0 && SETS >= 2);
    // Where step r has begun, step r + 1, or early r + 2, is waited for, and a stage may still be held by step r, or with
    // more than two sets by step r - 1.
    constexpr int HELD = (SETS > 2 ? 1 : 0) + (EARLY ? 2 : 1);
    static_assert((HELD + STEPS - 1) / STEPS < STAGES, "a stage is waited for that has not been left");
    auto stage_of = [](int r) { return r / STEPS % STAGES; };
    auto load_step = [&](int r) {
        if (r % STEPS == 0) barrier_wait(shared_address(&pipeline.full[stage_of(r)]), phases.next(stage_of(r)));
        load(stage_of(r), r % STEPS);
    };
    // more: whether there is a step after this one.
    auto fetch = [&](int r, bool more) {
        if (!EARLY) load_step(r % ROUND);
        take(stage_of(r), r % STEPS, r % SETS);
        if (EARLY && more) load_step((r + 1) % ROUND);
    };
    auto leave = [&](int r) {
        if (r % STEPS == STEPS - 1) pipeline.leave(stage_of(r), place);
    };
    int left = blocks;
    if (EARLY && left > 0) load_step(0);
    if (left > 0) fetch(0, STEPS > 1 || left > 1);
    for (; left >= BLOCKS; left -= BLOCKS) {  // products in flight do not outlive a round
        auto is_any = [&](int r) { return r < ROUND || r / STEPS < left; };  // no branch but for what follows the round
#pragma unroll
        for (int r = 0; r < ROUND; ++r) {
            auto end_before = [&] {
                if (r == 0) return;
                mma_wait<1>();
                leave(r - 1);
            };
            multiply(stage_of(r), r % STEPS, r % SETS);
            if (SETS == 2) end_before();
            if (is_any(r + 1)) fetch(r + 1, is_any(r + 2));
            if (SETS > 2) end_before();
        }
        mma_wait<0>();
        leave(ROUND - 1);
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        if (block >= left) break;
        auto is_any = [&](int r) { return r / STEPS == block || r / STEPS < left; };
#pragma unroll
        for (int r = block * STEPS; r < (block + 1) * STEPS; ++r) {
            multiply(stage_of(r), r % STEPS, r % SETS);
            if (is_any(r + 1)) fetch(r + 1, is_any(r + 2));
            mma_wait<0>();
            leave(r);
        }
    }
}
