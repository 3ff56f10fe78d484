// store.cu - op "store": a stage, or gradients that were reduced over ranks, into the caller's
// exact tensor, as it is or with the scales of rows and columns, a bias, added to what is there (in
// fp32, rounded once). All of any alignment.
//
// A CTA takes a segment of one row at a time. Accesses are as wide as the bases and leading dims
// allow (16 bytes down to one element); the columns past the last whole access go one by one.
#include "ptx.cuh"
#include "vec.cuh"

using source_t = $source;
using target_t = $target;
constexpr int threads = 256;
constexpr int steps = 4; // accesses per thread and segment

// What is done to the columns of a row; NULL: nothing.
struct columns {
    const bf16 *bias;
    const float *scales;
    i64 scales_step;
    float row_scale; // with scales
    bool accumulate;
};

__device__ __forceinline__ target_t combine(target_t old, source_t x, const columns &of, i64 col) {
    float sum = to_float(x);
    if (of.scales) { // the smaller first: nothing overflows on the way that the result does not
        float scale = __ldg(of.scales + col * of.scales_step);
        sum = sum * fminf(of.row_scale, scale) * fmaxf(of.row_scale, scale);
    }
    if (of.bias) sum += to_float(of.bias[col]);
    return from_float<target_t>(of.accumulate ? to_float(old) + sum : sum);
}

// Columns [first, first + n * threads * steps) of one row, n elements an access; the segment that
// holds the row's end also takes the columns past its last whole access, one a thread.
template <int n>
__device__ __forceinline__ void copy_segment(const source_t *source, const columns &of,
                                             target_t *target, i64 first, i64 cols) {
    i64 whole = cols & ~i64(n - 1);
#pragma unroll 1 // the loads of a step cannot pass the stores of the one before
    for (int i = 0; i < steps; ++i) {
        i64 j = first + i64(i * threads + threadIdx.x) * n;
        if (j < whole) {
            auto s = *reinterpret_cast<const pack<source_t, n> *>(source + j);
            pack<target_t, n> t = {};
            if (of.accumulate) t = *reinterpret_cast<const pack<target_t, n> *>(target + j);
#pragma unroll
            for (int k = 0; k < n; ++k) t.e[k] = combine(t.e[k], s.e[k], of, j + k);
            *reinterpret_cast<pack<target_t, n> *>(target + j) = t;
        }
    }
    i64 j = whole + threadIdx.x;
    if (n > 1 && j < cols && first + n * threads * steps >= cols)
        target[j] = combine(of.accumulate ? target[j] : target_t{}, source[j], of, j);
}

struct tensors {
    const source_t *source;
    i64 source_ld;
    const float *row_scales;
    i64 row_scales_step;
    columns of;
    target_t *target;
    i64 target_ld, rows, cols;
};

template <int n> __device__ __forceinline__ void copy(const tensors &t) {
    constexpr int segment = n * threads * steps;
    i64 segments = ceil_div(t.cols, segment);
    for (i64 item = blockIdx.x; item < t.rows * segments; item += gridDim.x) {
        i64 row = item / segments, first = (item - row * segments) * segment;
        columns of = t.of;
        if (of.scales) of.row_scale = __ldg(t.row_scales + row * t.row_scales_step);
        copy_segment<n>(t.source + row * t.source_ld, of, t.target + row * t.target_ld, first,
                        t.cols);
    }
}

extern "C" __global__ void __launch_bounds__(threads, 4)
    $entry(const source_t *source, i64 source_ld, const float *a_scales, i64 a_scales_step,
           const float *b_scales, i64 b_scales_step, const bf16 *bias, target_t *target,
           i64 target_ld, i64 rows, i64 cols, int accumulate) {
    start_kernel(nullptr);
    const tensors t = {source,
                       source_ld,
                       a_scales,
                       a_scales_step,
                       {bias, b_scales, b_scales_step, 1, accumulate != 0},
                       target,
                       target_ld,
                       rows,
                       cols};
    constexpr int widest = 16 / sizeof(target_t);
    int width = access_bytes<target_t>(target, rows > 1 ? target_ld : 0) / int(sizeof(target_t));
    int bytes = access_bytes<source_t>(source, rows > 1 ? source_ld : 0);
    if (bytes < 16) width = min(width, bytes / int(sizeof(source_t)));
    if constexpr (widest > 4) {
        if (width == widest) return copy<widest>(t);
    }
    switch (width) {
    case 4: copy<4>(t); break;
    case 2: copy<2>(t); break;
    default: copy<1>(t); break;
    }
}
