// vec.cuh - eight consecutive elements of a row, as raw words: the unit in which tensors are read.
//
// vec8<T> holds 16 bytes of bf16 or 32 bytes of fp32. load_vec8 reads it with the widest access
// that the caller's alignment allows; load_vec8_edge reads only the elements that exist and gives
// zero for the others, so that padding is written by the same code as data.
#pragma once
#include "types.cuh"

template <class T> struct alignas(16) vec8 {
    static constexpr int words = sizeof(T) * 8 / 4;
    u32 w[words];
};

// Element i of the vector; i must be known at compile time.
__device__ __forceinline__ float element(const vec8<bf16> &v, int i) {
    return __uint_as_float(i & 1 ? v.w[i >> 1] & 0xffff0000u : v.w[i >> 1] << 16);
}
__device__ __forceinline__ float element(const vec8<fp32> &v, int i) {
    return __uint_as_float(v.w[i]);
}

// Makes the compiler forget what it has unpacked from v so far: without this it keeps the elements
// as floats, in twice the registers, from one use of the vector to the next.
template <class T> __device__ __forceinline__ void keep_packed(vec8<T> &v) {
#pragma unroll
    for (int i = 0; i < vec8<T>::words; ++i) asm volatile("" : "+r"(v.w[i]));
}

template <class T, int n> __device__ __forceinline__ void keep_packed(vec8<T> (&v)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) keep_packed(v[i]);
}

// Reads through the read-only path.
__device__ __forceinline__ uint4 load16(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
// The same, or zero without touching memory where `wanted` is false; no branch, so that several of
// these are in flight together.
__device__ __forceinline__ uint4 load16_if(const void *p, bool wanted) {
    uint4 v;
    asm volatile("{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
                 "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
                 "@wanted ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(p), "r"(u32(wanted)));
    return v;
}
__device__ __forceinline__ uint2 load8(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// The largest access width, 16 bytes down to one element, at which every row of a matrix is
// aligned.
template <class T> __device__ __forceinline__ int access_bytes(const void *base, i64 ld) {
    u64 bits = u64(base) | u64(ld * i64(sizeof(T))) | 16;
    return int(bits & (~bits + 1));
}

template <class T> __device__ __forceinline__ vec8<T> load_vec8(const T *p, int width) {
    vec8<T> v;
    if (width == 16) {
#pragma unroll
        for (int i = 0; i < vec8<T>::words / 4; ++i) {
            uint4 q = load16(reinterpret_cast<const char *>(p) + 16 * i);
            v.w[4 * i] = q.x, v.w[4 * i + 1] = q.y, v.w[4 * i + 2] = q.z, v.w[4 * i + 3] = q.w;
        }
    } else if (width == 8) {
#pragma unroll
        for (int i = 0; i < vec8<T>::words / 2; ++i) {
            uint2 q = load8(reinterpret_cast<const char *>(p) + 8 * i);
            v.w[2 * i] = q.x, v.w[2 * i + 1] = q.y;
        }
    } else if (width == 4) {
#pragma unroll
        for (int i = 0; i < vec8<T>::words; ++i)
            v.w[i] = __ldg(reinterpret_cast<const u32 *>(p) + i);
    } else {
#pragma unroll
        for (int i = 0; i < vec8<T>::words; ++i) {
            u32 low = __ldg(reinterpret_cast<const u16 *>(p) + 2 * i);
            u32 high = __ldg(reinterpret_cast<const u16 *>(p) + 2 * i + 1);
            v.w[i] = low | high << 16;
        }
    }
    return v;
}

// The first `count` elements (may be <= 0), zero for the rest.
__device__ __forceinline__ vec8<bf16> load_vec8_edge(const bf16 *p, i64 count) {
    vec8<bf16> v;
    const u16 *q = reinterpret_cast<const u16 *>(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 low = 2 * i < count ? u32(__ldg(q + 2 * i)) : 0;
        u32 high = 2 * i + 1 < count ? u32(__ldg(q + 2 * i + 1)) : 0;
        v.w[i] = low | high << 16;
    }
    return v;
}
__device__ __forceinline__ vec8<fp32> load_vec8_edge(const fp32 *p, i64 count) {
    vec8<fp32> v;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        v.w[i] = i < count ? __ldg(reinterpret_cast<const u32 *>(p) + i) : 0;
    return v;
}
