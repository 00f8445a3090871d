// INT4 weights x FP8 activations, exact group scales: out[m, n] = x_scale[m] sum_k x[m, k] w[n, k] (+ bias[n]).
//
// Each group of inputs is multiplied unscaled into `sum`, then added times its scale to `total`. A code c is multiplied
// as c + 1/2 (w4a8_codes.py); what that is too much, and zero points, are the product of `offsets` (scale times
// -(zero point + 1/2)) and the activations' sums over each group. For few tokens (MANY = 0) that is one more addition
// for each sum; for many it is a matrix product in BF16, sixteen groups at a time, whose operands are split in high and
// low parts.
#include "linear.cuh"

constexpr int BATCH = 16;  // groups whose offsets are multiplied at once
constexpr bool SPLIT_OFFSETS = ZERO_POINTS || !Scale::FITS_BF16;
constexpr int SUM_BYTES = TOKENS * BATCH * 2;  // of one part (high or low) of a batch
constexpr int KEPT = STAGES + BATCH / GROUPS;  // stages whose scales are kept for it, those in flight among them
constexpr int STEPS = GROUPS * PARTS;  // products of one stage, each promoted by itself
// With two sums and the next codes in registers of their own, the tensor cores need not run dry between stages: a step is
// promoted under the products of the step after it, also if that is the next stage's first one.
constexpr bool CARRY = MANY && AHEAD && SUMS == 2;
constexpr float HALF_CODE = -0.5f / 256;
constexpr float SUM_FACTOR = ZERO_POINTS ? 1.0f : HALF_CODE;  // what the kept scales are short of
static_assert(!MANY || BATCH / GROUPS % STAGES == 0, "a batch ends where the unrolled stages end");
static_assert(!AHEAD || STAGES % 2 == 0, "stages take turns with two sets of codes");

struct Shared {
    alignas(1024) u8 x[STAGES][TOKENS * 128];
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    alignas(128) u8 sum_tiles[2][2][MANY ? SUM_BYTES : 16];  // [batch % 2][high, low]
    alignas(16) u8 kept[MANY ? KEPT : 1][WARPGROUPS][MANY ? SCALES_BYTES + ZEROS_BYTES : 16];
    alignas(16) float sums[MANY ? 1 : STAGES][GROUPS][TOKENS];
    Staged staged;
    alignas(16) float token_scale[TOKENS];
    Pipeline pipeline;
    alignas(8) u64 sums_full[2];
    alignas(8) u64 sums_empty[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");

constexpr int PRODUCER_REGISTERS = MANY ? 56 : 32;
using Budget = Registers<PRODUCER_REGISTERS>;

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

// With the activations of few tokens come their sums.
struct FewSums {
    Shared& shared;
    const Problem& p;
    const float* sums;
    __device__ __forceinline__ int groups(int k) const { return MANY ? 0 : min(GROUPS, p.groups - k * GROUPS); }
    __device__ __forceinline__ int row_bytes(int token_base) const { return min(TOKENS, p.sums_pitch - token_base) * 4; }
    __device__ __forceinline__ int bytes(int k, int token_base) const { return groups(k) * row_bytes(token_base); }
    __device__ __forceinline__ void load(int stage, int k, int token_base, u32 barrier) const {
        if constexpr (!MANY)
            for (int g = 0; g < groups(k); ++g)
                copy_bulk(
                    shared_address(shared.sums[stage][g]),
                    sums + static_cast<u64>(k * GROUPS + g) * p.sums_pitch + token_base, row_bytes(token_base), barrier);
    }
};

// A warp, for many tokens: the sums of sixteen groups at a time, as the right operand of a BF16 product (without zero
// points they hold the offset's factor). Eight tokens x eight groups lie together (PTX ISA, wgmma, K-major without
// swizzle).
__device__ __forceinline__ void load_sums(Shared& shared, const Problem& p, const Place& place, const float* sums) {
    wait_for_previous_kernel();
    const Tiles tiles(p);
    const int lane = threadIdx.x & 31, last_group = min(place.k_end * GROUPS, p.groups);
    u32 batch = 0;
    for (int item = place.first_item; item < tiles.count(); item += place.item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        for (int group = place.k_begin * GROUPS; group < place.k_end * GROUPS; group += BATCH, ++batch) {
            barrier_wait(shared_address(&shared.sums_empty[batch % 2]), batch / 2 % 2 ^ 1);
            u8* const tile = shared.sum_tiles[batch % 2][0];
            for (int i = lane; i < TOKENS * 2; i += 32) {  // a token and half of the groups
                const int token = i / 2 % 8 + i / 16 * 8, half = i % 2 * 8, first = group + half;
                const float* from = sums + static_cast<u64>(first) * p.sums_pitch + token_base + token;
                const bool inside = token_base + token < p.sums_pitch;
                float values[8];
#pragma unroll
                for (int g = 0; g < 8; ++g)
                    values[g] =
                        inside && first + g < last_group ? from[static_cast<u64>(g) * p.sums_pitch] * SUM_FACTOR : 0.0f;
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
    const __grid_constant__ TensorMap x_map, const float* sums, const u8* __restrict__ weights,
    const float* x_scale, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Pipeline& pipeline = shared.pipeline;
    const int thread = threadIdx.x;
    const Place place(p);

    if (thread == 0) {
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&shared.sums_full[i]), 1);
            barrier_init(shared_address(&shared.sums_empty[i]), CONSUMERS / 32);
        }
    }
    if constexpr (!MANY) {  // what no copy fills is multiplied by zero, so it has to be a number
        for (int i = thread; i < STAGES * GROUPS * TOKENS; i += THREADS) shared.sums[0][0][i] = 0;
        copy_engine_fence();
    }
    const int role = start(pipeline);
    if (role >= 0) {
        give_registers<PRODUCER_REGISTERS>();
        if (role == 0) load_weights<MANY ? KEPT : 0>(pipeline, shared.weights, shared.kept, p, place, weights);
        if (role == 1)
            load_tokens<1>(pipeline, shared.x, p, place, x_map, FewSums{shared, p, sums});
        else if (SHARE > 1)
            cluster_wait();
        if (MANY && role == 2) load_sums(shared, p, place, sums);
        leave_together();
        return;
    }

    take_registers<Budget::CONSUMER>();
    const int lane = thread & 31, warpgroup = thread / 128;
    const int row = thread / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    const u32 ones = 0x01010101 + (static_cast<u32>(p.tokens) >> 31);
    const u32 x_low = tile_low(shared_address(shared.x[0]));
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    const Tiles tiles(p);
    Phases phases;
    u32 unit_count = 0, batch = 0;
    for (int item = place.first_item; item < tiles.count(); item += place.item_step) {
        int feature_tile, token_base;
        tiles.at(item, feature_tile, token_base);
        const int feature_base = (feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        const float token_scale =
            thread < TOKENS && token_base + thread < p.tokens ? x_scale[token_base + thread] * 256.0f : 0.0f;

        float total[PARTS][PART_SUMS] = {};
        u32 batch_begin = unit_count;

        auto wait_and_convert = [&](int stage, u32(&a)[4][4]) {
            barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
            convert(a, reinterpret_cast<const uint4*>(shared.weights[stage][warpgroup]) + thread % 128, ones);
        };
        // total += offsets @ sums of the groups since `batch_begin`. This thread's part of the left operand: its two
        // rows, groups 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the sixteen.
        auto apply_offsets = [&] {
            u32 offsets[SPLIT_OFFSETS ? 2 : 1][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const u32 group = column + i / 2 * 8 + e, at = row + i % 2 * 8 + group % GROUPS * 64;
                    const u8* kept = shared.kept[(batch_begin + group / GROUPS) % KEPT][warpgroup];
                    const float scale = reinterpret_cast<const Scale*>(kept)[at].value();
                    const float zero = ZERO_POINTS ? reinterpret_cast<const Half*>(kept + SCALES_BYTES)[at].value() : 1.0f;
                    pair[e] = group < (unit_count - batch_begin) * GROUPS ? scale * zero : 0.0f;
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
            if (lane == 0) barrier_arrive(shared_address(&shared.sums_empty[batch % 2]));
            ++batch;
            batch_begin = unit_count;
        };
        float sum[SUMS][PART_SUMS], scale_before[2];
        // One stage. follows: the last step of the stage before it is still to be promoted. carries: so is this one's.
        auto unit = [&](int stage, const u32(&a)[4][4], u32(&a_next)[4][4], bool last, bool follows, bool carries) {
            const int next_stage = (stage + 1) % STAGES;
            const u32 x = x_low + stage * TOKENS * 8;
            const u8* block = shared.weights[stage][warpgroup];
            const Scale* scales = reinterpret_cast<const Scale*>(block + 4096) + row;
            const Half* zeros = reinterpret_cast<const Half*>(block + 4096 + SCALES_BYTES) + row;
            float scale[GROUPS][2], zero[GROUPS][2];
            float2 token_sums[GROUPS][MANY ? 1 : TOKENS / 8];
            constexpr int PER_GROUP = 4 / GROUPS;
            auto sum_of = [&](int step) -> float(&)[PART_SUMS] { return sum[(stage * STEPS + step + STEPS) % SUMS]; };
            auto multiply = [&](int step) {
                const int g = step / PARTS, part = step % PARTS;
                mma_fence();
#pragma unroll
                for (int s = 0; s < PER_GROUP; ++s)
                    mma(sum_of(step), a[g * PER_GROUP + s], x + part * COLUMNS * 8 + (g * PER_GROUP + s) * 2, s > 0);
                mma_commit();
            };
            auto promote = [&](int step) {
                const int g = step / PARTS, part = step % PARTS;
#pragma unroll
                for (int j = 0; j < PART_SUMS; ++j) {
                    const int half = j / 2 % 2;
                    float value = sum_of(step)[j];
                    if constexpr (!MANY)
                        value = fmaf(zero[g][half], j % 2 ? token_sums[g][j / 4].y : token_sums[g][j / 4].x, value);
                    total[part][j] += scale[g][half] * value;
                }
            };
            auto promote_before = [&] {
#pragma unroll
                for (int j = 0; j < PART_SUMS; ++j) total[PARTS - 1][j] += scale_before[j / 2 % 2] * sum_of(-1)[j];
            };
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                multiply(step);
                // While the tensor cores work: the group's scales, the step before, the next stage's codes.
                if (step % PARTS == 0) {
                    const int g = step / PARTS;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        scale[g][half] = scales[g * 64 + half * 8].value();
                        zero[g][half] = ZERO_POINTS ? zeros[g * 64 + half * 8].value() : HALF_CODE;
                    }
                    if constexpr (!MANY) {
#pragma unroll
                        for (int j = 0; j < TOKENS / 8; ++j)
                            token_sums[g][j] = *reinterpret_cast<const float2*>(&shared.sums[stage][g][column + 8 * j]);
                    }
                }
                if (SUMS > 1 && (step > 0 || follows)) {
                    mma_wait<1>();
                    if (step > 0) {
                        promote(step - 1);
                    } else {
                        promote_before();
                        pipeline.leave((stage + STAGES - 1) % STAGES, place);
                    }
                }
                if (AHEAD && !last && step == (CARRY ? 0 : STEPS - 1)) wait_and_convert(next_stage, a_next);
                if (SUMS == 1) {
                    mma_wait<0>();
                    promote(step);
                }
            }
            if (carries) {
                scale_before[0] = scale[GROUPS - 1][0], scale_before[1] = scale[GROUPS - 1][1];
            } else {
                if constexpr (SUMS > 1) {
                    mma_wait<0>();
                    promote(STEPS - 1);
                }
                pipeline.leave(stage, place);
            }
            ++unit_count;
            if (!AHEAD && !last) wait_and_convert(next_stage, a_next);
        };
        u32 a[AHEAD ? 2 : 1][4][4];
        auto codes_of = [&](int stage) -> u32(&)[4][4] { return a[AHEAD ? stage % 2 : 0]; };
        int left = place.k_end - place.k_begin;  // a cluster's block may have nothing to do
        if (left > 0) wait_and_convert(0, codes_of(0));
        if constexpr (CARRY) {  // whole rounds have no branches: products in flight do not outlive one
            for (; left >= STAGES; left -= STAGES) {
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) {
                    const bool ends = stage == STAGES - 1;
                    unit(stage, codes_of(stage), codes_of(stage + 1), ends && left == STAGES, stage > 0, !ends);
                }
                if (left == STAGES || (unit_count - batch_begin) * GROUPS == BATCH) apply_offsets();
            }
        }
        while (left > 0) {
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) {
                if (left > 0) unit(stage, codes_of(stage), codes_of(stage + 1), left == 1, false, false);
                --left;
            }
            if (MANY && (left <= 0 || (unit_count - batch_begin) * GROUPS == BATCH)) apply_offsets();
        }

        if (thread < TOKENS) shared.token_scale[thread] = token_scale;
        named_barrier(1, CONSUMERS);  // and the tile before this one has left the staging buffer
        store_tile(
            pipeline, shared.staged, p, place, feature_base, token_base,
            [&](int j) { return total[j / PART_SUMS][j % PART_SUMS]; },
            [&](float value, int m, int n) {
                return Out::of(value * shared.token_scale[m] + (bias && n < p.features ? bias[n].value() : 0.0f));
            },
            out);
    }
    leave_together();
}
