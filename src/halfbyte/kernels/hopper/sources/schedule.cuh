// Which blocks of K of which tiles are whose. Part of linear.cuh.
#pragma once

struct Problem {
    int tokens, features, blocks_k, rows64, raster;
    int streamed, quantum;  // tiles that all blocks divide; K is divided by so many blocks: Schedule
    uint4* partials;        // sums of tiles that are not finished, for each block QUADS
    u32* flags;             // for each block and warpgroup: whether its are there; all zero between kernels
};

// Which part of its cluster's work is this block's.
struct Place {
    u32 rank, neighbour, part;
    __device__ __forceinline__ Place()
        : rank(CLUSTER > 1 ? cluster_rank() : 0), neighbour(rank % SHARE), part(rank / SHARE) {}
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

// Blocks of K from k_begin to k_end of one tile.
struct Segment {
    int feature_tile, token_base, k_begin, k_end;
};

// The segments of one cluster: its share of the first `streamed` tiles, which are divided evenly whatever their number,
// then whole tiles. What is missing of a tile that a cluster begins and does not finish, the clusters after it have
// done first of all, so that nobody waits for long (stream-K: Osama et al., PPoPP 2023).
struct Schedule {
    const Problem& p;
    const Tiles tiles;
    const u32 part;
    int item, at = 0, end = 0;
    __device__ __forceinline__ Schedule(const Problem& problem, const Place& place)
        : p(problem), tiles(problem), part(place.part), item(problem.streamed + static_cast<int>(cluster())) {
        if constexpr (STREAM) at = first_of(cluster()), end = first_of(cluster() + 1);
    }
    __device__ __forceinline__ static u32 cluster() { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ static u32 clusters() { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ int quanta() const { return (p.blocks_k + p.quantum - 1) / p.quantum; }  // of a tile
    // Where in the streamed tiles a cluster begins, in quanta.
    __device__ __forceinline__ int first_of(u32 cluster) const {
        return static_cast<int>(static_cast<u32>(p.streamed * quanta()) * cluster / clusters());
    }
    __device__ __forceinline__ bool next(Segment& s) {
        if constexpr (STREAM) {
            if (at < end) {
                const int tile = at / quanta(), begin = at % quanta(), stop = min(quanta(), begin + end - at);
                tiles.at(tile, s.feature_tile, s.token_base);
                s.k_begin = begin * p.quantum;
                s.k_end = min(stop * p.quantum, p.blocks_k);
                at += stop - begin;
                return true;
            }
        }
        if (item >= tiles.count()) return false;
        tiles.at(item, s.feature_tile, s.token_base);
        s.k_begin = min(static_cast<int>(quanta() * part / SPLIT) * p.quantum, p.blocks_k);
        s.k_end = min(static_cast<int>(quanta() * (part + 1) / SPLIT) * p.quantum, p.blocks_k);
        item += clusters();
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
