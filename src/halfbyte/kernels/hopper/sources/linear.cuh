// What the linear kernels share: out[m, n] = sum_k x[m, k] w[n, k], weights as the left operand of the matrix
// instruction, from registers. A warpgroup computes 64 output features x TOKENS tokens, a block TILE_ROWS features; it
// goes through K in stages of STAGE_BLOCKS x 128 inputs, STAGES of them in flight. Blocks form clusters of SHARE x SPLIT: SHARE blocks
// with neighbouring features load each activation once for all of them (multicast); SPLIT blocks divide K and add up
// in each other's shared memory.
//
// The including file defines TOKENS, TILE_ROWS, SPLIT, SHARE, STAGES, STAGE_BLOCKS, STREAM, BLOCKS_PER_SM, GROUP_SIZE, ZERO_POINTS, COLUMNS,
// SHARED_BYTES, Scale, Out.
#pragma once
#include "hopper.cuh"

constexpr int WARPGROUPS = TILE_ROWS / 64;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;  // one more warpgroup, whose warps feed the others
constexpr int CLUSTER = SHARE * SPLIT;
static_assert(STAGES >= 2);
static_assert(!STREAM || SPLIT == 1, "K is divided in one way or the other");

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
    int tokens, features, blocks_k, rows64, raster;
    int streamed, quantum;  // tiles that all blocks divide; K is divided by so many blocks: Schedule
    float4* partials;       // sums of tiles that are not finished, for each block QUADS
    u32* flags;             // for each block and warpgroup: whether its are there; all zero between kernels
};

// Which part of its cluster's work is this block's.
struct Place {
    u32 rank, neighbour, part;
    __device__ __forceinline__ Place()
        : rank(CLUSTER > 1 ? cluster_rank() : 0), neighbour(rank % SHARE), part(rank / SHARE) {}
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

// Blocks of K from k_begin to k_end of one tile.
struct Segment {
    int feature_tile, token_base, k_begin, k_end;
};

// The segments of one cluster: its share of the first `streamed` tiles, which are divided evenly whatever their number,
// then whole tiles. What is missing of a tile that a cluster begins and does not finish, the clusters after it have
// done first of all, so that nobody waits for long (stream-K: Osama et al., PPoPP 2023).
struct Schedule {
    const Problem& p;
    const Tiles tiles;
    const u32 part;
    int item, at = 0, end = 0;
    __device__ __forceinline__ Schedule(const Problem& problem, const Place& place)
        : p(problem), tiles(problem), part(place.part), item(problem.streamed + static_cast<int>(cluster())) {
        if constexpr (STREAM) at = first_of(cluster()), end = first_of(cluster() + 1);
    }
    __device__ __forceinline__ static u32 cluster() { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ static u32 clusters() { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ int quanta() const { return (p.blocks_k + p.quantum - 1) / p.quantum; }  // of a tile
    // Where in the streamed tiles a cluster begins, in quanta.
    __device__ __forceinline__ int first_of(u32 cluster) const {
        return static_cast<int>(static_cast<u32>(p.streamed * quanta()) * cluster / clusters());
    }
    __device__ __forceinline__ bool next(Segment& s) {
        if constexpr (STREAM) {
            if (at < end) {
                const int tile = at / quanta(), begin = at % quanta(), stop = min(quanta(), begin + end - at);
                tiles.at(tile, s.feature_tile, s.token_base);
                s.k_begin = begin * p.quantum;
                s.k_end = min(stop * p.quantum, p.blocks_k);
                at += stop - begin;
                return true;
            }
        }
        if (item >= tiles.count()) return false;
        tiles.at(item, s.feature_tile, s.token_base);
        s.k_begin = min(static_cast<int>(quanta() * part / SPLIT) * p.quantum, p.blocks_k);
        s.k_end = min(static_cast<int>(quanta() * (part + 1) / SPLIT) * p.quantum, p.blocks_k);
        item += clusters();
        return true;
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

// Blocks that divide K add up some of the tile's tokens each; where that is whole eights of tokens, they leave as a whole
// tile does.
constexpr bool STAGED = TOKENS / 8 % SPLIT == 0;
constexpr int OWN_TOKENS = STAGED ? TOKENS / SPLIT : TOKENS;

// Tokens on their way out, not more than 64 at a time: each warpgroup's part by itself, in rows of 128 bytes whose pieces
// of 16 bytes are permuted as the accelerator does it (swizzle).
constexpr int STAGED_TOKENS = OWN_TOKENS < 64 ? OWN_TOKENS : OWN_TOKENS % 64 == 0 ? 64 : 32;
static_assert(OWN_TOKENS % STAGED_TOKENS == 0);

template <bool EXCHANGES>
struct Exchange {
    alignas(16) float4 partial[QUADS];  // [source][this block's share]
};
template <>
struct Exchange<false> {};

struct Staged : Exchange<(SPLIT > 1)> {
    alignas(STAGED ? 1024 : 16) u8 out[STAGED ? WARPGROUPS : 1][STAGED ? STAGED_TOKENS * 128 : 16];
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
            from[w] = weights + (static_cast<u64>(row64) * p.blocks_k + segment.k_begin) * BLOCK_BYTES;
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

// A warpgroup's products of `blocks` blocks of K whose sums stay in the tensor cores, each in STEPS steps. SETS: how many
// steps' codes have registers of their own: the next step's are converted while this one's and the one before are
// multiplied. take(stage, step, set): converts codes. multiply(stage, step, set): begins products and commits them.
template <int STEPS, int SETS, class Take, class Multiply>
__device__ __forceinline__ void accumulate(
    Pipeline& pipeline, Phases& phases, const Place& place, int blocks, Take take, Multiply multiply) {
    constexpr int BLOCKS = 8 / STAGES * STAGES, ROUND = BLOCKS * STEPS;  // unrolled, so that stages and sets are constants
    static_assert(ROUND > 0 && ROUND % SETS == 0 && SETS >= 2);
    auto stage_of = [](int r) { return r / STEPS % STAGES; };
    auto fetch = [&](int r) {
        if (r % STEPS == 0) barrier_wait(shared_address(&pipeline.full[stage_of(r)]), phases.next(stage_of(r)));
        take(stage_of(r), r % STEPS, r % SETS);
    };
    auto leave = [&](int r) {
        if (r % STEPS == STEPS - 1) pipeline.leave(stage_of(r), place);
    };
    int left = blocks;
    if (left > 0) fetch(0);
    for (; left >= BLOCKS; left -= BLOCKS) {  // no branches inside: products in flight do not outlive a round
#pragma unroll
        for (int r = 0; r < ROUND; ++r) {
            auto end_before = [&] {
                if (r == 0) return;
                mma_wait<1>();
                leave(r - 1);
            };
            multiply(stage_of(r), r % STEPS, r % SETS);
            if (SETS == 2) end_before();
            if (r + 1 < ROUND || left > BLOCKS) fetch((r + 1) % ROUND);
            if (SETS > 2) end_before();
        }
        mma_wait<0>();
        leave(ROUND - 1);
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        if (block >= left) break;
#pragma unroll
        for (int r = block * STEPS; r < (block + 1) * STEPS; ++r) {
            multiply(stage_of(r), r % STEPS, r % SETS);
            if (r + 1 < (block + 1) * STEPS || block + 1 < left) fetch((r + 1) % ROUND);
            mma_wait<0>();
            leave(r);
        }
    }
}

// A warpgroup's sums of a segment that does not begin its tile, for the cluster that does. of(j): this thread's sum j.
template <class Of>
__device__ __forceinline__ void give_sums(const Problem& p, Of of) {
    float4* const to = p.partials + static_cast<u64>(blockIdx.x) * QUADS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 4; ++j)
        to[j * CONSUMERS] = make_float4(of(4 * j), of(4 * j + 1), of(4 * j + 2), of(4 * j + 3));
    __threadfence();
    meet_warpgroup();
    if (threadIdx.x % 128 == 0) raise_flag(p.flags + blockIdx.x * WARPGROUPS + threadIdx.x / 128);
}

// The other way round, after the cluster's last segment of the streamed tiles: what the clusters after it have of this
// tile. of(j): this thread's sum j, to be added to.
template <class Of>
__device__ __forceinline__ void take_sums(const Problem& p, const Schedule& schedule, const Place& place, Of of) {
    const int tile_end = (schedule.end / schedule.quanta() + 1) * schedule.quanta();
    u32 giver = Schedule::cluster();
    for (int at = schedule.end; at < tile_end;) {
        const int until = schedule.first_of(++giver + 1);
        if (until == at) continue;
        at = until;
        const u32 block = giver * CLUSTER + place.rank;
        u32* const flag = p.flags + block * WARPGROUPS + threadIdx.x / 128;
        wait_for_flag(flag);
        const float4* const from = p.partials + static_cast<u64>(block) * QUADS + threadIdx.x;
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / 4; ++j) {
            const float4 more = load_shared_by_blocks(from + j * CONSUMERS);
            of(4 * j) += more.x, of(4 * j + 1) += more.y, of(4 * j + 2) += more.z, of(4 * j + 3) += more.w;
        }
        meet_warpgroup();
        if (threadIdx.x % 128 == 0) *flag = 0;
    }
}

// Parts of sums to the blocks that add them up, and this block's back. of(j): this thread's sum j. Returns where they are:
// quad i of this block's share is the sum of `SPLIT` quads, QUADS / SPLIT apart.
template <class Of>
__device__ __forceinline__ const float4* exchange(Pipeline& pipeline, Staged& staged, const Place& place, int thread, Of of) {
    constexpr int PART = QUADS / SPLIT;
    const u32 buffer = shared_address(staged.partial), barrier = shared_address(&pipeline.reduced);
    meet_warpgroup();  // what `finished` reads has been written
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 4; ++j) {
        const int quad = j * CONSUMERS + thread;
        const u32 owner = quad / PART * SHARE + place.neighbour;
        store_remote(
            remote_address(buffer + (place.part * PART + quad % PART) * 16, owner), remote_address(barrier, owner),
            of(4 * j), of(4 * j + 1), of(4 * j + 2), of(4 * j + 3));
    }
    barrier_wait_cluster(barrier, 0);
    return staged.partial;
}

__device__ __forceinline__ float4 added(const float4* partial, int i) {
    float4 sum = partial[i];
#pragma unroll
    for (int source = 1; source < SPLIT; ++source) {
        const float4 more = partial[source * (QUADS / SPLIT) + i];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
}

// A finished tile to memory, by its warpgroups. of(j): this thread's sum j. of_feature(n): what `finished` wants to know
// of feature n of the matrix. finished(sum, m, about): the result for token m of the tile and that feature.
template <class Of, class OfFeature, class Finished>
__device__ __forceinline__ void store_tile(
    Pipeline& pipeline, Staged& staged, const Problem& p, const Place& place, const TensorMap& out_map, int feature_base,
    int token_base, Of of, OfFeature of_feature, Finished finished, Out* out) {
    // Read anew, or else the compiler computes addresses before the loop and has them in its way all along.
    const int thread = thread_now(), lane = thread & 31, warpgroup = thread / 128, warp = thread / 32 % 4;
    if constexpr (!STAGED) {
        constexpr int PART = QUADS / SPLIT;
        const float4* const partial = exchange(pipeline, staged, place, thread, of);
        for (int i = thread; i < PART; i += CONSUMERS) {
            const float4 sum = added(partial, i);
            const int quad = place.part * PART + i, from = quad % CONSUMERS;
            const int feature = feature_base + from / 128 * 64 + from / 32 % 4 * 16 + from % 32 / 4;
            const int token = quad / CONSUMERS * 8 + from % 4 * 2;
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int n = feature + e / 2 * 8, m = token + e % 2;
                if (n < p.features && token_base + m < p.tokens)
                    out[static_cast<u64>(token_base + m) * p.features + n] = Out::of(finished(values[e], m, of_feature(n)));
            }
        }
    } else {
        float own[SPLIT > 1 ? OWN_TOKENS / 2 : 1];
        int first_token = 0;  // in the tile, of those that are this block's
        if constexpr (SPLIT > 1) {
            const float4* const partial = exchange(pipeline, staged, place, thread, of);
            first_token = place.part * OWN_TOKENS;
#pragma unroll
            for (int j = 0; j < OWN_TOKENS / 8; ++j) {
                const float4 sum = added(partial, j * CONSUMERS + thread);
                own[4 * j] = sum.x, own[4 * j + 1] = sum.y, own[4 * j + 2] = sum.z, own[4 * j + 3] = sum.w;
            }
        }
        auto own_of = [&](int j) {
            if constexpr (SPLIT > 1) return own[j];
            else return of(j);
        };
        const int feature = feature_base + warpgroup * 64, column = lane % 4 * 2, in_eight = lane % 8;
        const auto low = of_feature(feature + warp * 16 + lane / 4), high = of_feature(feature + warp * 16 + lane / 4 + 8);
        const u32 buffer = shared_address(staged.out[warpgroup]);
        const u32 to = buffer + in_eight * 128 + ((warp * 2 + lane / 8 % 2 ^ in_eight) << 4);
#pragma unroll
        for (int first = 0; first < OWN_TOKENS; first += STAGED_TOKENS) {
            if (thread % 128 == 0) wait_for_copies_out();  // the buffer is free
            meet_warpgroup();
            u32 packed[STAGED_TOKENS / 8][2];
#pragma unroll
            for (int i = 0; i < STAGED_TOKENS / 8; ++i) {
                const int m = first_token + first + i * 8 + column, j = first / 2 + i * 4;
                packed[i][0] = Out::pack(finished(own_of(j), m, low), finished(own_of(j + 1), m + 1, low));
                packed[i][1] = Out::pack(finished(own_of(j + 2), m, high), finished(own_of(j + 3), m + 1, high));
            }
#pragma unroll
            for (int i = 0; i < STAGED_TOKENS / 8; ++i) store_transposed(to + i * 1024, packed[i][0], packed[i][1]);
            copy_engine_fence();
            meet_warpgroup();
            if (thread % 128 == 0 && feature < p.features)
                copy_tile_out(out_map, feature, token_base + first_token + first, buffer);
        }
    }
}

// Shared memory is not given up while copies still read it.
__device__ __forceinline__ void finish_stores() {
    if (STAGED && threadIdx.x % 128 == 0) wait_for_copies_out();
}
