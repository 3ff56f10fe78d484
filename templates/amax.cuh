// amax.cuh - largest finite magnitudes, and whether inf or NaN was met.
//
// Magnitudes are lifted: the sign bit is cleared and the smallest normal number's bits are added.
// Finite ones then lie between that and 0x7f..f, inf and NaN become negative integers, so a signed
// maximum that starts at the lifted zero passes them over, and their sign bits remain as the mark
// of a non-finite element. bf16 goes two at a time.
#pragma once
#include "vec.cuh"

template <class T> struct lifted;

template <> struct lifted<bf16> {
    static constexpr int in_word = 2;
    static constexpr u32 zero = 0x00800080u, marks = 0x80008000u;

    static __device__ __forceinline__ u32 of(u32 w) { return (w & 0x7fff7fffu) + zero; }
    static __device__ __forceinline__ u32 greater(u32 a, u32 b) {
        asm("max.s16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
    }
    // The float's bits of the low or the high magnitude, of the larger of the two.
    static __device__ __forceinline__ u32 low(u32 w) { return (w - 0x80u) << 16; }
    static __device__ __forceinline__ u32 high(u32 w) { return (w & 0xffff0000u) - 0x00800000u; }
    static __device__ __forceinline__ u32 best(u32 w) {
        return low(w) > high(w) ? low(w) : high(w);
    }
};

template <> struct lifted<fp32> {
    static constexpr int in_word = 1;
    static constexpr u32 zero = 0x00800000u, marks = 0x80000000u;

    static __device__ __forceinline__ u32 of(u32 w) { return (w & 0x7fffffffu) + zero; }
    static __device__ __forceinline__ u32 greater(u32 a, u32 b) { return int(a) > int(b) ? a : b; }
    static __device__ __forceinline__ u32 best(u32 w) { return w - zero; }
};

template <class T> struct amax_of {
    u32 largest = lifted<T>::zero;
    u32 seen = 0;

    __device__ __forceinline__ void add_word(u32 w) {
        u32 moved = lifted<T>::of(w);
        largest = lifted<T>::greater(largest, moved);
        seen |= moved;
    }
    __device__ __forceinline__ void add(const vec8<T> &v) {
#pragma unroll
        for (int i = 0; i < vec8<T>::words; ++i) add_word(v.w[i]);
    }
    __device__ __forceinline__ void add(bf16 x) { add_word(x.bits); }
    __device__ __forceinline__ void add(fp32 x) { add_word(__float_as_uint(x.value)); }
    // Non-negative floats order as their bit patterns do.
    __device__ __forceinline__ u32 bits() const { return lifted<T>::best(largest); }
    __device__ __forceinline__ bool nonfinite() const { return seen & lifted<T>::marks; }
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

// The largest of the partial maxima that an amax kernel left, in every thread. `slots` as above.
template <int threads>
__device__ __forceinline__ float largest_partial(const u32 *partials, u32 count, u32 *slots) {
    u32 best = 0;
    for (u32 i = threadIdx.x; i < count; i += threads) {
        u32 p = __ldcg(partials + i);
        best = p > best ? p : best;
    }
    return __uint_as_float(block_max<threads>(best, slots));
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
