// scheduler.cuh - which tile comes next, and which stage of the ring.
//
// Tiles of the output are visited in groups of `group` rows of clusters; inside a group down the
// rows first, so that the clusters at work together share few rows of a and few of b, which L2 then
// holds.
#pragma once
#include "types.cuh"

struct tile_at {
    int m, n; // m in clusters, n in tiles
};

struct raster {
    int rows, cols, group; // clusters along m, tiles along n
    u32 inverse;           // of the tiles in a group, in units of 2^-32, rounded up (inverse_of)

    __device__ __forceinline__ int count() const { return rows * cols; }
    __device__ __forceinline__ tile_at at(u32 t) const { // divides as little as it can
        u32 per_group = group * cols;
        u32 g = __umulhi(t, inverse); // one too many at most
        if (g * per_group > t) --g;
        u32 inside = t - g * per_group;
        u32 height = min(u32(group), rows - g * group);
        u32 n = inside / group;
        if (height < group) // the last group; volatile, so that the others do not divide
            asm volatile("div.u32 %0, %1, %2;" : "=r"(n) : "r"(inside), "r"(height));
        return {int(g * group + (inside - n * height)), int(n)};
    }
};
__device__ __forceinline__ u32 inverse_of(u32 tiles_in_group) {
    return 0xffffffff / tiles_in_group + 1;
}

// A place in the ring of stages, and how often the ring has been gone round (mod 2).
template <int stages> struct ring {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void next() {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ void skip(int count) {
        count += stage;
        phase ^= (count / stages) & 1;
        stage = count % stages;
    }
};
