// INT4 weights x FP8 activations, exact group scales: out[m, n] = x_scale[m] sum_k x[m, k] w[n, k] (+ bias[n]).
//
// Weights are the left operand, from registers: a warpgroup computes 64 output features x TOKENS tokens, a block
// TILE_ROWS / 64 warpgroups. A producer thread keeps STAGES stages of 128 inputs in flight, the first ones from before
// the previous kernel has ended. Blocks form clusters of SHARE x SPLIT: SHARE blocks with neighbouring features load
// each activation once for all of them (multicast); SPLIT blocks divide K and add up in each other's shared memory.
//
// Each group of inputs is multiplied unscaled into `sum`, then added times its scale to `total`. A code c is multiplied
// as c + 1/2 (weight_layout.py); what that is too much, and zero points, are the product of `offsets` (scale times
// -(zero point + 1/2)) and the activations' sums over each group. For few tokens that is one more addition for each sum;
// for many it is a matrix product in BF16, sixteen groups at a time, whose operands are split in high and low parts.
#include "hopper.cuh"

constexpr int WARPGROUPS = TILE_ROWS / 64;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;  // one more warpgroup, of which one thread feeds the others
constexpr int PRODUCER_REGISTERS = TOKENS >= 64 ? 56 : 40;
constexpr int LAUNCH_REGISTERS = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;
constexpr int LEFT = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGISTERS = LEFT < 240 ? LEFT : 240;
constexpr int CLUSTER = SHARE * SPLIT;
constexpr int GROUPS = 128 / GROUP_SIZE;  // in one stage
constexpr int SCALES_BYTES = 64 * GROUPS * sizeof(Scale);
constexpr int ZEROS_BYTES = ZERO_POINTS ? 64 * GROUPS * 2 : 0;
constexpr int BLOCK_BYTES = 4096 + SCALES_BYTES + ZEROS_BYTES;
// A warpgroup takes its tokens in parts, so that one part's products run while the one before is promoted.
constexpr int COLUMNS = TOKENS < 64 ? TOKENS : 64;
constexpr int PARTS = TOKENS / COLUMNS;
constexpr int PART_SUMS = COLUMNS / 2;
constexpr int ACCUMULATORS = TOKENS / 2;
constexpr int QUADS = ACCUMULATORS / 4 * CONSUMERS;  // sums of a tile, in fours
constexpr int PITCH = TILE_ROWS + 8;                 // of the staged output, against bank conflicts

constexpr bool MANY = TOKENS >= 64;
constexpr bool AHEAD = MANY && TOKENS <= 128;  // the next codes have registers of their own
constexpr int BATCH = 16;                      // groups whose offsets are multiplied at once
constexpr bool SPLIT_OFFSETS = ZERO_POINTS || !Scale::FITS_BF16;
constexpr int SUM_BYTES = TOKENS * BATCH * 2;  // of one part (high or low) of a batch
constexpr int KEPT = STAGES + BATCH / GROUPS;  // stages whose scales are kept for it, those in flight among them
constexpr float SUM_FACTOR = ZERO_POINTS ? 1.0f : -0.5f / 256;  // what the kept scales are short of
constexpr int KEPT_BYTES = SCALES_BYTES + ZEROS_BYTES;

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    alignas(128) u8 sum_tiles[2][2][MANY ? SUM_BYTES : 16];        // [batch % 2][high, low], many tokens
    alignas(16) u8 kept[MANY ? KEPT : 1][WARPGROUPS][MANY ? KEPT_BYTES : 16];
    alignas(16) float sums[MANY ? 1 : STAGES][GROUPS][TOKENS];  // few tokens
    union {
        alignas(16) float4 partial[SPLIT > 1 ? QUADS : 1];  // [source][this block's share]
        alignas(16) u16 out[SPLIT > 1 ? 1 : TOKENS][PITCH];
    };
    alignas(16) float token_scale[TOKENS];
    alignas(8) u64 full[STAGES];
    alignas(8) u64 empty[STAGES];
    alignas(8) u64 sums_full[2];
    alignas(8) u64 sums_empty[2];
    alignas(8) u64 reduced;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "w4a8_config.py counts less");

struct Problem {
    int tokens, features, groups, blocks_k, rows64, sums_pitch, raster;
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

// Codes of set A and of set B as E4M3 bytes. ones: 0x01010101 in a register; an instruction takes one immediate.
__device__ __forceinline__ void convert(u32 (&a)[4][4], const uint4* words, u32 ones) {
    const uint4 first = words[0], second = words[128];
    const u32 codes[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 low = codes[i] >> 3, sign = codes[i] << 7;
        u32 &set_a = a[i / 2][i % 2 * 2], &set_b = a[i / 2][i % 2 * 2 + 1];
        asm("lop3.b32 %0, %1, 0x8E8E8E8E, %2, 0xEA;" : "=r"(set_a) : "r"(codes[i]), "r"(ones));
        asm("lop3.b32 %0, %1, 0x0E0E0E0E, %2, 0xEA;" : "=r"(set_b) : "r"(low), "r"(ones));
        asm("lop3.b32 %0, %1, 0x80808080, %2, 0xEA;" : "=r"(set_b) : "r"(sign), "r"(set_b));
    }
}

// Nobody leaves while others may still send activations. (Parts of sums are waited for by who receives them.)
__device__ __forceinline__ void leave_together() {
    if constexpr (SHARE > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}

// Walks over stages as they fill and empty.
struct Ring {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// One warp: the blocks of weights, stage by stage. They do not depend on the previous kernel, so it does not wait for it.
__device__ __forceinline__ void load_weights(
    Shared& shared, const Problem& p, const Tiles& tiles, const u8* weights, int first_item, int item_step, int neighbour,
    int k_begin, int k_end) {
    const u64 policy = policy_evict_first();
    Ring ring;
    u32 unit = 0;
    for (int item = first_item; item < tiles.count(); item += item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const u8* from[WARPGROUPS];
#pragma unroll
        for (int w = 0; w < WARPGROUPS; ++w) {
            const int row64 = min((feature_tile + neighbour) * WARPGROUPS + w, p.rows64 - 1);
            from[w] = weights + (static_cast<u64>(row64) * p.blocks_k + k_begin) * BLOCK_BYTES;
        }
        for (int k = k_begin; k < k_end; ++k) {
            const u32 barrier = shared_address(&shared.full[ring.stage]);
            barrier_wait(shared_address(&shared.empty[ring.stage]), ring.phase ^ 1);
            expect_once(barrier, WARPGROUPS * (BLOCK_BYTES + (MANY ? KEPT_BYTES : 0)));
#pragma unroll
            for (int w = 0; w < WARPGROUPS; ++w) {
                copy_bulk(shared_address(shared.weights[ring.stage][w]), from[w], BLOCK_BYTES, barrier, policy);
                if constexpr (MANY)
                    copy_bulk(shared_address(shared.kept[unit % KEPT][w]), from[w] + 4096, KEPT_BYTES, barrier, policy);
                from[w] += BLOCK_BYTES;
            }
            ++unit;
            ring.advance();
        }
    }
}

// Another warp: the activations, and for few tokens their sums.
__device__ __forceinline__ void load_tokens(
    Shared& shared, const Problem& p, const Tiles& tiles, const TensorMap& x_map, const float* sums, int first_item,
    int item_step, int neighbour, int rank, int k_begin, int k_end) {
    constexpr int ROWS = TOKENS / SHARE;
    prefetch_map(x_map);
    wait_for_previous_kernel();
    if constexpr (SHARE > 1) cluster_wait();
    Ring ring;
    for (int item = first_item; item < tiles.count(); item += item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const int sums_bytes = min(TOKENS, p.sums_pitch - token_base) * 4;
        for (int k = k_begin; k < k_end; ++k) {
            const u32 barrier = shared_address(&shared.full[ring.stage]);
            const int groups = MANY ? 0 : min(GROUPS, p.groups - k * GROUPS);
            barrier_wait(shared_address(&shared.empty[ring.stage]), ring.phase ^ 1);
            expect_once(barrier, TOKENS * 128 + groups * sums_bytes);
            const u32 to = shared_address(shared.x[ring.stage]) + neighbour * ROWS * 128;
            if constexpr (SHARE > 1)
                copy_tile_multicast(
                    to, x_map, k * 128, token_base + neighbour * ROWS, barrier, ((1 << SHARE) - 1) << (rank - neighbour));
            else
                copy_tile(to, x_map, k * 128, token_base, barrier);
            if constexpr (!MANY)
                for (int g = 0; g < groups; ++g)
                    copy_bulk(
                        shared_address(shared.sums[ring.stage][g]),
                        sums + static_cast<u64>(k * GROUPS + g) * p.sums_pitch + token_base, sums_bytes, barrier);
            ring.advance();
        }
    }
}

// A third warp, for many tokens: the sums of sixteen groups at a time, as the right operand of a BF16 product (without
// zero points they hold the offset's factor). Eight tokens x eight groups lie together (PTX ISA, wgmma, K-major without
// swizzle).
__device__ __forceinline__ void load_sums(
    Shared& shared, const Problem& p, const Tiles& tiles, const float* sums, int first_item, int item_step, int k_begin,
    int k_end) {
    wait_for_previous_kernel();
    const int lane = threadIdx.x & 31;
    u32 batch = 0;
    for (int item = first_item; item < tiles.count(); item += item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const int last_group = min(k_end * GROUPS, p.groups);
        for (int group = k_begin * GROUPS; group < k_end * GROUPS; group += BATCH, ++batch) {
            barrier_wait(shared_address(&shared.sums_empty[batch % 2]), batch / 2 % 2 ^ 1);
            u8* const tile = shared.sum_tiles[batch % 2][0];
            for (int i = lane; i < TOKENS * 2; i += 32) {  // a token and half of the groups
                const int token = i / 2 % 8 + i / 16 * 8, half = i % 2 * 8, first = group + half;
                const float* from = sums + static_cast<u64>(first) * p.sums_pitch + token_base + token;
                const bool inside = token_base + token < p.sums_pitch;
                float values[8];
#pragma unroll
                for (int g = 0; g < 8; ++g)
                    values[g] = inside && first + g < last_group ? from[static_cast<u64>(g) * p.sums_pitch] * SUM_FACTOR : 0.0f;
                u8* const to = tile + half * TOKENS * 2 + token * 16;
#pragma unroll
                for (int g = 0; g < 8; g += 2) {
                    const u32 high = pack_bf16(values[g], values[g + 1]);
                    const float left = values[g] - __uint_as_float(high << 16);
                    const float right = values[g + 1] - __uint_as_float(high & 0xFFFF0000);
                    *reinterpret_cast<u32*>(to + g * 2) = high;
                    *reinterpret_cast<u32*>(to + SUM_BYTES + g * 2) = pack_bf16(left, right);
                }
            }
            copy_engine_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.sums_full[batch % 2]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8(
    const __grid_constant__ TensorMap x_map, const float* __restrict__ sums, const u8* __restrict__ weights,
    const float* __restrict__ x_scale, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int thread = threadIdx.x;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u32 neighbour = rank % SHARE, part = rank / SHARE;
    const int first_item = blockIdx.x / CLUSTER, item_step = gridDim.x / CLUSTER;
    const int k_begin = p.blocks_k * part / SPLIT, k_end = p.blocks_k * (part + 1) / SPLIT;
    const Tiles tiles(p);

    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&shared.full[stage]), 2);  // weights and tokens
            barrier_init(shared_address(&shared.empty[stage]), SHARE * CONSUMERS / 32);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&shared.sums_full[i]), 1);
            barrier_init(shared_address(&shared.sums_empty[i]), CONSUMERS / 32);
        }
        barrier_init(shared_address(&shared.reduced), 1);
        barrier_init_fence();
        if constexpr (SPLIT > 1) barrier_expect(shared_address(&shared.reduced), QUADS * 16);
    }
    if constexpr (!MANY) {  // what no copy fills is multiplied by zero, so it has to be a number
        for (int i = thread; i < STAGES * GROUPS * TOKENS; i += THREADS) shared.sums[0][0][i] = 0;
        copy_engine_fence();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive();
    let_next_kernel_start();

    // Warps of one role stay together, so that the compiler can keep addresses in uniform registers.
    const int role = __shfl_sync(0xffffffff, thread / 32, 0) - CONSUMERS / 32;
    if (role >= 0) {
        give_registers<PRODUCER_REGISTERS>();
        __syncwarp();
        if (role == 0) load_weights(shared, p, tiles, weights, first_item, item_step, neighbour, k_begin, k_end);
        if (role == 1)
            load_tokens(shared, p, tiles, x_map, sums, first_item, item_step, neighbour, rank, k_begin, k_end);
        else if (SHARE > 1)
            cluster_wait();
        if (MANY && role == 2) load_sums(shared, p, tiles, sums, first_item, item_step, k_begin, k_end);
        leave_together();
        return;
    }

    const int lane = thread & 31, warp = thread / 32 % 4, warpgroup = thread / 128;
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
    take_registers<CONSUMER_REGISTERS>();
    const u32 ones = 0x01010101 + (static_cast<u32>(p.tokens) >> 31);
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Ring ring;
    u32 unit_count = 0, batch = 0;
    for (int item = first_item; item < tiles.count(); item += item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const int feature_base = (feature_tile + static_cast<int>(neighbour)) * TILE_ROWS;
        const float token_scale =
            thread < TOKENS && token_base + thread < p.tokens ? x_scale[token_base + thread] * 256.0f : 0.0f;

        float total[PARTS][PART_SUMS] = {};
        u32 batch_begin = unit_count;

        auto wait_and_convert = [&](u32(&a)[4][4]) {
            barrier_wait(shared_address(&shared.full[ring.stage]), ring.phase);
            convert(a, reinterpret_cast<const uint4*>(shared.weights[ring.stage][warpgroup]) + thread % 128, ones);
        };
        // total += offsets @ sums of the groups since `batch_begin`. This thread's part of the left operand: its two rows,
        // groups 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the sixteen.
        auto apply_offsets = [&] {
            u32 offsets[SPLIT_OFFSETS ? 2 : 1][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const u32 place = column + i / 2 * 8 + e, at = row + i % 2 * 8 + place % GROUPS * 64;
                    const u8* kept = shared.kept[(batch_begin + place / GROUPS) % KEPT][warpgroup];
                    const float scale = reinterpret_cast<const Scale*>(kept)[at].value();
                    const float zero = ZERO_POINTS ? reinterpret_cast<const Half*>(kept + SCALES_BYTES)[at].value() : 1.0f;
                    pair[e] = place < (unit_count - batch_begin) * GROUPS ? scale * zero : 0.0f;
                }
                offsets[0][i] = pack_bf16(pair[0], pair[1]);
                if constexpr (SPLIT_OFFSETS)
                    offsets[1][i] = pack_bf16(
                        pair[0] - __uint_as_float(offsets[0][i] << 16), pair[1] - __uint_as_float(offsets[0][i] & 0xFFFF0000));
            }
            barrier_wait(shared_address(&shared.sums_full[batch % 2]), batch / 2 % 2);
            const u64 high = plain_tile(shared_address(shared.sum_tiles[batch % 2][0]), TOKENS * 16);
            const u64 low = plain_tile(shared_address(shared.sum_tiles[batch % 2][1]), TOKENS * 16);
            mma_fence();
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                mma_bf16(total[part], offsets[0], high + part * COLUMNS, true);
                mma_bf16(total[part], offsets[0], low + part * COLUMNS, true);
                if constexpr (SPLIT_OFFSETS) mma_bf16(total[part], offsets[1], high + part * COLUMNS, true);
            }
            mma_commit();
            mma_wait<0>();
            __syncwarp();
            if (first_lane()) barrier_arrive(shared_address(&shared.sums_empty[batch % 2]));
            ++batch;
            batch_begin = unit_count;
        };
        auto unit = [&](const u32(&a)[4][4], u32(&a_next)[4][4], bool last) {
            const int stage = ring.stage;
            ring.advance();
            const u64 x = swizzled_tile(shared_address(shared.x[stage]));
            const u8* block = shared.weights[stage][warpgroup];
            const Scale* scales = reinterpret_cast<const Scale*>(block + 4096) + row;
            const Half* zeros = reinterpret_cast<const Half*>(block + 4096 + SCALES_BYTES) + row;
            float sum[2][PART_SUMS], scale[GROUPS][2], zero[GROUPS][2];
            float2 token_sums[GROUPS][MANY ? 1 : TOKENS / 8];
            constexpr int STEPS = GROUPS * PARTS, PER_GROUP = 4 / GROUPS;
            auto multiply = [&](int step) {
                const int g = step / PARTS, part = step % PARTS;
                mma_fence();
#pragma unroll
                for (int s = 0; s < PER_GROUP; ++s)
                    mma(sum[step % 2], a[g * PER_GROUP + s], x + part * COLUMNS * 8 + (g * PER_GROUP + s) * 2, s > 0);
                mma_commit();
            };
            auto promote = [&](int step) {
                const int g = step / PARTS, part = step % PARTS;
#pragma unroll
                for (int j = 0; j < PART_SUMS; ++j) {
                    const int half = j / 2 % 2;
                    float value = sum[step % 2][j];
                    if constexpr (!MANY)
                        value = fmaf(zero[g][half], j % 2 ? token_sums[g][j / 4].y : token_sums[g][j / 4].x, value);
                    total[part][j] += scale[g][half] * value;
                }
            };
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                multiply(step);
                // While the tensor cores work: the group's scales, and at the end the next stage's codes.
                if (step % PARTS == 0) {
                    const int g = step / PARTS;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        scale[g][half] = scales[g * 64 + half * 8].value();
                        zero[g][half] = ZERO_POINTS ? zeros[g * 64 + half * 8].value() : -0.5f / 256;
                    }
                    if constexpr (!MANY) {
#pragma unroll
                        for (int j = 0; j < TOKENS / 8; ++j)
                            token_sums[g][j] = *reinterpret_cast<const float2*>(&shared.sums[stage][g][column + 8 * j]);
                    }
                }
                if (step > 0) {
                    mma_wait<1>();
                    promote(step - 1);
                }
            }
            if (AHEAD && !last) wait_and_convert(a_next);
            mma_wait<0>();
            promote(STEPS - 1);
            __syncwarp();
            if constexpr (SHARE > 1) {
                if (lane < SHARE) barrier_arrive_remote(shared_address(&shared.empty[stage]), rank - neighbour + lane);
            } else {
                if (first_lane()) barrier_arrive(shared_address(&shared.empty[stage]));
            }
            ++unit_count;
            if (MANY && (last || (unit_count - batch_begin) * GROUPS == BATCH)) apply_offsets();
            if (!AHEAD && !last) wait_and_convert(a_next);
        };
        u32 a[AHEAD ? 2 : 1][4][4];
        if (k_begin < k_end) wait_and_convert(a[0]);
        if constexpr (AHEAD) {
            for (int k = k_begin; k < k_end; k += 2) {
                unit(a[0], a[1], k + 1 == k_end);
                if (k + 1 < k_end) unit(a[1], a[0], k + 2 == k_end);
            }
        } else {
            for (int k = k_begin; k < k_end; ++k) unit(a[0], a[0], k + 1 == k_end);
        }

        if (thread < TOKENS) shared.token_scale[thread] = token_scale;
        named_barrier(1, CONSUMERS);  // and the tile before this one has left the staging buffer
        auto of = [&](int j) { return total[j / PART_SUMS][j % PART_SUMS]; };
        auto finished = [&](float value, int m, int n) {
            return Out::of(value * shared.token_scale[m] + (bias && n < p.features ? bias[n].value() : 0.0f));
        };
        if constexpr (SPLIT > 1) {
            constexpr int PART = QUADS / SPLIT;
            const u32 buffer = shared_address(shared.partial), barrier = shared_address(&shared.reduced);
#pragma unroll
            for (int j = 0; j < ACCUMULATORS / 4; ++j) {
                const int quad = j * CONSUMERS + thread;
                const u32 owner = quad / PART * SHARE + neighbour;
                store_remote(
                    remote_address(buffer + (part * PART + quad % PART) * 16, owner), remote_address(barrier, owner),
                    of(4 * j), of(4 * j + 1), of(4 * j + 2), of(4 * j + 3));
            }
            barrier_wait_cluster(barrier, 0);
            for (int i = thread; i < PART; i += CONSUMERS) {
                float4 sum = shared.partial[i];
#pragma unroll
                for (int source = 1; source < SPLIT; ++source) {
                    const float4 more = shared.partial[source * PART + i];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                const int quad = part * PART + i, from = quad % CONSUMERS;
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
            for (int j = 0; j < ACCUMULATORS; ++j) {
                const int n = warpgroup * 64 + row + j / 2 % 2 * 8, m = j / 4 * 8 + column + j % 2;
                shared.out[m][n] = finished(of(j), m, feature_base + n).bits;
            }
            named_barrier(1, CONSUMERS);
            constexpr int CHUNKS = TILE_ROWS / 8;
            for (int i = thread; i < TOKENS * CHUNKS; i += CONSUMERS) {
                const int m = i / CHUNKS, n = feature_base + i % CHUNKS * 8;
                if (token_base + m < p.tokens && n < p.features)
                    *reinterpret_cast<uint4*>(out + static_cast<u64>(token_base + m) * p.features + n) =
                        *reinterpret_cast<const uint4*>(&shared.out[m][i % CHUNKS * 8]);
            }
        }
    }
    leave_together();
}
