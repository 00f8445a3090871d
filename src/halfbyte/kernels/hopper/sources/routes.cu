// Which rows belong to which expert, and the tiles that they make: one block, no atomics, the same result every time.
// kernels/routes.py says the same in torch.
//
// ids[M, TOP_K] says which experts each token has; a number that is no expert, or that the token has had before, is
// nobody's. Routed rows lie one expert's after the other's, within one in the order of tokens: place[M, TOP_K] says where
// each went or -1, origin[row] which of ids it came from or -1 where no row is. offsets[experts + 1]: where each begins.
//
// HEIGHTS tile heights, the tallest last: an expert's rows make as many tiles of the tallest as they fill, and one tile
// that holds what is left. For each height, runs[] says of each tile which run it is of, {expert, first row, rows, first
// tile}, not more than LONGEST tiles of one expert, and tiles[height] how many there are.

constexpr int THREADS = 1024, WARPS = THREADS / 32;

struct Sizes {
    int tokens, experts, per_warp;  // per_warp: of ids, a multiple of 32
    int heights[HEIGHTS], first_run[HEIGHTS];
};

struct Shared {
    int warp_total[WARPS];
    int begin[MOST_EXPERTS + 1];
    int first_tile[HEIGHTS][MOST_EXPERTS];
    int of_warp[WARPS][MOST_EXPERTS];  // how many of an expert's rows come from warps before
};

// What the threads before this one have of `value`, and all of them.
__device__ __forceinline__ int sum_before(int value, int& all, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared.warp_total[warp] = sum;
    __syncthreads();
    int before = 0;
    all = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        if (i < warp) before += shared.warp_total[i];
        all += shared.warp_total[i];
    }
    return before + sum - value;
}

// Of how many rows, of the last height after the tiles that are full, an expert's tile of each height is.
struct Cut {
    int rows[HEIGHTS];
    __device__ __forceinline__ Cut(const Sizes& s, int rows_of_expert) {
        const int tallest = s.heights[HEIGHTS - 1], left = rows_of_expert % tallest;
        rows[HEIGHTS - 1] = rows_of_expert - left;
        bool placed = left == 0;
#pragma unroll
        for (int h = 0; h < HEIGHTS; ++h) {
            const bool holds = !placed && left <= s.heights[h];
            if (h < HEIGHTS - 1) rows[h] = 0;
            if (holds) rows[h] += left;
            placed = placed || holds;
        }
    }
};

// For each of a warp's choices, 32 at a time: found(choice, its expert or -1, the lanes that have the same).
template <class Found>
__device__ __forceinline__ void each_choice(const Id* __restrict__ ids, int begin, int end, int experts, Found found) {
    for (int first = begin; first < end; first += 32) {
        const int i = first + threadIdx.x % 32;
        int expert = -1;
        if (i < end) {
            const Id id = ids[i];
            bool counts = id >= 0 && id < experts;
            for (int j = i / TOP_K * TOP_K; j < i; ++j) counts = counts && ids[j] != id;
            if (counts) expert = static_cast<int>(id);
        }
        found(i, expert, __match_any_sync(0xffffffff, expert));
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) routes(
    const Id* __restrict__ ids, int* __restrict__ place, int* __restrict__ origin, int* __restrict__ offsets,
    int4* __restrict__ runs, int* __restrict__ tiles, const __grid_constant__ Sizes s) {
    extern __shared__ __align__(16) u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int all = s.tokens * TOP_K, begin = min(warp * s.per_warp, all), end = min(begin + s.per_warp, all);
    for (int i = thread; i < WARPS * MOST_EXPERTS; i += THREADS) shared.of_warp[i / MOST_EXPERTS][i % MOST_EXPERTS] = 0;
    wait_for_previous_kernel();
    __syncthreads();

    const u32 lanes_before = (1u << lane) - 1;
    each_choice(ids, begin, end, s.experts, [&](int, int expert, u32 equals) {
        if (expert >= 0 && (equals & lanes_before) == 0)
            shared.of_warp[warp][expert] += __popc(equals);
    });
    __syncthreads();

    int rows = 0;
    if (thread < s.experts) {
#pragma unroll 8
        for (int w = 0; w < WARPS; ++w) {
            const int of_warp = shared.of_warp[w][thread];
            shared.of_warp[w][thread] = rows;
            rows += of_warp;
        }
    }
    int routed;
    const int first_row = sum_before(rows, routed, shared);
    const Cut cut(s, rows);
#pragma unroll
    for (int h = 0; h < HEIGHTS; ++h) {
        int of_height;
        const int first = sum_before((cut.rows[h] + s.heights[h] - 1) / s.heights[h], of_height, shared);
        if (thread < s.experts) shared.first_tile[h][thread] = first;
        if (thread == 0) tiles[h] = of_height;
    }
    if (thread < s.experts) shared.begin[thread] = offsets[thread] = first_row;
    if (thread == 0) shared.begin[s.experts] = offsets[s.experts] = routed;
    __syncthreads();

    each_choice(ids, begin, end, s.experts, [&](int i, int expert, u32 equals) {
        const int before = expert >= 0 ? shared.of_warp[warp][expert] : 0;
        const int row = expert >= 0 ? shared.begin[expert] + before + __popc(equals & lanes_before) : -1;
        __syncwarp();
        if (expert >= 0 && (equals & lanes_before) == 0) shared.of_warp[warp][expert] = before + __popc(equals);
        if (i < end) place[i] = row;
        if (row >= 0) origin[row] = i;
    });
    for (int row = routed + thread; row < all; row += THREADS) origin[row] = -1;
    for (int expert = warp; expert < s.experts; expert += WARPS) {
        const Cut of_expert(s, shared.begin[expert + 1] - shared.begin[expert]);
        int first = shared.begin[expert];
#pragma unroll
        for (int h = HEIGHTS - 1; h >= 0; --h) {
            const int height = s.heights[h], run_rows = LONGEST * height, first_tile = shared.first_tile[h][expert];
            for (int tile = lane; tile * height < of_expert.rows[h]; tile += 32) {
                const int run = tile / LONGEST;
                runs[s.first_run[h] + first_tile + tile] =
                    make_int4(expert, first + run * run_rows, min(run_rows, of_expert.rows[h] - run * run_rows),
                              first_tile + run * LONGEST);
            }
            first += of_expert.rows[h];
        }
    }
    // The next kernel starts when this one has ended, and may then read all of it without waiting.
    __threadfence();
}
