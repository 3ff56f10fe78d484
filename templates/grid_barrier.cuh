// grid_barrier.cuh - one meeting of all CTAs of a cooperative launch, without memory that somebody
// must have initialised: gridDim + 1 words of 64 bits.
//
// A CTA arrives by setting its flag to the epoch, a number that no other call uses, so old contents
// do not matter. A replayed graph uses the same epoch again: the CTA that leaves last therefore
// sets all flags to another value. The count of those who have left is zeroed by CTA 0 before it
// arrives; nobody counts before all have arrived.
#pragma once
#include "ptx.cuh"

// What any CTA wrote before is seen by all after. Called by the whole block.
template <int threads> __device__ __forceinline__ void meet_grid(u64 *flags, u64 epoch) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (blockIdx.x == 0) *reinterpret_cast<volatile u64 *>(flags + gridDim.x) = 0;
        store_release(flags + blockIdx.x, epoch);
    }
    for (u32 i = threadIdx.x; i < gridDim.x; i += threads)
        while (load_acquire(flags + i) != epoch) {
        }
    __syncthreads();
}

// After the last use of the barrier in this launch.
__device__ __forceinline__ void leave_grid(u64 *flags, u64 epoch) {
    if (threadIdx.x != 0) return;
    if (atomicAdd(flags + gridDim.x, u64(1)) != gridDim.x - 1) return;
    for (u32 i = 0; i < gridDim.x; ++i) flags[i] = ~epoch;
}
