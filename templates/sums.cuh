// sums.cuh - column sums of tiles, in a fixed order, so that dbias has equal bits from run to run:
// 8 rows in a thread, two threads by shuffle, the eight warps in turn.
#pragma once
#include "tile.cuh"

using tile_sums = float[tile_threads / 32][tile];

// This thread's part; a barrier must stand between this and write_sums.
template <class T>
__device__ __forceinline__ void put_sums(tile_sums &sums, const vec8<T> (&v)[patch], int thread) {
    int cg = thread % groups, warp = thread / 32;
#pragma unroll
    for (int j = 0; j < patch; ++j) {
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < patch; ++i) s += element(v[i], j);
        s += __shfl_xor_sync(0xffffffffu, s, groups);
        if (thread % 32 < groups) sums[warp][cg * patch + j] = s;
    }
}

// The tile's sums into `partials` (its first column); cols: how many of its columns exist, or more.
__device__ __forceinline__ void write_sums(const tile_sums &sums, float *partials, i64 cols,
                                           int thread) {
    if (thread >= tile || thread >= cols) return;
    float s = 0.0f;
#pragma unroll
    for (int w = 0; w < tile_threads / 32; ++w) s += sums[w][thread];
    partials[thread] = s;
}

// One column's sum over all strips, in ascending order.
__device__ __forceinline__ void finish_sum(float *dbias, const float *partials, i64 ld, i64 strips,
                                           i64 col, bool accumulate) {
    float s = 0.0f;
#pragma unroll 16
    for (i64 r = 0; r < strips; ++r) s += __ldcg(partials + r * ld + col);
    dbias[col] = accumulate ? dbias[col] + s : s;
}
