// How sums of a tile meet, and how it leaves when it is finished. Part of linear.cuh.
#pragma once

// Blocks that divide K add up some of the tile's tokens each; where that is whole eights of tokens, they leave as a whole
// tile does.
constexpr bool STAGED = TOKENS / 8 % SPLIT == 0;
constexpr int OWN_TOKENS = STAGED ? TOKENS / SPLIT : TOKENS;

// Tokens on their way out, not more than 64 at a time: each warpgroup's part by itself, in rows of 128 bytes whose pieces
// of 16 bytes are permuted as the accelerator does it (swizzle). Of more than 64, some are written while others leave.
constexpr int STAGED_TOKENS = OWN_TOKENS <= 64 ? OWN_TOKENS : 32;
constexpr int STAGED_BUFFERS = OWN_TOKENS <= 64 ? 1 : OWN_TOKENS <= 128 ? 2 : 4;
constexpr int STAGED_BYTES = STAGED_TOKENS * 128;
static_assert(OWN_TOKENS % STAGED_TOKENS == 0);

template <bool EXCHANGES>
struct Exchange {
    alignas(16) float4 partial[QUADS];  // [source][this block's share]
};
template <>
struct Exchange<false> {};

struct Staged : Exchange<(SPLIT > 1)> {
    alignas(STAGED ? 1024 : 16) u8 out[STAGED ? WARPGROUPS : 1][STAGED ? STAGED_BUFFERS * STAGED_BYTES : 16];
};

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

// Whether this cluster finishes the segment's tile. If not, its sums are there for the cluster that does; if so, others'
// have been added to its own.
template <class Of>
__device__ __forceinline__ bool finishes(
    const Problem& p, const Schedule& schedule, const Place& place, const Segment& segment, Of of) {
    if (segment.k_begin > 0) {
        give_sums(p, of);
        return false;
    }
    if (segment.k_end < p.blocks_k) take_sums(p, schedule, place, of);
    return true;
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

// A tile's tokens' scales to shared memory, for a warpgroup of whoever finishes the tile, while products run.
__device__ __forceinline__ void fetch_scales(float (&to)[TOKENS], const float* x_scale, int token_base, const Problem& p) {
#pragma unroll
    for (int i = threadIdx.x % 128; i < TOKENS; i += 128)
        copy_number(shared_address(&to[i]), x_scale + token_base + i, token_base + i < p.tokens);
}

// They are there, times `factor`, after the warpgroup has met.
__device__ __forceinline__ void await_scales(float (&scales)[TOKENS], float factor) {
    copied_numbers();
#pragma unroll
    for (int i = threadIdx.x % 128; i < TOKENS; i += 128) scales[i] *= factor;
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
        const u32 row_of_lane = in_eight * 128 + ((warp * 2 + lane / 8 % 2 ^ in_eight) << 4);
        if (thread % 128 == 0) wait_for_copies_out<0>();  // buffers are free
        meet_warpgroup();
#pragma unroll
        for (int first = 0; first < OWN_TOKENS; first += STAGED_TOKENS) {
            const int chunk = first / STAGED_TOKENS;
            const u32 to = buffer + chunk % STAGED_BUFFERS * STAGED_BYTES;
            u32 packed[STAGED_TOKENS / 8][2];
#pragma unroll
            for (int i = 0; i < STAGED_TOKENS / 8; ++i) {
                const int m = first_token + first + i * 8 + column, j = first / 2 + i * 4;
                packed[i][0] = Out::pack(finished(own_of(j), m, low), finished(own_of(j + 1), m + 1, low));
                packed[i][1] = Out::pack(finished(own_of(j + 2), m, high), finished(own_of(j + 3), m + 1, high));
            }
#pragma unroll
            for (int i = 0; i < STAGED_TOKENS / 8; ++i) store_transposed(to + row_of_lane + i * 1024, packed[i][0], packed[i][1]);
            copy_engine_fence();
            if (STAGED_BUFFERS > 1 && chunk + 1 >= STAGED_BUFFERS && first + STAGED_TOKENS < OWN_TOKENS && thread % 128 == 0)
                wait_for_copies_out<(STAGED_BUFFERS > 1 ? STAGED_BUFFERS - 2 : 0)>();  // the next chunk's buffer is free
            meet_warpgroup();
            if (thread % 128 == 0 && feature < p.features)
                copy_tile_out(out_map, feature, token_base + first_token + first, to);
        }
    }
}

// Shared memory is not given up while copies still read it.
__device__ __forceinline__ void finish_stores() {
    if (STAGED && threadIdx.x % 128 == 0) wait_for_copies_out<0>();
}
