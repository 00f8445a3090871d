// What the linear kernels share: out[m, n] = sum_k x[m, k] w[n, k], weights as the left operand of the matrix
// instruction, from registers. A warpgroup computes 64 output features x TOKENS tokens, a block TILE_ROWS features; it
// goes through K in stages of STAGE_BLOCKS x 128 inputs, STAGES of them in flight. Blocks form clusters of SHARE x
// SPLIT: SHARE blocks with neighbouring features load each activation once for all of them (multicast); SPLIT blocks
// divide K and add up in each other's shared memory. With GROUPED there are several weights, each for tokens of its own.
//
// The including file defines TOKENS, TILE_ROWS, SPLIT, SHARE, STAGES, STAGE_BLOCKS, STREAM, GROUPED, BLOCKS_PER_SM,
// GROUP_SIZE, CODE_BYTES, SCALE_BYTES, ZERO_POINTS, COLUMNS, SENT_BYTES, SHARED_BYTES, Total (float or int: what a tile's blocks add
// up), Out.
#pragma once
#include "hopper.cuh"

constexpr int WARPGROUPS = TILE_ROWS / 64;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;  // one more warpgroup, whose warps feed the others
constexpr int CLUSTER = SHARE * SPLIT;
static_assert(STAGES >= 2);
static_assert(!STREAM || SPLIT == 1, "K is divided in one way or the other");
static_assert(!STREAM || !GROUPED, "several weights make enough tiles");

constexpr int GROUPS = 128 / GROUP_SIZE;  // in one stage
constexpr int SCALES_BYTES = 64 * GROUPS * SCALE_BYTES;
constexpr int ZEROS_BYTES = ZERO_POINTS ? 64 * GROUPS * 2 : 0;
constexpr int BLOCK_BYTES = CODE_BYTES + SCALES_BYTES + ZEROS_BYTES;  // 64 features x 128 inputs: blocks.py

// A warpgroup may take its tokens in parts, so that one part's products run while the one before is promoted.
constexpr int PARTS = TOKENS / COLUMNS;
constexpr int PART_SUMS = COLUMNS / 2;
constexpr int ACCUMULATORS = TOKENS / 2;
constexpr int QUADS = ACCUMULATORS / 4 * CONSUMERS;  // sums of a tile, in fours

// Blocks that divide K send each other sums in fp32, or in fp16 where they are kept so: so many a thread at once.
constexpr int PIECE_SUMS = 16 / SENT_BYTES;
constexpr int PIECES = ACCUMULATORS / PIECE_SUMS * CONSUMERS;
constexpr int OWN_PIECES = PIECES / SPLIT;  // those that a block adds up

template <int PRODUCER_REGISTERS>
struct Registers {
    static constexpr int LAUNCH = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;
    static constexpr int LEFT = (LAUNCH * THREADS - PRODUCER_REGISTERS * 128) / CONSUMERS / 8 * 8;
    static constexpr int CONSUMER = LEFT < 240 ? LEFT : 240;
};

#include "schedule.cuh"
#include "pipeline.cuh"
#include "tile_out.cuh"
