// types.cuh - the element types and widths that every template speaks of.
//
// No toolkit header is included anywhere in templates/: kernels compile faster, and a training node
// needs nothing installed. A tensor's element type is a tag (bf16, fp16, fp32, e4m3, e5m2) whose
// members say what the kernels must know of it; memory is read and written as raw words.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr float largest_float = 0x1.fffffep+127f;

struct bf16 {
    u16 bits;
};

struct fp16 {
    u16 bits;
};

struct fp32 {
    float value;
};

struct e4m3 {
    static constexpr float max = 448.0f;
};

struct e5m2 {
    static constexpr float max = 57344.0f;
};

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(fp32 x) { return x.value; }

// n neighbours, read and written at once.
template <class T, int n> struct alignas(n * sizeof(T)) pack { T e[n]; };

// Round to nearest even; NaN becomes the canonical NaN.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ fp16 from_float<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ fp32 from_float<fp32>(float x) { return fp32{x}; }

__device__ constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
__device__ __forceinline__ i64 min64(i64 a, i64 b) { return a < b ? a : b; }
