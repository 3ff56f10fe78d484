// walk.cuh - the static order of tiles: each cluster takes every gridDim-th one. counter.cuh has
// the other way to hand them out, with the same names.
#pragma once
#include "scheduler.cuh"

struct tile_counter {}; // none

__device__ __forceinline__ void init_slots(u32) {}

// The producer's walk.
struct tiles_to_load {
    int count, t;

    __device__ __forceinline__ tiles_to_load(u32, int count, const tile_counter &)
        : count(count), t(blockIdx.x / cluster) {}
    __device__ __forceinline__ bool inside() const { return t < count; }
    __device__ __forceinline__ void look_ahead() {}
    __device__ __forceinline__ void next() { t += gridDim.x / cluster; }
};

// A consumer warpgroup's walk.
struct tiles_to_make {
    int t;

    __device__ __forceinline__ tiles_to_make(u32, int group)
        : t((blockIdx.x + (pingpong ? group * gridDim.x : 0)) / cluster) {}
    __device__ __forceinline__ bool inside(int count) const { return t < count; }
    __device__ __forceinline__ int take() const { return t; }
    __device__ __forceinline__ void next() { t += (pingpong ? 2 : 1) * gridDim.x / cluster; }
};
