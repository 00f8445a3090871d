// INT4 weights x BF16 or FP16 activations, exact group scales: out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n]).
//
// A code becomes an integer in the activations' own format, its zero point taken off, exactly (w4a16_codes.py). Then,
// with ROUNDED, it is multiplied by its scale, rounded once, and sums stay in the tensor cores. Otherwise each group of
// inputs is multiplied unscaled into `sum`, then added times its scale to `total`.
#include "linear.cuh"

constexpr bool IS_BF16 = Out::FITS_BF16;
constexpr u32 MAGIC = IS_BF16 ? 0x43004300 : 0x64006400;   // 128 or 1,024, twice: a nibble in its last bits adds itself
constexpr u32 MIDDLE = IS_BF16 ? 0x43084308 : 0x64086408;  // that and 8, what an unsigned nibble has too much
constexpr int BOX = TOKENS * 128;                           // 64 inputs

struct Shared {
    alignas(1024) u8 x[STAGES][2][BOX];
    Staged staged;
    alignas(128) u8 weights[STAGES][WARPGROUPS][BLOCK_BYTES];
    Pipeline pipeline;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py counts less");
static_assert(STAGE_BLOCKS == 1);
static_assert(!ROUNDED || (IS_BF16 && PARTS == 1), "products in FP16 might be too large for it");

constexpr int PRODUCER_REGISTERS = 32;
using Budget = Registers<PRODUCER_REGISTERS>;

// With ROUNDED: four sets of registers for the codes of half a block or, if TIGHT, two for a quarter.
constexpr int SETS = TIGHT ? 2 : 4;
constexpr int STEPS = TIGHT ? 4 : 2;
constexpr int STEP_WORDS = 8 / STEPS;  // of codes, 16 inputs each

__device__ __forceinline__ u32 minus(u32 left, u32 right) {
    u32 out;
    if constexpr (IS_BF16)
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(left), "r"(right));
    else
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(left), "r"(right));
    return out;
}

__device__ __forceinline__ u32 times(u32 left, u32 right) {
    u32 out;
    if constexpr (IS_BF16)
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(left), "r"(right));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(left), "r"(right));
    return out;
}

// What a block says of group g, for rows r and r + 8. zero: twice, in the activations' format.
struct Rows {
    float scale[2];
    u32 zero[2] = {MIDDLE, MIDDLE};
    __device__ __forceinline__ Rows(const u8* block, int g, int row) {
        const Scale* scales = reinterpret_cast<const Scale*>(block + 4096) + g * 64 + row;
        const u16* zeros = reinterpret_cast<const u16*>(block + 4096 + SCALES_BYTES) + g * 64 + row;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scale[i] = scales[8 * i].value();
            if (ZERO_POINTS) zero[i] = zeros[8 * i] * 0x10001u;
        }
    }
};

// Eight nibbles as the four registers of one step of 16 inputs: 0, 1: inputs 0 to 7 of rows r and r + 8; 2, 3: inputs 8
// to 15. magic: MAGIC in a register; an instruction takes one immediate. zero: for rows r and r + 8.
__device__ __forceinline__ void convert(u32 (&a)[4], u32 codes, u32 magic, const u32 (&zero)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 number;
        asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(number) : "r"(codes >> 4 * i), "r"(magic));
        a[i] = minus(number, zero[i % 2]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) w4a16(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map, const u8* __restrict__ weights,
    const Out* __restrict__ bias, Out* __restrict__ out, const Problem p) {
    extern __shared__ __align__(1024) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    Pipeline& pipeline = shared.pipeline;
    const int thread = threadIdx.x;
    const Place place;

    const int role = start(pipeline);
    if (role >= 0) {
        give_registers<PRODUCER_REGISTERS>();
        feed<2>(role, shared, p, place, weights, x_map, NothingMore());
        return;
    }

    take_registers<Budget::CONSUMER>();
    const int lane = thread & 31, warpgroup = thread / 128;
    const int row = thread / 32 % 4 * 16 + lane / 4;
    const u32 magic = MAGIC + (static_cast<u32>(p.tokens) >> 31);
    const u64 x_tile = tile_of<128>(shared_address(shared.x[0]));
    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();

    Schedule schedule(p, place);
    Segment segment;
    Phases phases;
    while (schedule.next(segment)) {
        const int token_base = segment.token_base, vectors = segment.vectors(p);
        const int feature_base = (segment.feature_tile + static_cast<int>(place.neighbour)) * TILE_ROWS;
        float total[PARTS][PART_SUMS] = {};

        if constexpr (ROUNDED) {
            u32 a[SETS][STEP_WORDS][4];
            u32 codes[STEP_WORDS];
            accumulate<STEPS, SETS, false>(
                pipeline, phases, place, segment.k_end - segment.k_begin,
                [&](int stage, int step) { load_codes<STEPS>(codes, shared.weights[stage][warpgroup], step); },
                [&](int stage, int step, int set) {
                    const u8* block = shared.weights[stage][warpgroup];
#pragma unroll
                    for (int s = 0; s < STEP_WORDS; ++s) {
                        const int g = (step * STEP_WORDS + s) * GROUPS / 8;
                        const Rows of(block, g, row);
                        convert(a[set][s], codes[s], magic, of.zero);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            a[set][s][i] = times(a[set][s][i], Out::pack(of.scale[i % 2], of.scale[i % 2]));
                    }
                },
                [&](int stage, int step, int set) {
                    mma_fence();
#pragma unroll
                    for (int s = 0; s < STEP_WORDS; ++s) {
                        const int word = step * STEP_WORDS + s;
                        mma(total[0], a[set][s], x_tile + (stage * 2 + word / 4) * (BOX / 16) + word % 4 * 2, true);
                    }
                    mma_commit();
                });
            settle(total[0]);
        } else {
            auto unit = [&](int stage) {
                barrier_wait(shared_address(&pipeline.full[stage]), phases.next(stage));
                const u8* block = shared.weights[stage][warpgroup];
                const uint4* words = reinterpret_cast<const uint4*>(block) + thread % 128;
                const uint4 first = words[0], second = words[128];
                const u32 codes[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
                const u64 x = x_tile + stage * (2 * BOX / 16);
                constexpr int PER_GROUP = 8 / GROUPS;
                u32 a[8][4];
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const Rows of(block, g, row);
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        float sum[PART_SUMS];
#pragma unroll
                        for (int i = 0; i < PER_GROUP; ++i) {
                            const int step = g * PER_GROUP + i;
                            if (part == 0) convert(a[step], codes[step], magic, of.zero);
                            mma_fence();  // registers of codes were written since the last one
                            mma(sum, a[step], x + step / 4 * (BOX / 16) + part * COLUMNS * 8 + step % 4 * 2, i > 0);
                            if (i % 4 == 3) mma_commit();
                        }
                        if constexpr (PER_GROUP % 4 != 0) mma_commit();
                        mma_wait<0>();
#pragma unroll
                        for (int j = 0; j < PART_SUMS; ++j) total[part][j] += of.scale[j / 2 % 2] * sum[j];
                    }
                }
                pipeline.leave(stage, place);
            };
            int left = segment.k_end - segment.k_begin;
            for (; left >= STAGES; left -= STAGES) {
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) unit(stage);
            }
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) {
                if (stage == left) break;
                unit(stage);
            }
        }

        auto total_of = [&](int j) -> float& { return total[j / PART_SUMS][j % PART_SUMS]; };
        if constexpr (STREAM)
            if (!finishes(p, schedule, place, segment, total_of)) continue;
        store_tile(
            pipeline, shared.staged, p, place, out_map, feature_base, segment, total_of,
            [&](int n, int) { return bias && n < p.features ? bias[vectors + n].value() : 0.0f; },
            [&](float value, int, float bias_of) { return value + bias_of; }, out);
    }
    finish_stores();
    leave_together();
}
