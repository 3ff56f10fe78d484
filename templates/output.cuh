// output.cuh - what both ways out of a GEMM share: scales, conversion, stores of a few elements.
//
// Order of the scales: the smaller of the two first, so that no product on the way overflows or
// vanishes that the result would not. A sum into bf16 or fp16 is formed in fp32 and rounded once.
#pragma once

struct output {
    const tensor_map *map;
    out_t *base;
    i64 ld;
    int rows, cols;
    int by_tma;
};

struct scales {
    float smaller, larger;          // of the two tensors
    const float *of_rows, *of_cols; // of a and of b; row_scaled: of the rows of out and its columns
    const bf16 *bias;
};

__device__ __forceinline__ float finished(float x, const scales &s, float bias) {
    return __fmaf_rn(x * s.smaller, s.larger, bias);
}
__device__ __forceinline__ float finished(float x, float of_row, float of_col, float bias) {
    return __fmaf_rn(x * fminf(of_row, of_col), fmaxf(of_row, of_col), bias);
}
// Entry i of a vector that ends at `end`.
__device__ __forceinline__ float entry(const float *v, int i, int end) {
    return i < end ? __ldg(v + i) : 0.0f;
}
__device__ __forceinline__ float entry(const bf16 *v, int i, int end) {
    return i < end ? to_float(v[i]) : 0.0f;
}

// Scale i of a vector that ends at `end`, or that of the tensor.
template <bool is_vector>
__device__ __forceinline__ float scale_at(const float *v, int i, int end) {
    return is_vector ? entry(v, i, end) : __ldg(v + 4);
}

template <class T> __device__ __forceinline__ out_t as_output(T x) {
    return from_float<out_t>(to_float(x));
}
template <> __device__ __forceinline__ out_t as_output<out_t>(out_t x) { return x; }

// n neighbours of a row of out, of which the first `left` exist; `aligned`: for a store of all at
// once.
template <class T, int n>
__device__ __forceinline__ void store(out_t *target, const pack<T, n> &x, int left, bool aligned) {
    if (!add && aligned && left >= n) {
        pack<out_t, n> y;
#pragma unroll
        for (int i = 0; i < n; ++i) y.e[i] = as_output(x.e[i]);
        *reinterpret_cast<pack<out_t, n> *>(target) = y;
        return;
    }
#pragma unroll
    for (int i = 0; i < n; ++i)
        if (i < left)
            target[i] =
                add ? from_float<out_t>(to_float(target[i]) + to_float(x.e[i])) : as_output(x.e[i]);
}
