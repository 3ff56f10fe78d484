// store.cu - op "store": a stage, or gradients that were reduced over ranks, into the caller's exact tensor,
// as it is or with a bias or added to what is there (in fp32, rounded once). All of any alignment.
//
// A CTA takes a segment of one row at a time. Accesses are as wide as the bases and leading dims allow (16
// bytes down to one element); the columns past the last whole access go one by one.
#include "vec.cuh"

using source_t = $source;
using target_t = $target;
constexpr bool accumulate = $accumulate;
constexpr int threads = 256;
constexpr int steps = 4; // accesses per thread and segment

template <int n> struct alignas(n * sizeof(target_t)) pack { target_t e[n]; };
template <int n> struct alignas(n * sizeof(source_t)) source_pack { source_t e[n]; };

// bias: of this column, or NULL.
__device__ __forceinline__ target_t combine(target_t old, source_t x, const bf16 *bias) {
    float sum = to_float(x);
    if (bias) sum += to_float(*bias);
    return from_float<target_t>(accumulate ? to_float(old) + sum : sum);
}

// Columns [first, first + n * threads * steps) of one row, n elements an access; the segment that holds
// the row's end also takes the columns past its last whole access, one a thread.
template <int n>
__device__ __forceinline__ void copy_segment(const source_t *source, const bf16 *bias,
                                             target_t *target, i64 first, i64 cols) {
    i64 whole = cols & ~i64(n - 1);
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        i64 j = first + i64(i * threads + threadIdx.x) * n;
        if (j < whole) {
            source_pack<n> s = *reinterpret_cast<const source_pack<n> *>(source + j);
            pack<n> t = {};
            if (accumulate) t = *reinterpret_cast<const pack<n> *>(target + j);
#pragma unroll
            for (int k = 0; k < n; ++k)
                t.e[k] = combine(t.e[k], s.e[k], bias ? bias + j + k : nullptr);
            *reinterpret_cast<pack<n> *>(target + j) = t;
        }
    }
    i64 j = whole + threadIdx.x;
    if (n > 1 && j < cols && first + n * threads * steps >= cols)
        target[j] =
            combine(accumulate ? target[j] : target_t{}, source[j], bias ? bias + j : nullptr);
}

template <int n>
__device__ __forceinline__ void copy(const source_t *source, i64 source_ld, const bf16 *bias,
                                     target_t *target, i64 target_ld, i64 rows, i64 cols) {
    constexpr int segment = n * threads * steps;
    i64 segments = ceil_div(cols, segment);
    for (i64 item = blockIdx.x; item < rows * segments; item += gridDim.x) {
        i64 row = item / segments, first = (item - row * segments) * segment;
        copy_segment<n>(source + row * source_ld, bias, target + row * target_ld, first, cols);
    }
}

extern "C" __global__ void __launch_bounds__(threads, 4)
    $entry(const source_t *source, i64 source_ld, const bf16 *bias, target_t *target, i64 target_ld,
           i64 rows, i64 cols) {
    constexpr int widest = 16 / sizeof(target_t);
    int width = access_bytes<target_t>(target, rows > 1 ? target_ld : 0) / int(sizeof(target_t));
    int bytes = access_bytes<source_t>(source, rows > 1 ? source_ld : 0);
    if (bytes < 16) width = min(width, bytes / int(sizeof(source_t)));
    if constexpr (widest > 4) {
        if (width == widest)
            return copy<widest>(source, source_ld, bias, target, target_ld, rows, cols);
    }
    switch (width) {
    case 4: copy<4>(source, source_ld, bias, target, target_ld, rows, cols); break;
    case 2: copy<2>(source, source_ld, bias, target, target_ld, rows, cols); break;
    default: copy<1>(source, source_ld, bias, target, target_ld, rows, cols); break;
    }
}
