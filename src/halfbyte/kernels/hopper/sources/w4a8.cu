// INT4 weights x FP8 activations, exact group scales: out[m, n] = x_scale[m] sum_k x[m, k] w[n, k] (+ bias[n]).
//
// Each group of inputs is multiplied unscaled into `sum`, then added times its scale to `total`, both in fp32 or with
// FP16_SUMS in fp16. NORMALIZED: scales are fp16 and want their row's factor, which the finished total is multiplied by.
// With PLAIN a code c is multiplied as it is, else as c + 1/2 (w4a8_codes.py); what that is too much, and zero points,
// are the product of `offsets` (scale times -(zero point + 1/2)) and the activations' sums over each group, in TF32,
// eight groups at a time.
#include "linear.cuh"
#include "sums.cuh"
#include "w4a8_codes.cuh"

constexpr int OCTET = 8;                // groups whose offsets are multiplied at once
constexpr int SUM_BYTES = PLAIN ? 16 : TOKENS * 32;  // of an octet
// Places for octets: of the stages in flight, of the octet in use, and of the one before it: a stage is left before the
// offsets of the octet that it ends are multiplied.
constexpr int SUM_TILES = PLAIN ? 1 : (STAGES * STAGE_BLOCKS * GROUPS + OCTET - 1) / OCTET + 2;
constexpr int STEPS = GROUPS * PARTS;  // products of one block of K, each promoted by itself
// While a step is promoted, so many steps after it are multiplied.
constexpr int FLIGHT = SUMS - 1;
// With AHEAD the next block's codes have registers of their own, and the tensor cores need not run dry between blocks.
// Where a block is one group, K is gone through in rounds without branches: of eight blocks, an octet, or with PLAIN of as
// many up to eight as go through all stages. So many blocks are unrolled.
constexpr int IN_FLIGHT = STAGES * STAGE_BLOCKS;
constexpr bool ROUNDS = GROUPS == 1 && (PLAIN ? IN_FLIGHT <= OCTET : OCTET % IN_FLIGHT == 0) && (AHEAD || FLIGHT == 0);
constexpr int BLOCKS = ROUNDS ? OCTET / IN_FLIGHT * IN_FLIGHT : IN_FLIGHT;
constexpr int ROUND = BLOCKS * STEPS;
constexpr float HALF_CODE = -0.5f / 256;
static_assert(STAGE_BLOCKS * GROUPS <= OCTET, "not more than one octet comes with a stage");
static_assert(!FP16_SUMS || (PLAIN && NORMALIZED), "offsets are fp32, and fp16 holds only normalized scales");
static_assert(!AHEAD || (ROUNDS && FLIGHT <= STEPS), "a block's codes are free while the next one is multiplied");
static_assert(!AHEAD || BLOCKS % 2 == 0, "a round begins with the same set of codes as the one before");

__device__ __forceinline__ int stage_of(int block) { return block / STAGE_BLOCKS % STAGES; }

struct Shared {
    alignas(1024) u8 x[STAGES][STAGE_BLOCKS * TOKENS * 128];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][STAGE_BLOCKS * BLOCK_BYTES];
    alignas(256) u8 sums[SUM_TILES][SUM_BYTES];
    float token_scale[WARPGROUPS][TOKENS];
    float row_factor[NORMALIZED ? CONSUMERS : 1][2];  // each thread's own
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");

constexpr int PRODUCER_REGISTERS = TOKENS < 192 ? 32 : 24;
using Budget = Registers<PRODUCER_REGISTERS>;

// With the first block of an octet of groups come its sums. They take turns with SUM_TILES places; that a place is free
// follows from the stage being free (tried for all numbers of stages, groups and blocks, over several tiles).
struct TokenSums {
    Shared& shared;
    const TensorMap& map;
    int place = 0;
    __device__ __forceinline__ static bool are_due(int done) { return !PLAIN && done * GROUPS % OCTET == 0; }
    __device__ __forceinline__ int bytes(int done) const { return are_due(done) ? SUM_BYTES : 0; }
    __device__ __forceinline__ void load(int done, int k, int token_base, u32 barrier) {
        if (!are_due(done)) return;
        copy_tile(shared_address(shared.sums[place]), map, k * GROUPS, token_base, barrier);
        if (++place == SUM_TILES) place = 0;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a8(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map,
    const __grid_constant__ TensorMap sums_map, const u8* __restrict__ weights, const float* x_scale,
    const float* row_factor, const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Pipeline& pipeline = shared.pipeline;
    const int thread = threadIdx.x;
    const Place place;

    const int role = start(pipeline);
    if (role >= 0) {
        give_registers<PRODUCER_REGISTERS>();
        feed<1>(role, shared, p, place, weights, x_map, TokenSums{shared, sums_map});
        return;
    }

    take_registers<Budget::CONSUMER>();
    const int lane = thread & 31, warpgroup = thread / 128;
    const int row = thread / 32 % 4 * 16 + lane / 4;
    const u32 ones = 0x01010101 + (static_cast<u32>(p.tokens) >> 31);
    const u64 x_tile = tile_of<128>(shared_address(shared.x[0]));
    // The same, but the compiler does not know: it would keep what it has computed for a round's first pass through the
    // stages, where there is a second one.
    const u64 x_tile_again = x_tile + (static_cast<u32>(p.tokens) >> 31);
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    int sums_place = 0;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base, vectors = segment.vectors(p);
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        if (!STREAM || segment.k_begin == 0) {
            fetch_of_tokens(shared.token_scale[warpgroup], x_scale, token_base, p);
#pragma unroll
            for (int i = 0; NORMALIZED && i < 2; ++i) {
                const int feature = feature_base + warpgroup * 64 + row + i * 8;
                const u32 to = shared_address(&shared.row_factor[thread][i]);
                copy_number(to, row_factor + vectors + feature, feature < p.features);
            }
        }
        using Kept = Sums<FP16_SUMS>;
        using Word = Kept::Word;
        constexpr int SETS = AHEAD ? 2 : 1;
        Word total[PARTS][Kept::WORDS] = {}, sum[SUMS][Kept::WORDS];
        Word scale[SETS][GROUPS][2];
        float offset[SETS][GROUPS][2];  // of a block's groups, this thread's two rows
        u32 a[SETS][4][4];
        float kept[2][2] = {};  // of an octet's offsets what is this thread's part of the left operand: two groups

        auto take = [&](int block) {
            const int stage = stage_of(block), set = block % SETS;
            if (block % STAGE_BLOCKS == 0) barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
            const u8* from = shared.weights[stage][warpgroup] + block % STAGE_BLOCKS * BLOCK_BYTES;
            const Scale* scales = reinterpret_cast<const Scale*>(from + 4096) + row;
            const Half* zeros = reinterpret_cast<const Half*>(from + 4096 + SCALES_BYTES) + row;
            convert(a[set], reinterpret_cast<const uint4*>(from) + thread % 128, ones);
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                const int g = i / 2, half = i % 2;
                const Scale of_row = scales[g * 64 + half * 8];
                scale[set][g][half] = Kept::scale(of_row);
                if constexpr (PLAIN) continue;
                offset[set][g][half] = of_row.value() * (ZERO_POINTS ? zeros[g * 64 + half * 8].value() : 1.0f);
            }
        };
        // last: of its stage, or of all.
        auto leave = [&](int block, bool last) {
            if (last || block % STAGE_BLOCKS == STAGE_BLOCKS - 1) pipeline.leave(stage_of(block), place);
        };
        auto multiply = [&](int r) {
            const int block = r / STEPS, g = r % STEPS / PARTS, part = r % PARTS;
            const u64 x = (block < IN_FLIGHT ? x_tile : x_tile_again) +
                          ((stage_of(block) * STAGE_BLOCKS + block % STAGE_BLOCKS) * TOKENS + part * COLUMNS) * 8;
            mma_fence();
#pragma unroll
            for (int s = 0; s < 4 / GROUPS; ++s) {
                const int step = g * (4 / GROUPS) + s;
                mma(sum[r % SUMS], a[block % SETS][step], x + step * 2, s > 0);
            }
            mma_commit();
        };
        auto promote = [&](int r) {
            const Word(&of_rows)[2] = scale[r / STEPS % SETS][r % STEPS / PARTS];
#pragma unroll
            for (int j = 0; j < Kept::WORDS; ++j) Kept::add(total[r % PARTS][j], of_rows[Kept::row_of(j)], sum[r % SUMS][j]);
        };
        auto keep = [&](u32 in_octet, const float(&of)[2]) {
            if constexpr (PLAIN) return;
            if (in_octet % 4 != lane % 4u) return;
            if (in_octet < 4) kept[0][0] = of[0], kept[0][1] = of[1];
            if (in_octet >= 4) kept[1][0] = of[0], kept[1][1] = of[1];
        };
        auto forget = [&] {
#pragma unroll
            for (int i = 0; i < 4; ++i) kept[i / 2][i % 2] = 0;
        };
        // The offsets of one part's tokens, of all or of this part. TF32 leaves off bits: what is longer is rounded.
        auto multiply_offsets = [&](int part, u32(&offsets)[4]) {
            if constexpr (PLAIN) return;
            if (part == 0) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float of = kept[i / 2][i % 2] * (ZERO_POINTS ? 1.0f : HALF_CODE);
                    offsets[i] = __float_as_uint(of) + (ZERO_POINTS || !NORMALIZED ? 0x1000 : 0);
                }
            }
            const u64 tile = tile_of<32>(shared_address(shared.sums[0])) + (sums_place * SUM_BYTES >> 4);
            mma_fence();
            Kept::add_offsets(total[part], offsets, tile + part * COLUMNS * 2);
            mma_commit();
        };
        auto leave_sums = [&] {
            if (++sums_place == SUM_TILES) sums_place = 0;
        };

        int left = segment.k_end - segment.k_begin;  // a cluster's block may have nothing to do
        if (left > 0) take(0);
        u32 offsets[4];
        // A block whose codes have been taken, by itself. in_octet: where its first group is.
        auto whole_block = [&](int block, u32 in_octet) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int r = block * STEPS + step;
                if (r % PARTS == 0) keep(in_octet + step / PARTS, offset[block % SETS][step / PARTS]);
                multiply(r);
                if (step < FLIGHT) continue;
                mma_wait<FLIGHT>();
                promote(r - FLIGHT);
            }
            if (FLIGHT > 0) mma_wait<0>();
#pragma unroll
            for (int before = FLIGHT < STEPS ? FLIGHT : STEPS; before > 0; --before) promote((block + 1) * STEPS - before);
            leave(block, left == 1);
        };
        auto whole_offsets = [&] {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) multiply_offsets(part, offsets);
            mma_wait<0>();
            leave_sums();
        };
        if constexpr (ROUNDS) {
            if (left >= BLOCKS) keep(0, offset[0][0]);
            for (; left >= BLOCKS; left -= BLOCKS) {  // no branches inside: products in flight do not outlive a round
                auto take_if_any = [&](int block) {
                    if (block < BLOCKS || (block == BLOCKS && left > BLOCKS)) {
                        take(block % BLOCKS);
                        keep(block % BLOCKS, offset[block % SETS][0]);
                    }
                };
                // Step r is multiplied. The offsets are multiplied under the last blocks' codes, as soon as the last
                // one's scales are there: all parts at once, or each between two steps of its own.
                auto finish = [&](int r) {
                    const int block = r / STEPS, part = r % PARTS;
                    const bool ends = part == PARTS - 1;
                    promote(r);
                    if (FLIGHT == 0 && block == BLOCKS - (AHEAD ? 2 : 1)) multiply_offsets(part, offsets);
                    if (!ends) return;
                    leave(block, false);
                    if (!AHEAD) take_if_any(block + 1);
                    if (FLIGHT > 0) take_if_any(block + 2);
                    if (FLIGHT > 0 && block == BLOCKS - 3) {
#pragma unroll
                        for (int i = 0; i < PARTS; ++i) multiply_offsets(i, offsets);
                    }
                };
#pragma unroll
                for (int r = 0; r < ROUND; ++r) {
                    multiply(r);
                    if (AHEAD && r % STEPS == 0 && (FLIGHT == 0 || r == 0)) take_if_any(r / STEPS + 1);
                    if (r < FLIGHT) continue;
                    mma_wait<FLIGHT>();
                    finish(r - FLIGHT);
                }
                mma_wait<0>();
#pragma unroll
                for (int r = ROUND - FLIGHT; r < ROUND; ++r) finish(r);
                leave_sums();
            }
            forget();  // groups that the last octet lacks have offsets of zero
            if (left > 0) {
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    whole_block(block, block);
                    if (left == 1) break;
                    take((block + 1) % BLOCKS);
                    --left;
                }
                whole_offsets();
            }
        } else {
            u32 in_octet = 0;
            while (left > 0) {
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    whole_block(block, in_octet);
                    in_octet += GROUPS;
                    if (in_octet == OCTET || left == 1) {
                        whole_offsets();
                        forget();
                        in_octet = 0;
                    }
                    if (--left == 0) break;
                    take((block + 1) % BLOCKS);
                }
            }
        }

        float finished[ACCUMULATORS];
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; ++j) finished[j] = Kept::number(total[j / PART_SUMS], j % PART_SUMS);
        auto total_of = [&](int j) -> float& { return finished[j]; };
        if constexpr (STREAM)
            if (!finishes(p, schedule, place, segment, total_of)) continue;
        await_scales(shared.token_scale[warpgroup], 256);  // codes count in 1/256: w4a8_codes.py
        struct OfFeature {
            float factor, bias;
        };
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, segment, total_of,
            [&](int n, int i) {
                const float of_bias = bias && n < p.features ? bias[vectors + n].value() : 0.0f;
                return OfFeature{NORMALIZED ? shared.row_factor[thread][i] : 1.0f, of_bias};
            },
            [&](float value, int m, OfFeature of) {
                return fmaf(value * of.factor, shared.token_scale[warpgroup][m], of.bias);
            },
            out);
    }
    finish_stores();
    leave_together();
}
