// convert.cuh - scales, and the cast to FP8, bit for bit as the numerics rules of fp8gen say.
//
//   scale     = max / amax, IEEE division; 1 for amax = 0; FLT_MAX where that overflows; optionally
//               rounded down to a power of two by clearing the mantissa.
//   q         = cast(x * scale), round to nearest even; finite x saturates, also where x * scale
//               overflows; NaN becomes 0x7f; +-inf becomes NaN in E4M3 and stays +-inf in E5M2.
//
// Whether an element is finite is judged on x, not on x * scale. cvt.rn.satfinite alone would turn inf
// into the largest finite value. E4M3: fma(x, 0, x * scale) is NaN for a non-finite x and x * scale
// for every finite one, so one instruction settles it. E5M2 tells inf from NaN, so the few vectors that
// hold a non-finite element take a branch.
#pragma once
#include "vec.cuh"

struct scale_pair {
    float scale;
    float scale_inv;
};

template <class format, bool power_of_two>
__device__ __forceinline__ scale_pair scale_from_amax(float amax) {
    float scale = 1.0f;
    if (amax > 0.0f) {
        scale = __fdiv_rn(format::max, amax);
        if (scale > 3.402823466e+38f) scale = 3.402823466e+38f;
        if (power_of_two) scale = __uint_as_float(__float_as_uint(scale) & 0xff800000u);
    }
    return {scale, __fdiv_rn(1.0f, scale)};
}

// Two elements to two bytes; `low` lands in bits 0..7.
template <class format> __device__ __forceinline__ u32 cast2(float low, float high);
template <> __device__ __forceinline__ u32 cast2<e4m3>(float low, float high) {
    u16 q;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(q) : "f"(high), "f"(low));
    return q;
}
template <> __device__ __forceinline__ u32 cast2<e5m2>(float low, float high) {
    u16 q;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(q) : "f"(high), "f"(low));
    return q;
}

template <class format> __device__ __forceinline__ float scaled(float x, float scale);
template <> __device__ __forceinline__ float scaled<e4m3>(float x, float scale) {
    return __fmaf_rn(x, 0.0f, __fmul_rn(x, scale));
}
template <> __device__ __forceinline__ float scaled<e5m2>(float x, float scale) {
    return __fmul_rn(x, scale);
}

__device__ __forceinline__ bool has_nonfinite(const vec8<bf16> &v) {
    u32 moved = 0;
#pragma unroll
    for (int i = 0; i < vec8<bf16>::words; ++i) moved |= (v.w[i] & 0x7fff7fffu) + 0x00800080u;
    return moved & 0x80008000u;
}
__device__ __forceinline__ bool has_nonfinite(const vec8<fp32> &v) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < vec8<fp32>::words; ++i) {
        u32 magnitude = v.w[i] & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f800000u;
}

// Eight elements to eight bytes, element 0 in bits 0..7 of .x.
template <class format, class T>
__device__ __forceinline__ uint2 cast8(const vec8<T> &v, float scale) {
    u32 q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        q[i] = cast2<format>(scaled<format>(element(v, 2 * i), scale),
                             scaled<format>(element(v, 2 * i + 1), scale));
    return make_uint2(q[0] | q[1] << 16, q[2] | q[3] << 16);
}

// E5M2 only: +-inf in x is +-inf in q (cast8 left the largest finite value, 0x7b or 0xfb).
template <class T> __device__ __noinline__ uint2 restore_inf(const vec8<T> v, uint2 q) {
    u32 words[2] = {q.x, q.y};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if ((__float_as_uint(element(v, i)) & 0x7fffffffu) == 0x7f800000u)
            words[i / 4] += 1u << (8 * (i % 4));
    return make_uint2(words[0], words[1]);
}

template <class format, class T>
__device__ __forceinline__ uint2 quantize8(const vec8<T> &v, float scale) {
    return cast8<format>(v, scale);
}
template <>
__device__ __forceinline__ uint2 quantize8<e5m2, bf16>(const vec8<bf16> &v, float scale) {
    uint2 q = cast8<e5m2>(v, scale);
    return has_nonfinite(v) ? restore_inf(v, q) : q;
}
template <>
__device__ __forceinline__ uint2 quantize8<e5m2, fp32>(const vec8<fp32> &v, float scale) {
    uint2 q = cast8<e5m2>(v, scale);
    return has_nonfinite(v) ? restore_inf(v, q) : q;
}

// One byte to float, exactly.
template <class format> __device__ __forceinline__ float decode(u8 q);
template <> __device__ __forceinline__ float decode<e4m3>(u8 q) {
    u32 halves;
    float x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(q)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u16(halves)));
    return x;
}
template <> __device__ __forceinline__ float decode<e5m2>(u8 q) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u16(u16(q) << 8)));
    return x;
}
