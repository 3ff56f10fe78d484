// wgmma.cuh - what surrounds the warpgroup matrix multiply: fences, groups, descriptors. The
// instruction itself has one operand a register, so the GEMM template spells it out for its tile.
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

// Shared-memory operand of rows of 128 bytes with the 128-byte swizzle: 1024 bytes from 8 rows to
// the next. The low word, which has the address; 2 more are 32 bytes.
constexpr u32 descriptor_high = 64 | 1u << 30;
__device__ __forceinline__ u32 matrix_descriptor(u32 address) {
    return (address & 0x3ffff) >> 4 | 1 << 16;
}
