// Which rows belong to which expert, and the tiles that they make: no atomics, the same result every time.
// kernels/routes.py says the same in torch.
//
// ids[M, TOP_K] says which experts each token has; a number that is no expert, or that the token has had before, is
// nobody's. Routed rows lie one expert's after the other's, within one in the order of tokens: place[M, TOP_K] says where
// each went or -1, origin[row] which of ids it came from or -1 where no row is. offsets[experts + 1]: where each begins.
//
// HEIGHTS tile heights, the tallest last: an expert's rows make as many tiles of the tallest as they fill, and one tile
// that holds what is left. For each height, runs[] says of each tile which run it is of, {expert, first row, rows, first
// tile}, not more than LONGEST tiles of one expert, and tiles[height] how many there are.
//
// One block, or CLUSTER of them for many ids: each warp has STEPS x 32 that follow each other, of which each thread keeps
// one in a register for each step.

constexpr int WARPS = THREADS / 32;
constexpr int VALUES = 1 + HEIGHTS;  // an expert's rows, and its tiles of each height
constexpr int EXPERT_WARPS = MOST_EXPERTS / 32;
static_assert(THREADS >= MOST_EXPERTS);

struct Sizes {
    int tokens, experts;
    int heights[HEIGHTS], first_run[HEIGHTS];
};

struct Shared {
    int warp_total[VALUES][EXPERT_WARPS];
    int begin[MOST_EXPERTS + 1];
    int first_tile[HEIGHTS][MOST_EXPERTS];
    int of_block[MOST_EXPERTS];        // an expert's rows that this block has found
    int of_warp[WARPS][MOST_EXPERTS];  // the same of its warps, then of those before
};

// Of how many rows an expert's tiles of each height are.
struct Cut {
    int rows[HEIGHTS];
    __device__ __forceinline__ Cut(const Sizes& s, int rows_of_expert) {
        const int tallest = s.heights[HEIGHTS - 1], left = rows_of_expert % tallest;
        bool placed = left == 0;
#pragma unroll
        for (int h = 0; h < HEIGHTS; ++h) {
            const bool holds = !placed && left <= s.heights[h];
            rows[h] = (h == HEIGHTS - 1 ? rows_of_expert - left : 0) + (holds ? left : 0);
            placed = placed || holds;
        }
    }
};

__device__ __forceinline__ int load_of_block(const int* number, u32 rank) {
    int value;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(remote_address(shared_address(number), rank)));
    return value;
}

// The expert that has choice i of ids, or -1.
__device__ __forceinline__ int expert_of(const Id* __restrict__ ids, int i, int all, int experts) {
    if (i >= all) return -1;
    const Id id = ids[i];
    bool counts = id >= 0 && id < experts;
#pragma unroll
    for (int before = 1; before < TOP_K; ++before)
        if (before <= i % TOP_K) counts &= ids[i - before] != id;
    return counts ? static_cast<int>(id) : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) routes(
    const Id* __restrict__ ids, int* __restrict__ place, int* __restrict__ origin, int* __restrict__ offsets,
    int4* __restrict__ runs, int* __restrict__ tiles, const __grid_constant__ Sizes s) {
    extern __shared__ __align__(16) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int all = s.tokens * TOP_K, begin = (static_cast<int>(rank) * WARPS + warp) * STEPS * 32 + lane;
    for (int i = lane; i < MOST_EXPERTS; i += 32) shared.of_warp[warp][i] = 0;
    wait_for_previous_kernel();

    int expert[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) expert[step] = expert_of(ids, begin + step * 32, all, s.experts);
    // For each of this thread's ids: how many of this warp before it are for the same expert.
    int rank_in_warp[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32 equals = __match_any_sync(0xffffffff, expert[step]), before = equals & ((1u << lane) - 1);
        const bool counts = expert[step] >= 0;
        const int so_far = counts ? shared.of_warp[warp][expert[step]] : 0;
        __syncwarp();
        if (counts && before == 0) shared.of_warp[warp][expert[step]] = so_far + __popc(equals);
        __syncwarp();
        rank_in_warp[step] = so_far + __popc(before);
    }
    __syncthreads();

    int rows = 0;  // of expert `thread`
    if (thread < MOST_EXPERTS) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const int of_warp = shared.of_warp[w][thread];
            shared.of_warp[w][thread] = rows;
            rows += of_warp;
        }
    }
    int of_blocks_before = 0;
    if constexpr (CLUSTER > 1) {
        if (thread < MOST_EXPERTS) shared.of_block[thread] = rows;
        cluster_arrive_last();
        cluster_wait();
        if (thread < MOST_EXPERTS) {
            rows = 0;
#pragma unroll
            for (u32 block = 0; block < CLUSTER; ++block) {
                const int of_block = load_of_block(&shared.of_block[thread], block);
                if (block < rank) of_blocks_before += of_block;
                rows += of_block;
            }
        }
        cluster_arrive_last();  // nobody leaves while others read
    }

    // What the experts before this one have, and all of them.
    const Cut cut(s, rows);
    int mine[VALUES], before[VALUES], total[VALUES] = {};
    mine[0] = rows;
#pragma unroll
    for (int h = 0; h < HEIGHTS; ++h) mine[1 + h] = (cut.rows[h] + s.heights[h] - 1) / s.heights[h];
    if (warp < EXPERT_WARPS) {
#pragma unroll
        for (int v = 0; v < VALUES; ++v) {
            int sum = mine[v];
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffff, sum, step);
                if (lane >= step) sum += other;
            }
            before[v] = sum - mine[v];
            if (lane == 31) shared.warp_total[v][warp] = sum;
        }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
#pragma unroll
        for (int w = 0; w < EXPERT_WARPS; ++w) {
            if (w == warp) before[v] += total[v];
            total[v] += shared.warp_total[v][w];
        }
    }
    if (thread < MOST_EXPERTS) {
        shared.begin[thread] = before[0];
#pragma unroll
        for (int h = 0; h < HEIGHTS; ++h) shared.first_tile[h][thread] = before[1 + h];
        // From now on: where the warp's first row of the expert is.
#pragma unroll
        for (int w = 0; w < WARPS; ++w) shared.of_warp[w][thread] += before[0] + of_blocks_before;
    }
    if (thread == 0) shared.begin[MOST_EXPERTS] = total[0];
    if (rank == 0) {
        if (thread < s.experts) offsets[thread] = before[0];
        if (thread == 0) offsets[s.experts] = total[0];
#pragma unroll
        for (int h = 0; h < HEIGHTS; ++h)
            if (thread == 0) tiles[h] = total[1 + h];
    }
    __syncthreads();

#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = begin + step * 32;
        if (i >= all) continue;
        const int row = expert[step] < 0 ? -1 : shared.of_warp[warp][expert[step]] + rank_in_warp[step];
        place[i] = row;
        if (row >= 0) origin[row] = i;
    }
    for (int row = total[0] + static_cast<int>(rank) * THREADS + thread; row < all; row += CLUSTER * THREADS)
        origin[row] = -1;
    for (int of = static_cast<int>(rank) * WARPS + warp; of < s.experts; of += CLUSTER * WARPS) {
        int first = shared.begin[of];
        const Cut of_expert(s, shared.begin[of + 1] - first);
#pragma unroll
        for (int h = HEIGHTS - 1; h >= 0; --h) {
            const int height = s.heights[h], run_rows = LONGEST * height, first_tile = shared.first_tile[h][of];
            for (int tile = lane; tile * height < of_expert.rows[h]; tile += 32) {
                const int run = tile / LONGEST;
                runs[s.first_run[h] + first_tile + tile] =
                    make_int4(of, first + run * run_rows, min(run_rows, of_expert.rows[h] - run * run_rows),
                              first_tile + run * LONGEST);
            }
            first += of_expert.rows[h];
        }
    }
    // The next kernel starts when this one has ended, and may then read all of it without waiting.
    __threadfence();
    if constexpr (CLUSTER > 1) cluster_wait();
}
