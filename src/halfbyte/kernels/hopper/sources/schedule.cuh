// Which blocks of K of which tiles are whose. Part of linear.cuh.
#pragma once

struct Problem {
    int tokens, features, blocks_k, rows64, raster;
    int streamed, quantum;  // tiles that all blocks divide; K is divided by so many blocks: Schedule
    uint4* partials;        // sums of tiles that are not finished, for each block QUADS
    u32* flags;             // for each block and warpgroup: whether its are there; all zero between kernels
    const int4* runs;       // with GROUPED: for each tile of tokens the run that it is of, as routes.cu writes it
    const int* tiles;       // with GROUPED: how many tiles of tokens there are
    int most_tiles;         // with GROUPED: how many there may be
};

// Which part of its cluster's work is this block's.
struct Place {
    u32 rank, neighbour, part;
    __device__ __forceinline__ Place()
        : rank(CLUSTER > 1 ? cluster_rank() : 0), neighbour(rank % SHARE), part(rank / SHARE) {}
};

// Blocks of K from k_begin to k_end of one tile.
struct Segment {
    int feature_tile, token_base, k_begin, k_end;
    int expert, token_end;  // with GROUPED: whose weight, and where its tokens end
    // Where the weight's numbers begin in what has one for each feature of each weight.
    __device__ __forceinline__ int vectors(const Problem& p) const { return GROUPED ? expert * p.features : 0; }
    __device__ __forceinline__ int tokens(const Problem& p) const { return GROUPED ? token_end : p.tokens; }
};

template <bool IN_GROUPS>
struct TilesOf;

// All tokens and all features of one weight. Which tile comes when: `raster` tiles of tokens at a time, so that blocks
// running together share what is in L2.
template <>
struct TilesOf<false> {
    int along_features, along_tokens, raster, streamed;
    __device__ __forceinline__ explicit TilesOf(const Problem& p)
        : along_features((p.features + TILE_ROWS * SHARE - 1) / (TILE_ROWS * SHARE)),
          along_tokens((p.tokens + TOKENS - 1) / TOKENS),
          raster(p.raster),
          streamed(p.streamed) {}
    __device__ __forceinline__ int count() const { return along_features * along_tokens; }
    __device__ __forceinline__ void ask(int) {}
    __device__ __forceinline__ void at(int item, Segment& s) const {
        const int width = raster * along_features, first = item / width * raster;
        const int high = min(raster, along_tokens - first), inside = item % width;
        s.token_base = (first + inside % high) * TOKENS;
        s.feature_tile = inside / high * SHARE;
    }
};

// Runs of tokens that lie together and belong to one expert, whose weight is one of several: what routes.cu has found.
// The tiles of a run are what runs together. All of routes.cu's results are there when a kernel after it begins.
template <>
struct TilesOf<true> {
    static constexpr int streamed = 0;
    const int4* runs;
    int along_features, along_tokens, most;
    int4 run;  // of the tile that comes next: asked for while the one before is computed
    __device__ __forceinline__ explicit TilesOf(const Problem& p)
        : runs(p.runs),
          along_features((p.features + TILE_ROWS * SHARE - 1) / (TILE_ROWS * SHARE)),
          along_tokens(load_fresh(p.tiles)),
          most(p.most_tiles) {}
    __device__ __forceinline__ int count() const { return along_features * along_tokens; }
    __device__ __forceinline__ void ask(int item) {
        const int tile = item / along_features;
        if (tile < most) run = load_fresh(runs + tile);
    }
    __device__ __forceinline__ void at(int item, Segment& s) const {
        const int expert = run.x, first = run.y, rows = run.z, first_tile = run.w;
        const int high = (rows + TOKENS - 1) / TOKENS, inside = item - first_tile * along_features;
        s.expert = expert;
        s.token_base = first + inside % high * TOKENS;
        s.token_end = first + rows;
        s.feature_tile = inside / high * SHARE;
    }
};

using Tiles = TilesOf<GROUPED>;

// The segments of one cluster: its share of the first `streamed` tiles, which are divided evenly whatever their number,
// then whole tiles. What is missing of a tile that a cluster begins and does not finish, the clusters after it have
// done first of all, so that nobody waits for long (stream-K: Osama et al., PPoPP 2023).
struct Schedule {
    const Problem& p;
    Tiles tiles;
    const u32 part;
    int item, at = 0, end = 0;
    __device__ __forceinline__ Schedule(const Problem& problem, const Place& place)
        : p(problem), tiles(problem), part(place.part), item(tiles.streamed + static_cast<int>(cluster())) {
        if constexpr (STREAM) at = first_of(cluster()), end = first_of(cluster() + 1);
        tiles.ask(upcoming());
    }
    __device__ __forceinline__ static u32 cluster() { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ static u32 clusters() { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ int quanta() const { return (p.blocks_k + p.quantum - 1) / p.quantum; }  // of a tile
    // Where in the streamed tiles a cluster begins, in quanta.
    __device__ __forceinline__ int first_of(u32 cluster) const {
        return static_cast<int>(static_cast<u32>(tiles.streamed * quanta()) * cluster / clusters());
    }
    // The tile of the next segment, if there is one.
    __device__ __forceinline__ int upcoming() const { return STREAM && at < end ? at / quanta() : item; }
    __device__ __forceinline__ bool next(Segment& s) {
        if constexpr (STREAM) {
            if (at < end) {
                const int tile = at / quanta(), begin = at % quanta(), stop = min(quanta(), begin + end - at);
                tiles.at(tile, s);
                s.k_begin = begin * p.quantum;
                s.k_end = min(stop * p.quantum, p.blocks_k);
                at += stop - begin;
                tiles.ask(upcoming());
                return true;
            }
        }
        if (item >= tiles.count()) return false;
        tiles.at(item, s);
        s.k_begin = min(static_cast<int>(quanta() * part / SPLIT) * p.quantum, p.blocks_k);
        s.k_end = min(static_cast<int>(quanta() * (part + 1) / SPLIT) * p.quantum, p.blocks_k);
        item += clusters();
        tiles.ask(upcoming());
        return true;
    }
};

// Which parity each stage's barrier has next. Every tile begins with stage 0, so that stages are constants in the
// consumers' unrolled loop; a stage that a tile does not reach keeps its parity.
struct Phases {
    u32 bits = 0;
    __device__ __forceinline__ u32 next(int stage) {
        const u32 parity = bits >> stage & 1;
        bits ^= 1u << stage;
        return parity;
    }
};
