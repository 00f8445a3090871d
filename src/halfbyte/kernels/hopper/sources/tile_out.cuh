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
static_assert(STAGED || SENT_BYTES == 4, "a piece is of one eight of tokens");

template <int SENDERS>
struct Exchange {
    alignas(16) uint4 sent[SENDERS][OWN_PIECES];
};
template <>
struct Exchange<0> {};

// Totals on their way to other blocks are words.
__device__ __forceinline__ u32 word_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 word_of(int sum) { return static_cast<u32>(sum); }
__device__ __forceinline__ void add_word(float& sum, u32 word) { sum += __uint_as_float(word); }
__device__ __forceinline__ void add_word(int& sum, u32 word) { sum += static_cast<int>(word); }
struct Staged : Exchange<SPLIT - 1> {
    alignas(STAGED ? 1024 : 16) u8 out[STAGED ? WARPGROUPS : 1][STAGED ? STAGED_BUFFERS * STAGED_BYTES : 16];
};

// A warpgroup's sums of a segment that does not begin its tile, for the cluster that does. of(j): this thread's sum j.
template <class Of>
__device__ __forceinline__ void give_sums(const Problem& p, Of of) {
    uint4* const to = p.partials + static_cast<u64>(blockIdx.x) * QUADS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 4; ++j)
        to[j * CONSUMERS] =
            make_uint4(word_of(of(4 * j)), word_of(of(4 * j + 1)), word_of(of(4 * j + 2)), word_of(of(4 * j + 3)));
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
        const uint4* const from = p.partials + static_cast<u64>(block) * QUADS + threadIdx.x;
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / 4; ++j) {
            const uint4 more = load_fresh(from + j * CONSUMERS);
            add_word(of(4 * j), more.x), add_word(of(4 * j + 1), more.y);
            add_word(of(4 * j + 2), more.z), add_word(of(4 * j + 3), more.w);
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

// Sums to the blocks that add them up, and others' of this block's own. of(j): this thread's sum j.
template <class Of>
__device__ __forceinline__ void exchange(Pipeline& pipeline, Staged& staged, const Place& place, int thread, Of of) {
    const u32 buffer = shared_address(staged.sent), barrier = shared_address(&pipeline.reduced);
    meet_warpgroup();  // what `finished` reads has been written
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / PIECE_SUMS; ++j) {
        const u32 piece = j * CONSUMERS + thread, owner = piece / OWN_PIECES;
        if (owner == place.part) continue;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (SENT_BYTES == 4) words[i] = word_of(of(4 * j + i));
            else words[i] = Half::pack(of(8 * j + 2 * i), of(8 * j + 2 * i + 1));
        }
        const u32 sender = (place.part + SPLIT - 1 - owner) % SPLIT, block = owner * SHARE + place.neighbour;
        store_remote(
            remote_address(buffer + (sender * OWN_PIECES + piece % OWN_PIECES) * 16, block), remote_address(barrier, block),
            words);
    }
    barrier_wait_cluster(barrier, 0);
}

// To a piece of this block's own sums, what others have sent of it.
template <int SENDERS>
__device__ __forceinline__ void add_sent(Total (&sums)[PIECE_SUMS], const Exchange<SENDERS>& received, int piece) {
#pragma unroll
    for (int sender = 0; sender < SENDERS; ++sender) {
        const uint4 more = received.sent[sender][piece];
        const u32 words[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
        for (int i = 0; i < PIECE_SUMS; ++i) {
            if constexpr (SENT_BYTES == 4) add_word(sums[i], words[i]);
            else sums[i] += Half::of_pair(words[i / 2], i % 2).value();
        }
    }
}

// A number for each of a tile's tokens to shared memory, for a warpgroup of whoever finishes the tile, while products run.
template <class Number>
__device__ __forceinline__ void fetch_of_tokens(
    Number (&to)[TOKENS], const Number* of_tokens, int token_base, const Problem& p) {
#pragma unroll
    for (int i = threadIdx.x % 128; i < TOKENS; i += 128)
        copy_number(shared_address(&to[i]), of_tokens + token_base + i, token_base + i < p.tokens);
}

// They are there, times `factor`, after the warpgroup has met.
__device__ __forceinline__ void await_scales(float (&scales)[TOKENS], float factor) {
    copied_numbers();
#pragma unroll
    for (int i = threadIdx.x % 128; i < TOKENS; i += 128) scales[i] *= factor;
}

// Some of a warpgroup's staged tokens to memory, by its threads: where others' rows follow, which no copy may touch.
__device__ __forceinline__ void copy_rows_out(
    Out* __restrict__ to, const u8* staged, int rows, int features, const Problem& p) {
    for (int i = thread_now() % 128; i < STAGED_TOKENS * 8; i += 128) {
        const int row = i / 8, piece = i % 8;
        if (row < rows && piece * 8 < features)
            *reinterpret_cast<uint4*>(to + static_cast<u64>(row) * p.features + piece * 8) =
                *reinterpret_cast<const uint4*>(staged + row * 128 + ((piece ^ row % 8) << 4));
    }
}

// A finished tile to memory, by its warpgroups. of(j): this thread's sum j. of_feature(n, i): what `finished` wants to know
// of feature n of the matrix, this thread's row i. finished(sum, m, about): the result for token m of the tile and that
// feature.
template <class Of, class OfFeature, class Finished>
__device__ __forceinline__ void store_tile(
    Pipeline& pipeline, Staged& staged, const Problem& p, const Place& place, const TensorMap& out_map, int feature_base,
    const Segment& segment, Of of, OfFeature of_feature, Finished finished, Out* out) {
    // Read anew, or else the compiler computes addresses before the loop and has them in its way all along.
    const int thread = thread_now(), lane = thread & 31, warpgroup = thread / 128, warp = thread / 32 % 4;
    const int token_base = segment.token_base;
    if constexpr (!STAGED) {
        exchange(pipeline, staged, place, thread, of);
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / PIECE_SUMS; ++j) {
            const u32 piece = j * CONSUMERS + thread;
            if (piece / OWN_PIECES != place.part) continue;
            Total values[PIECE_SUMS];
#pragma unroll
            for (int e = 0; e < PIECE_SUMS; ++e) values[e] = of(PIECE_SUMS * j + e);
            add_sent(values, staged, piece % OWN_PIECES);
#pragma unroll
            for (int e = 0; e < PIECE_SUMS; ++e) {
                const int row = e / 2 % 2, n = feature_base + warpgroup * 64 + warp * 16 + lane / 4 + row * 8;
                const int m = (PIECE_SUMS * j + e) / 4 * 8 + lane % 4 * 2 + e % 2;
                if (n < p.features && token_base + m < segment.tokens(p))
                    out[static_cast<u64>(token_base + m) * p.features + n] =
                        Out::of(finished(values[e], m, of_feature(n, row)));
            }
        }
    } else {
        constexpr int OWN_SUMS = OWN_TOKENS / 2;
        Total own[SPLIT > 1 ? OWN_SUMS / PIECE_SUMS : 1][PIECE_SUMS];
        int first_token = 0;  // in the tile, of those that are this block's
        if constexpr (SPLIT > 1) {
            exchange(pipeline, staged, place, thread, of);
            first_token = place.part * OWN_TOKENS;
#pragma unroll
            for (int i = 0; i < OWN_SUMS / PIECE_SUMS; ++i) {
#pragma unroll
                for (int e = 0; e < PIECE_SUMS; ++e) {
#pragma unroll
                    for (u32 part = 0; part < SPLIT; ++part)
                        if (part == place.part) own[i][e] = of(part * OWN_SUMS + i * PIECE_SUMS + e);
                }
                add_sent(own[i], staged, i * CONSUMERS + thread);
            }
        }
        auto own_of = [&](int j) {
            if constexpr (SPLIT > 1) return own[j / PIECE_SUMS][j % PIECE_SUMS];
            else return of(j);
        };
        const int feature = feature_base + warpgroup * 64, column = lane % 4 * 2, in_eight = lane % 8;
        const int first_row = feature + warp * 16 + lane / 4;
        const auto low = of_feature(first_row, 0), high = of_feature(first_row + 8, 1);
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
            const int token = token_base + first_token + first, rows = segment.tokens(p) - token;
            if (GROUPED && rows < STAGED_TOKENS) {
                const u8* of_chunk = staged.out[warpgroup] + chunk % STAGED_BUFFERS * STAGED_BYTES;
                copy_rows_out(out + static_cast<u64>(token) * p.features + feature, of_chunk, rows, p.features - feature, p);
            } else if (thread % 128 == 0 && feature < p.features) {
                copy_tile_out(out_map, feature, token, to);
            }
        }
    }
}

// Shared memory is not given up while copies still read it.
__device__ __forceinline__ void finish_stores() {
    if (STAGED && threadIdx.x % 128 == 0) wait_for_copies_out<0>();
}
