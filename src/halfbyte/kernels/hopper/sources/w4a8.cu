// INT4 weights x FP8 activations, exact group scales: out[m, n] = x_scale[m] sum_k x[m, k] w[n, k] (+ bias[n]).
//
// Each group of inputs is multiplied unscaled into `sum`, then added times its scale to `total`. A code c is multiplied
// as c + 1/2 (w4a8_codes.py); what that is too much, and zero points, are the product of `offsets` (scale times
// -(zero point + 1/2)) and the activations' sums over each group. For few tokens (MANY = 0) that is one more addition
// for each sum; for many it is a matrix product in BF16, eight groups at a time, whose operands are split in high and
// low parts: high offsets with high and low sums, low offsets with high sums.
#include "linear.cuh"

constexpr int OCTET = 8;  // groups whose offsets are multiplied at once
constexpr bool SPLIT_OFFSETS = ZERO_POINTS || !Scale::FITS_BF16;
constexpr int SUM_BYTES = TOKENS * 16;  // of an octet, high or low
constexpr int STEPS = GROUPS * PARTS;   // products of codes in one block of K, each promoted by itself
// Many tokens go through K in rounds of BLOCKS, which are unrolled.
constexpr int BLOCKS = 8;
constexpr int ROUND = BLOCKS * STEPS;
// While a step is promoted, so many steps after it are multiplied. With AHEAD the next block's codes have registers of
// their own, and the tensor cores need not run dry between blocks.
constexpr int FLIGHT = SUMS - 1;
// Where the next block's scales are known in time, the offsets of an octet are multiplied under its last group's codes.
constexpr bool OFFSETS_EARLY = AHEAD && GROUPS == 1;
constexpr float HALF_CODE = -0.5f / 256;
constexpr float SUM_FACTOR = ZERO_POINTS ? 1.0f : HALF_CODE;  // what the scales as offsets are short of
static_assert(!AHEAD || FLIGHT <= STEPS, "a block's codes are free while the next one is multiplied");
static_assert(!MANY || BLOCKS % (STAGES * STAGE_BLOCKS) == 0, "a round goes through all stages as often");

// Step r of a round.
struct Step {
    int r, group, part;  // group: of the round
    __device__ __forceinline__ explicit Step(int r) : r(r), group(r / PARTS), part(r % PARTS) {}
    __device__ __forceinline__ int block() const { return group / GROUPS; }
    __device__ __forceinline__ bool begins_block() const { return r % STEPS == 0; }
    __device__ __forceinline__ bool ends_block() const { return r % STEPS == STEPS - 1; }
    // Whether nothing may be in flight after it. (Without AHEAD: a block's codes give way to the next one's.)
    __device__ __forceinline__ bool drains() const { return r == ROUND - 1 || (!AHEAD && ends_block()); }
    // The first step that is not through when this one begins, if those may be all that have begun.
    __device__ __forceinline__ int not_drained() const { return AHEAD ? 0 : r - r % STEPS; }
    // Of how many parts the octet's offsets come after it. All of them under the last but one
    // group's codes, as soon as the last group's scales are there; else each between two steps of its own.
    __device__ __forceinline__ int offsets_after() const {
        const int to_come = OCTET - 1 - group % OCTET;
        if (OFFSETS_EARLY && FLIGHT > 0) return to_come == 2 && part == PARTS - 1 ? PARTS : 0;
        return to_come == (OFFSETS_EARLY ? 1 : 0) ? 1 : 0;
    }
    __device__ __forceinline__ bool ends_octet() const { return group % OCTET == OCTET - 1 && part == PARTS - 1; }
};

__device__ __forceinline__ int stage_of(int block) { return block / STAGE_BLOCKS % STAGES; }

struct Shared {
    alignas(1024) u8 x[STAGES][STAGE_BLOCKS * TOKENS * 128];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][STAGE_BLOCKS * BLOCK_BYTES];
    alignas(128) u8 sum_tiles[2][MANY ? 2 * SUM_BYTES : 16];  // [octet % 2]
    alignas(16) float sums[MANY ? 1 : STAGES][GROUPS][TOKENS];
    float token_scale[WARPGROUPS][TOKENS];
    Pipeline pipeline;
    alignas(8) u64 sums_full[2];
    alignas(8) u64 sums_empty[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");

constexpr int PRODUCER_REGISTERS = !MANY ? 32 : TOKENS < 192 ? 56 : 40;
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

// Two warps, for many tokens: the sums of every second octet, as the right operand of a BF16 product (without zero
// points they hold the offset's factor). Eight tokens lie together (PTX ISA, wgmma, K-major without swizzle).
__device__ __forceinline__ void load_sums(
    Shared& shared, const Problem& p, const Place& place, const float* sums, u32 which) {
    wait_for_previous_kernel();
    Schedule schedule(p, place);
    Segment segment;
    const int lane = threadIdx.x & 31;
    u32 octet = 0;
    while (schedule.next(segment)) {
        const int last_group = min(segment.k_end * GROUPS, p.groups);
        for (int group = segment.k_begin * GROUPS; group < segment.k_end * GROUPS; group += OCTET, ++octet) {
            if (octet % 2 != which) continue;
            barrier_wait(shared_address(&shared.sums_empty[which]), octet / 2 % 2 ^ 1);
            u8* const tile = shared.sum_tiles[which];
#pragma unroll 1
            for (int i = lane; i < TOKENS * 2; i += 32) {  // a token, half of the groups
                const int in_tile = i % TOKENS, first = i / TOKENS * (OCTET / 2), token = segment.token_base + in_tile;
                const float* from = sums + static_cast<u64>(group + first) * p.sums_pitch + token;
                const int have = token < p.sums_pitch ? last_group - group - first : 0;
                u32 high[2], low[2];
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    float values[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e, from += p.sums_pitch)
                        values[e] = pair * 2 + e < have ? *from * SUM_FACTOR : 0.0f;
                    high[pair] = Bf16::pack(values[0], values[1]);
                    low[pair] = Bf16::pack(
                        values[0] - __uint_as_float(high[pair] << 16), values[1] - __uint_as_float(high[pair] & 0xFFFF0000));
                }
                u8* const to = tile + in_tile * 16 + first * 2;
                *reinterpret_cast<uint2*>(to) = make_uint2(high[0], high[1]);
                *reinterpret_cast<uint2*>(to + SUM_BYTES) = make_uint2(low[0], low[1]);
            }
            copy_engine_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.sums_full[which]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map, const float* sums, const u8* __restrict__ weights,
    const float* x_scale, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Pipeline& pipeline = shared.pipeline;
    const int thread = threadIdx.x;
    const Place place;

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
        if (role == 0) load_weights(pipeline, shared.weights, p, place, weights);
        if (role == 1)
            load_tokens<1>(pipeline, shared.x, p, place, x_map, FewSums{shared, p, sums});
        else if (SHARE > 1)
            cluster_wait();
        if (MANY && role >= 2) load_sums(shared, p, place, sums, role - 2);
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

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    u32 octets = 0;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base;
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        float of_token[(TOKENS + 127) / 128];  // read now, wanted at the end
#pragma unroll
        for (int i = 0; i < TOKENS; i += 128) {
            const int token = token_base + i + thread % 128;
            of_token[i / 128] = token < p.tokens ? x_scale[token] : 0.0f;
        }
        float total[PARTS][PART_SUMS] = {}, sum[SUMS][PART_SUMS];
        u32 a[AHEAD ? 2 : 1][4][4];
        auto codes_of = [&](int block) -> u32(&)[4][4] { return a[AHEAD ? block % 2 : 0]; };
        auto multiply = [&](float(&to)[PART_SUMS], int block, int g, int part) {
            const u32 x =
                x_low + ((stage_of(block) * STAGE_BLOCKS + block % STAGE_BLOCKS) * TOKENS + part * COLUMNS) * 8;
            mma_fence();
#pragma unroll
            for (int s = 0; s < 4 / GROUPS; ++s) {
                const int step = g * (4 / GROUPS) + s;
                mma(to, codes_of(block)[step], x + step * 2, s > 0);
            }
            mma_commit();
        };
        int left = segment.k_end - segment.k_begin;  // a cluster's block may have nothing to do

        if constexpr (MANY) {
            float scale[AHEAD ? 2 : 1][GROUPS][2], offset[AHEAD ? 2 : 1][GROUPS][2];
            // This thread's part of the left operand: offsets of its two rows and, of an octet's groups, two.
            float kept[2][2] = {};
            u32 offsets[2][4];
            auto keep = [&](int group) {
                const auto& of = offset[AHEAD ? group / GROUPS % 2 : 0][group % GROUPS];
                if (group % OCTET / 2 == lane % 4) kept[group % 2][0] = of[0], kept[group % 2][1] = of[1];
            };
            auto take = [&](int block) {
                const int stage = stage_of(block);
                if (block % STAGE_BLOCKS == 0) barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
                const u8* from = shared.weights[stage][warpgroup] + block % STAGE_BLOCKS * BLOCK_BYTES;
                convert(codes_of(block), reinterpret_cast<const uint4*>(from) + thread % 128, ones);
#pragma unroll
                for (int i = 0; i < 2 * GROUPS; ++i) {
                    const int g = i / 2, half = i % 2, at = g * 64 + row + half * 8;
                    const float of_row = reinterpret_cast<const Scale*>(from + 4096)[at].value();
                    const Half* zeros = reinterpret_cast<const Half*>(from + 4096 + SCALES_BYTES);
                    scale[AHEAD ? block % 2 : 0][g][half] = of_row;
                    offset[AHEAD ? block % 2 : 0][g][half] = ZERO_POINTS ? of_row * zeros[at].value() : of_row;
                }
                if constexpr (OFFSETS_EARLY) keep(block);
            };
            // last: of its stage, or of all.
            auto leave = [&](int block, bool last) {
                if (last || block % STAGE_BLOCKS == STAGE_BLOCKS - 1) pipeline.leave(stage_of(block), place);
            };
            auto multiply_offsets = [&](int part) {
                if (part == 0) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const u32 high = Bf16::pack(kept[0][half], kept[1][half]);
                        offsets[0][half] = offsets[0][2 + half] = high;
                        offsets[1][half] = Bf16::pack(
                            kept[0][half] - __uint_as_float(high << 16), kept[1][half] - __uint_as_float(high & 0xFFFF0000));
                        offsets[1][2 + half] = 0;
                    }
                    barrier_wait(shared_address(&shared.sums_full[octets % 2]), octets / 2 % 2);
                }
                const u64 tile = plain_tile(shared_address(shared.sum_tiles[octets % 2]), SUM_BYTES) + part * COLUMNS;
                mma_fence();
                mma_bf16(total[part], offsets[0], tile, true);
                if constexpr (SPLIT_OFFSETS) mma_bf16(total[part], offsets[1], tile, true);
                mma_commit();
            };
            auto leave_sums = [&] {
                if (lane == 0) barrier_arrive(shared_address(&shared.sums_empty[octets % 2]));
                ++octets;
            };
            auto promote = [&](const float(&from)[PART_SUMS], int group, int part) {
                const auto& scales = scale[AHEAD ? group / GROUPS % 2 : 0][group % GROUPS];
#pragma unroll
                for (int j = 0; j < PART_SUMS; ++j) total[part][j] += scales[j / 2 % 2] * from[j];
            };

            if (left > 0) take(0);
            for (; left >= BLOCKS; left -= BLOCKS) {  // no branches inside: products in flight do not outlive a round
                auto take_if_any = [&](int block) {
                    if (block < BLOCKS || (block == BLOCKS && left > BLOCKS)) take(block % BLOCKS);
                };
                auto finish = [&](const Step& step) {
                    promote(sum[step.r % SUMS], step.group, step.part);
                    if (step.ends_block()) {
                        leave(step.block(), false);
                        if (AHEAD && FLIGHT > 0) take_if_any(step.block() + 2);
                    }
#pragma unroll
                    for (int i = 0; i < step.offsets_after(); ++i) multiply_offsets(OFFSETS_EARLY && FLIGHT > 0 ? i : step.part);
                    if (step.ends_octet()) {
                        if (!OFFSETS_EARLY) mma_wait<0>();
                        leave_sums();
                    }
                    if (!AHEAD && step.ends_block()) take_if_any(step.block() + 1);
                };
#pragma unroll
                for (int r = 0; r < ROUND; ++r) {
                    const Step step(r);
                    if (!OFFSETS_EARLY && step.part == 0) keep(step.group);
                    multiply(sum[r % SUMS], step.block(), step.group % GROUPS, step.part);
                    if (AHEAD && step.begins_block() && (FLIGHT == 0 || r == 0)) take_if_any(step.block() + 1);
                    if (step.drains()) {
                        mma_wait<0>();
                    } else if (r - FLIGHT >= step.not_drained()) {
                        mma_wait<FLIGHT>();
                    }
#pragma unroll
                    for (int before = FLIGHT; before >= 0; --before)
                        if (r - before >= step.not_drained() && (before == FLIGHT || step.drains())) finish(Step(r - before));
                }
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                if (left > 0) {
#pragma unroll
                    for (int step = 0; step < STEPS; ++step) {
                        const int g = step / PARTS, part = step % PARTS;
                        if (!OFFSETS_EARLY && part == 0) keep(block * GROUPS + g);
                        multiply(sum[0], block, g, part);
                        mma_wait<0>();
                        promote(sum[0], block * GROUPS + g, part);
                    }
                    leave(block, left == 1);
                    if ((block + 1) * GROUPS % OCTET == 0 || left == 1) {  // groups that a last octet lacks have sums of zero
#pragma unroll
                        for (int part = 0; part < PARTS; ++part) multiply_offsets(part);
                        mma_wait<0>();
                        leave_sums();
                    }
                    if (left > 1) take((block + 1) % BLOCKS);
                }
                --left;
            }
        } else {
            auto take = [&](int stage) {
                barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
                convert(codes_of(stage), reinterpret_cast<const uint4*>(shared.weights[stage][warpgroup]) + thread % 128, ones);
            };
            auto unit = [&](int stage) {
                const u8* block = shared.weights[stage][warpgroup];
                const Scale* scales = reinterpret_cast<const Scale*>(block + 4096) + row;
                const Half* zeros = reinterpret_cast<const Half*>(block + 4096 + SCALES_BYTES) + row;
                float scale[GROUPS][2], zero[GROUPS][2];
                float2 token_sums[GROUPS][TOKENS / 8];
                auto promote = [&](int q) {
                    const int g = q % STEPS / PARTS, part = q % PARTS;
#pragma unroll
                    for (int j = 0; j < PART_SUMS; ++j) {
                        const int half = j / 2 % 2, pair = part * COLUMNS / 8 + j / 4;
                        const float of_tokens = j % 2 ? token_sums[g][pair].y : token_sums[g][pair].x;
                        total[part][j] += scale[g][half] * fmaf(zero[g][half], of_tokens, sum[q % SUMS][j]);
                    }
                };
#pragma unroll
                for (int q = stage * STEPS; q < (stage + 1) * STEPS; ++q) {
                    multiply(sum[q % SUMS], stage, q % STEPS / PARTS, q % PARTS);
                    if (q % PARTS == 0) {  // while the tensor cores work
                        const int g = q % STEPS / PARTS;
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            scale[g][half] = scales[g * 64 + half * 8].value();
                            zero[g][half] = ZERO_POINTS ? zeros[g * 64 + half * 8].value() : HALF_CODE;
                        }
#pragma unroll
                        for (int j = 0; j < TOKENS / 8; ++j)
                            token_sums[g][j] = *reinterpret_cast<const float2*>(&shared.sums[stage][g][column + 8 * j]);
                    }
                    if (SUMS == 1 || q % STEPS > 0) {
                        mma_wait<SUMS - 1>();
                        promote(q - (SUMS - 1));
                    }
                }
                if constexpr (SUMS > 1) {
                    mma_wait<0>();
                    promote((stage + 1) * STEPS - 1);
                }
                pipeline.leave(stage, place);
            };
            if (left > 0) take(0);
            while (left > 0) {
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) {
                    if (left > 0) {
                        unit(stage);
                        if (left > 1) take((stage + 1) % STAGES);
                    }
                    --left;
                }
            }
        }

        auto total_of = [&](int j) -> float& { return total[j / PART_SUMS][j % PART_SUMS]; };
        if constexpr (STREAM) {
            if (segment.k_begin > 0) {
                give_sums(p, total_of);
                continue;
            }
            if (segment.k_end < p.blocks_k) take_sums(p, schedule, place, total_of);
        }
#pragma unroll
        for (int i = 0; i < TOKENS; i += 128)
            if (i + thread % 128 < TOKENS)  // codes count in 1/256: w4a8_codes.py
                shared.token_scale[warpgroup][i + thread % 128] = of_token[i / 128] * 256;
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, token_base, total_of,
            [&](int n) { return bias && n < p.features ? bias[n].value() : 0.0f; },
            [&](float value, int m, float bias_of) { return fmaf(value, shared.token_scale[warpgroup][m], bias_of); }, out);
    }
    finish_stores();
    leave_together();
}
