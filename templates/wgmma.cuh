// wgmma.cuh - what surrounds the warpgroup matrix multiply: fences, groups, descriptors. The instruction
// itself has one operand a register, so the GEMM template spells it out for its tile.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Shared-memory operand of rows of 128 bytes with the 128-byte swizzle: 1024 bytes from 8 rows to the next.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}
