// amax.cuh - the largest finite magnitude of a stream of elements, and whether it met inf or NaN.
//
// bf16 goes two at a time. Adding 0x0080 to a magnitude moves the finite ones to 0x0080..0x7fff and
// inf and NaN to 0x8000..0x807f, which are negative as int16: a signed maximum that starts at 0x0080
// passes them over, and their sign bits remain as the mark of a non-finite element.
#pragma once
#include "vec.cuh"

template <class T> struct amax_of;

template <> struct amax_of<bf16> {
    u32 best = 0x00800080u;
    u32 seen = 0;

    __device__ __forceinline__ void add_word(u32 w) {
        u32 moved = (w & 0x7fff7fffu) + 0x00800080u;
        asm("max.s16x2 %0, %0, %1;" : "+r"(best) : "r"(moved));
        seen |= moved;
    }
    __device__ __forceinline__ void add(const vec8<bf16> &v) {
#pragma unroll
        for (int i = 0; i < vec8<bf16>::words; ++i) add_word(v.w[i]);
    }
    __device__ __forceinline__ void add(bf16 x) { add_word(x.bits); }
    // Non-negative floats order as their bit patterns do.
    __device__ __forceinline__ u32 bits() const {
        u32 low = (best & 0xffffu) - 0x80u, high = (best >> 16) - 0x80u;
        return (low > high ? low : high) << 16;
    }
    __device__ __forceinline__ bool nonfinite() const { return seen & 0x80008000u; }
};

template <> struct amax_of<fp32> {
    u32 best = 0;
    u32 largest = 0; // of all magnitudes, inf and NaN too

    __device__ __forceinline__ void add_word(u32 w) {
        u32 magnitude = w & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
        best = magnitude < 0x7f800000u && magnitude > best ? magnitude : best;
    }
    __device__ __forceinline__ void add(const vec8<fp32> &v) {
#pragma unroll
        for (int i = 0; i < vec8<fp32>::words; ++i) add_word(v.w[i]);
    }
    __device__ __forceinline__ void add(fp32 x) { add_word(__float_as_uint(x.value)); }
    __device__ __forceinline__ u32 bits() const { return best; }
    __device__ __forceinline__ bool nonfinite() const { return largest >= 0x7f800000u; }
};

// Maximum over the block of a non-negative float's bits, in every thread. `slots`: one word a warp.
template <int threads> __device__ __forceinline__ u32 block_max(u32 bits, u32 *slots) {
    static_assert(threads % 32 == 0 && threads <= 1024, "whole warps");
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = threadIdx.x % 32 < threads / 32 ? slots[threadIdx.x % 32] : 0;
    return __reduce_max_sync(0xffffffffu, bits);
}

// The end of an amax kernel: this CTA's entry of partials, the entries that no CTA owns, found_inf.
template <int threads, class T>
__device__ __forceinline__ void write_partial(const amax_of<T> &amax, u32 *slots, u32 *partials,
                                              int n_partials, u32 *found_inf) {
    u32 best = block_max<threads>(amax.bits(), slots);
    bool bad = __syncthreads_or(amax.nonfinite());
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = best;
        if (bad && found_inf) *found_inf = 1;
    }
    if (blockIdx.x == 0)
        for (int i = gridDim.x + threadIdx.x; i < n_partials; i += threads) partials[i] = 0;
}
