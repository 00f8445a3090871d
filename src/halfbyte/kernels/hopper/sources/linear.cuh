// What the linear kernels share: out[m, n] = sum_k x[m, k] w[n, k], weights as the left operand of the matrix
// instruction, from registers. A warpgroup computes 64 output features x TOKENS tokens, a block TILE_ROWS features; it
// goes through K in stages of 128 inputs, STAGES of them in flight. Blocks form clusters of SHARE x SPLIT: SHARE blocks
// with neighbouring features load each activation once for all of them (multicast); SPLIT blocks divide K and add up
// in each other's shared memory.
//
// The including file defines TOKENS, TILE_ROWS, SPLIT, SHARE, STAGES, BLOCKS_PER_SM, GROUP_SIZE, ZERO_POINTS, COLUMNS,
// SHARED_BYTES, Scale, Out.
#pragma once
#include "hopper.cuh"

constexpr int WARPGROUPS = TILE_ROWS / 64;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;  // one more warpgroup, whose warps feed the others
constexpr int CLUSTER = SHARE * SPLIT;

constexpr int GROUPS = 128 / GROUP_SIZE;  // in one stage
constexpr int SCALES_BYTES = 64 * GROUPS * sizeof(Scale);
constexpr int ZEROS_BYTES = ZERO_POINTS ? 64 * GROUPS * 2 : 0;
constexpr int BLOCK_BYTES = 4096 + SCALES_BYTES + ZEROS_BYTES;  // 64 features x 128 inputs: blocks.py

// A warpgroup may take its tokens in parts, so that one part's products run while the one before is promoted.
constexpr int PARTS = TOKENS / COLUMNS;
constexpr int PART_SUMS = COLUMNS / 2;
constexpr int ACCUMULATORS = TOKENS / 2;
constexpr int QUADS = ACCUMULATORS / 4 * CONSUMERS;  // sums of a tile, in fours
constexpr int PITCH = TILE_ROWS + 8;                 // of the staged output, against bank conflicts

template <int PRODUCER_REGISTERS>
struct Registers {
    static constexpr int LAUNCH = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;
    static constexpr int LEFT = (LAUNCH * THREADS - PRODUCER_REGISTERS * 128) / CONSUMERS / 8 * 8;
    static constexpr int CONSUMER = LEFT < 240 ? LEFT : 240;
};

struct Problem {
    int tokens, features, groups, blocks_k, rows64, sums_pitch, raster;
};

// Which part of the work is this block's.
struct Place {
    u32 rank, neighbour, part;
    int first_item, item_step, k_begin, k_end;
    __device__ __forceinline__ explicit Place(const Problem& p)
        : rank(CLUSTER > 1 ? cluster_rank() : 0),
          neighbour(rank % SHARE),
          part(rank / SHARE),
          first_item(blockIdx.x / CLUSTER),
          item_step(gridDim.x / CLUSTER),
          k_begin(p.blocks_k * part / SPLIT),
          k_end(p.blocks_k * (part + 1) / SPLIT) {}
};

// Which tile comes when: `raster` tiles of tokens at a time, so that blocks running together share what is in L2.
struct Tiles {
    int along_features, along_tokens, raster;
    __device__ __forceinline__ explicit Tiles(const Problem& p)
        : along_features((p.features + TILE_ROWS * SHARE - 1) / (TILE_ROWS * SHARE)),
          along_tokens((p.tokens + TOKENS - 1) / TOKENS),
          raster(p.raster) {}
    __device__ __forceinline__ int count() const { return along_features * along_tokens; }
    __device__ __forceinline__ void at(int item, int& feature_tile, int& token_base) const {
        const int width = raster * along_features, first = item / width * raster;
        const int high = min(raster, along_tokens - first), inside = item % width;
        token_base = (first + inside % high) * TOKENS;
        feature_tile = inside / high * SHARE;
    }
};

// Which parity each stage's barrier has next. Every tile begins with stage 0, so that stages are constants in the
// consumers' unrolled loop; a stage that a tile does not reach keeps its parity.
struct Phases {
    u32 bits = 0;
    __device__ __forceinline__ u32 next(int stage) {
        const u32 parity = bits >> stage & 1;
        bits ^= 1u << stage;
        return parity;
    }
};

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
        if constexpr (SPLIT > 1) barrier_expect(shared_address(&reduced), QUADS * 16);
    }

    // By a warp that has read all it needs of a stage.
    __device__ __forceinline__ void leave(int stage, const Place& place) {
        __syncwarp();
        const int lane = threadIdx.x & 31;
        if constexpr (SHARE > 1) {
            if (lane < SHARE) barrier_arrive_remote(shared_address(&empty[stage]), place.rank - place.neighbour + lane);
        } else {
            if (lane == 0) barrier_arrive(shared_address(&empty[stage]));
        }
    }
};

// A tile on its way out, not more than 64 tokens at a time.
constexpr int STAGED_TOKENS = TOKENS < 64 ? TOKENS : TOKENS % 64 == 0 ? 64 : 32;
static_assert(TOKENS % STAGED_TOKENS == 0);

union Staged {
    alignas(16) float4 partial[SPLIT > 1 ? QUADS : 1];  // [source][this block's share]
    alignas(16) u16 out[SPLIT > 1 ? 1 : STAGED_TOKENS][PITCH];
};

// Nobody leaves while others may still send activations. (Parts of sums are waited for by who receives them.)
__device__ __forceinline__ void leave_together() {
    if constexpr (SHARE > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}

// One warp: the blocks of weights, stage by stage, into weights[stage][warpgroup]; with KEEP their scales and zero
// points once more, into kept[count of stages % KEEP][warpgroup]. Weights do not depend on the previous kernel, so this
// does not wait for it.
template <int KEEP, class Weights, class Kept>
__device__ __forceinline__ void load_weights(
    Pipeline& pipeline, Weights& to, Kept& kept, const Problem& p, const Place& place, const u8* weights) {
    const u64 policy = policy_evict_first();
    const Tiles tiles(p);
    Phases phases;
    u32 count = 0;
    for (int item = place.first_item; item < tiles.count(); item += place.item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const u8* from[WARPGROUPS];
#pragma unroll
        for (int w = 0; w < WARPGROUPS; ++w) {
            const int row64 = min((feature_tile + static_cast<int>(place.neighbour)) * WARPGROUPS + w, p.rows64 - 1);
            from[w] = weights + (static_cast<u64>(row64) * p.blocks_k + place.k_begin) * BLOCK_BYTES;
        }
        for (int k = place.k_begin, stage = 0; k < place.k_end; ++k) {
            const u32 barrier = shared_address(&pipeline.full[stage]);
            barrier_wait(shared_address(&pipeline.empty[stage]), phases.next(stage) ^ 1);
            expect_once(barrier, WARPGROUPS * (BLOCK_BYTES + (KEEP ? SCALES_BYTES + ZEROS_BYTES : 0)));
#pragma unroll
            for (int w = 0; w < WARPGROUPS; ++w) {
                copy_bulk(shared_address(to[stage][w]), from[w], BLOCK_BYTES, barrier, policy);
                if constexpr (KEEP > 0)
                    copy_bulk(
                        shared_address(kept[count % KEEP][w]), from[w] + 4096, SCALES_BYTES + ZEROS_BYTES, barrier, policy);
                from[w] += BLOCK_BYTES;
            }
            ++count;
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
    __device__ __forceinline__ int bytes(int, int) const { return 0; }
    __device__ __forceinline__ void load(int, int, int, u32) const {}
};

// Another warp: the activations, BOXES of 128 bytes of each token a stage, into x[stage]. more: what comes with them,
// bytes(k, token_base) and load(stage, k, token_base, barrier).
template <int BOXES, class X, class More>
__device__ __forceinline__ void load_tokens(
    Pipeline& pipeline, X& x, const Problem& p, const Place& place, const TensorMap& x_map, const More& more) {
    constexpr int BOX_BYTES = TOKENS * 128;
    prefetch_map(x_map);
    wait_for_previous_kernel();
    if constexpr (SHARE > 1) cluster_wait();
    const Tiles tiles(p);
    Phases phases;
    for (int item = place.first_item; item < tiles.count(); item += place.item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        for (int k = place.k_begin, stage = 0; k < place.k_end; ++k) {
            const u32 barrier = shared_address(&pipeline.full[stage]);
            barrier_wait(shared_address(&pipeline.empty[stage]), phases.next(stage) ^ 1);
            expect_once(barrier, BOXES * BOX_BYTES + more.bytes(k, token_base));
#pragma unroll
            for (int box = 0; box < BOXES; ++box)
                load_box(
                    shared_address(x[stage]) + box * BOX_BYTES, x_map, k * 128 + box * (128 / BOXES),
                    token_base, barrier, place);
            more.load(stage, k, token_base, barrier);
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

// The tile's sums to memory, by all consumers. of(j): this thread's sum j; finished(sum, m, n): the result for token m
// of the tile and feature n of the matrix.
template <class Of, class Finished>
__device__ __forceinline__ void store_tile(
    Pipeline& pipeline, Staged& staged, const Problem& p, const Place& place, int feature_base, int token_base, Of of,
    Finished finished, Out* out) {
    const int thread = threadIdx.x, lane = thread & 31, warpgroup = thread / 128;
    const int row = thread / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    if constexpr (SPLIT > 1) {
        constexpr int PART = QUADS / SPLIT;
        const u32 buffer = shared_address(staged.partial), barrier = shared_address(&pipeline.reduced);
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / 4; ++j) {
            const int quad = j * CONSUMERS + thread;
            const u32 owner = quad / PART * SHARE + place.neighbour;
            store_remote(
                remote_address(buffer + (place.part * PART + quad % PART) * 16, owner), remote_address(barrier, owner),
                of(4 * j), of(4 * j + 1), of(4 * j + 2), of(4 * j + 3));
        }
        barrier_wait_cluster(barrier, 0);
        for (int i = thread; i < PART; i += CONSUMERS) {
            float4 sum = staged.partial[i];
#pragma unroll
            for (int source = 1; source < SPLIT; ++source) {
                const float4 more = staged.partial[source * PART + i];
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            const int quad = place.part * PART + i, from = quad % CONSUMERS;
            const int feature = feature_base + from / 128 * 64 + from / 32 % 4 * 16 + from % 32 / 4;
            const int token = quad / CONSUMERS * 8 + from % 4 * 2;
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int n = feature + e / 2 * 8, m = token + e % 2;
                if (n < p.features && token_base + m < p.tokens)
                    out[static_cast<u64>(token_base + m) * p.features + n] = finished(values[e], m, n);
            }
        }
    } else {
#pragma unroll
        for (int first = 0; first < TOKENS; first += STAGED_TOKENS) {
            if (first > 0) named_barrier(1, CONSUMERS);
#pragma unroll
            for (int j = 0; j < STAGED_TOKENS / 2; ++j) {
                const int n = warpgroup * 64 + row + j / 2 % 2 * 8, m = j / 4 * 8 + column + j % 2;
                staged.out[m][n] = finished(of(first / 2 + j), first + m, feature_base + n).bits;
            }
            named_barrier(1, CONSUMERS);
            constexpr int CHUNKS = TILE_ROWS / 8;
            for (int i = thread; i < STAGED_TOKENS * CHUNKS; i += CONSUMERS) {
                const int m = token_base + first + i / CHUNKS, n = feature_base + i % CHUNKS * 8;
                if (m < p.tokens && n < p.features)
                    *reinterpret_cast<uint4*>(out + static_cast<u64>(m) * p.features + n) =
                        *reinterpret_cast<const uint4*>(&staged.out[i / CHUNKS][i % CHUNKS * 8]);
            }
        }
    }
}
