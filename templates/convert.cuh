// convert.cuh - scales, and the cast to FP8, bit for bit as the numerics rules of fp8gen say.
//
//   scale     = (max / 2^margin) / amax, IEEE division; 1 for amax = 0; FLT_MAX where that
//               overflows; optionally rounded down to a power of two by clearing the mantissa.
//   q         = cast(x * scale), round to nearest even; finite x saturates, also where x * scale
//               overflows; NaN becomes 0x7f; +-inf becomes NaN in E4M3 and stays +-inf in E5M2.
//
// Whether an element is finite is judged on x, not on x * scale: cvt.rn.satfinite alone would turn
// inf into the largest finite value. repair8 puts that right, without a branch, in 6 instructions
// for 4 elements of bf16, less where the lifted magnitudes (amax.cuh) are there already.
#pragma once
#include "amax.cuh"

struct scale_pair {
    float scale;
    float scale_inv;
};

// maximum: of the format, divided by 2^margin, which is exact.
template <bool power_of_two>
__device__ __forceinline__ scale_pair scale_to(float maximum, float amax) {
    float scale = 1.0f;
    if (amax > 0.0f) {
        scale = __fdiv_rn(maximum, amax);
        if (scale > largest_float) scale = largest_float;
        if (power_of_two) scale = __uint_as_float(__float_as_uint(scale) & 0xff800000u);
    }
    return {scale, __fdiv_rn(1.0f, scale)};
}
template <class format, bool power_of_two>
__device__ __forceinline__ scale_pair scale_from_amax(float amax) {
    return scale_to<power_of_two>(format::max, amax);
}
// The format as an argument.
template <bool power_of_two, int margin = 0>
__device__ __forceinline__ scale_pair scale_from_amax(float amax, bool to_e5m2) {
    return scale_to<power_of_two>((to_e5m2 ? e5m2::max : e4m3::max) / (1 << margin), amax);
}

// The 16 words that go with a tensor scaling: scale, its inverse, the amax it was made of (or 0).
__device__ __forceinline__ void write_scales(float *scales, scale_pair pair, float amax) {
    if (blockIdx.x == 0 && threadIdx.x < 16)
        scales[threadIdx.x] = threadIdx.x == 0   ? pair.scale
                              : threadIdx.x == 4 ? pair.scale_inv
                              : threadIdx.x == 8 ? amax
                                                 : 0.0f;
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

// A factor for all eight elements, or one for each.
__device__ __forceinline__ float factor(float scale, int) { return scale; }
__device__ __forceinline__ float factor(const float (&scales)[8], int i) { return scales[i]; }

// Eight elements to eight bytes, element 0 in bits 0..7 of .x; non-finite elements come out wrong.
template <class format, class T, class scale_t>
__device__ __forceinline__ uint2 cast8(const vec8<T> &v, const scale_t &scale) {
    u32 q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        q[i] = cast2<format>(__fmul_rn(element(v, 2 * i), factor(scale, 2 * i)),
                             __fmul_rn(element(v, 2 * i + 1), factor(scale, 2 * i + 1)));
    return make_uint2(q[0] | q[1] << 16, q[2] | q[3] << 16);
}

// prmt with its mode that copies signs, which __byte_perm would drop.
__device__ __forceinline__ u32 byte_signs(u32 a, u32 b, u32 selector) {
    u32 c;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(selector));
    return c;
}

// 0xff for every non-finite one of elements 4 * half .. 4 * half + 3: their lifted magnitudes are
// negative, and prmt copies the sign of a byte over a byte.
__device__ __forceinline__ u32 nonfinite_bytes(const vec8<bf16> &v, int half) {
    return byte_signs(lifted<bf16>::of(v.w[2 * half]), lifted<bf16>::of(v.w[2 * half + 1]), 0xfdb9);
}
__device__ __forceinline__ u32 nonfinite_bytes(const vec8<fp32> &v, int half) {
    u32 m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = lifted<fp32>::of(v.w[4 * half + i]);
    return __byte_perm(byte_signs(m[0], m[1], 0xffbb), byte_signs(m[2], m[3], 0xffbb), 0x6420);
}

// Four bytes that cast8 made, those in `mask` of non-finite elements: NaN (0x7f) in E4M3; in E5M2
// NaN is 0x7f or 0xff already, and inf, now the largest finite value (0x7b or 0xfb), goes one up.
template <class format> __device__ __forceinline__ u32 repair4(u32 q, u32 mask);
template <> __device__ __forceinline__ u32 repair4<e4m3>(u32 q, u32 mask) {
    return (q & ~mask) | (mask & 0x7f7f7f7fu);
}
template <> __device__ __forceinline__ u32 repair4<e5m2>(u32 q, u32 mask) {
    return q + (mask & ~(q >> 2) & 0x01010101u);
}
template <class format, class T>
__device__ __forceinline__ uint2 repair8(const vec8<T> &v, uint2 q) {
    return make_uint2(repair4<format>(q.x, nonfinite_bytes(v, 0)),
                      repair4<format>(q.y, nonfinite_bytes(v, 1)));
}

// Rows of eight, to a format that is an argument.
template <class T, int n>
__device__ __forceinline__ void cast_rows(uint2 (&q)[n], const vec8<T> (&v)[n], float scale,
                                          bool to_e5m2) {
    if (to_e5m2) {
#pragma unroll
        for (int i = 0; i < n; ++i) q[i] = repair8<e5m2>(v[i], cast8<e5m2>(v[i], scale));
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) q[i] = repair8<e4m3>(v[i], cast8<e4m3>(v[i], scale));
    }
}

// Eight consecutive scales from shared memory.
__device__ __forceinline__ void read_scales(float (&s)[8], const float *shared) {
    float4 low = reinterpret_cast<const float4 *>(shared)[0];
    float4 high = reinterpret_cast<const float4 *>(shared)[1];
    s[0] = low.x, s[1] = low.y, s[2] = low.z, s[3] = low.w;
    s[4] = high.x, s[5] = high.y, s[6] = high.z, s[7] = high.w;
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
