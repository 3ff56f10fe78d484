// sum.cu - op "sum": what came from the ranks, added up in their order, into the caller's exact
// tensor: as it is, as an average, or added to what is there. All of any alignment.
//
// Sums are fp32 and rounded once to the dtype in which gradients are reduced, so that one part
// alone (parts = 1) is what a collective has summed. A CTA takes a segment of one row at a time;
// the parts of an access are read one after the other, those of all accesses together.
#include "ptx.cuh"
#include "vec.cuh"

using source_t = $source;
using target_t = $target;
constexpr int threads = 256;
constexpr int steps = 2; // accesses per thread and segment

struct task {
    const source_t *source; // of this row, part 0
    i64 part_stride;
    i64 parts;
    float share; // 1 / parts of an average, or 1
    bool accumulate;
};

__device__ __forceinline__ target_t finish(const task &t, target_t old, float sum) {
    float value = to_float(from_float<source_t>(sum * t.share));
    return from_float<target_t>(t.accumulate ? to_float(old) + value : value);
}

__device__ __forceinline__ void sum_one(const task &t, target_t *target, i64 j) {
    float sum = to_float(t.source[j]);
#pragma unroll 1
    for (i64 part = 1; part < t.parts; ++part) sum += to_float(t.source[part * t.part_stride + j]);
    target[j] = finish(t, t.accumulate ? target[j] : target_t{}, sum);
}

// Columns [first, first + n * threads * steps) of one row, n elements an access; the segment that
// holds the row's end also takes the columns past its last whole access, one a thread.
template <int n>
__device__ __forceinline__ void sum_segment(const task &t, target_t *target, i64 first, i64 cols) {
    i64 whole = cols & ~i64(n - 1);
    float sums[steps][n];
#pragma unroll 1
    for (i64 part = 0; part < t.parts; ++part) {
        const source_t *source = t.source + part * t.part_stride;
        pack<source_t, n> s[steps] = {};
#pragma unroll
        for (int i = 0; i < steps; ++i) {
            i64 j = first + i64(i * threads + threadIdx.x) * n;
            if (j < whole) s[i] = *reinterpret_cast<const pack<source_t, n> *>(source + j);
        }
#pragma unroll
        for (int i = 0; i < steps; ++i)
#pragma unroll
            for (int k = 0; k < n; ++k)
                sums[i][k] = part == 0 ? to_float(s[i].e[k]) : sums[i][k] + to_float(s[i].e[k]);
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        i64 j = first + i64(i * threads + threadIdx.x) * n;
        if (j < whole) {
            pack<target_t, n> to = {};
            if (t.accumulate) to = *reinterpret_cast<const pack<target_t, n> *>(target + j);
#pragma unroll
            for (int k = 0; k < n; ++k) to.e[k] = finish(t, to.e[k], sums[i][k]);
            *reinterpret_cast<pack<target_t, n> *>(target + j) = to;
        }
    }
    i64 j = whole + threadIdx.x;
    if (n > 1 && j < cols && first + n * threads * steps >= cols) sum_one(t, target, j);
}

template <int n>
__device__ __forceinline__ void sum_rows(task t, i64 source_ld, target_t *target, i64 target_ld,
                                         i64 rows, i64 cols) {
    constexpr int segment = n * threads * steps;
    const source_t *source = t.source;
    i64 segments = ceil_div(cols, segment);
    for (i64 item = blockIdx.x; item < rows * segments; item += gridDim.x) {
        i64 row = item / segments, first = (item - row * segments) * segment;
        t.source = source + row * source_ld;
        sum_segment<n>(t, target + row * target_ld, first, cols);
    }
}

extern "C" __global__ void __launch_bounds__(threads, 4)
    $entry(const source_t *source, i64 part_stride, i64 source_ld, i64 parts, target_t *target,
           i64 target_ld, i64 rows, i64 cols, int average, int accumulate) {
    start_kernel(nullptr);
    constexpr int widest = 16 / sizeof(target_t);
    task t = {source, part_stride, parts, average ? 1.0f / float(parts) : 1.0f, accumulate != 0};
    int width = access_bytes<target_t>(target, rows > 1 ? target_ld : 0) / int(sizeof(target_t));
    int bytes = min(access_bytes<source_t>(source, rows > 1 ? source_ld : 0),
                    access_bytes<source_t>(source, parts > 1 ? part_stride : 0));
    if (bytes < 16) width = min(width, bytes / int(sizeof(source_t)));
    if constexpr (widest > 4) {
        if (width == widest) return sum_rows<widest>(t, source_ld, target, target_ld, rows, cols);
    }
    switch (width) {
    case 4: sum_rows<4>(t, source_ld, target, target_ld, rows, cols); break;
    case 2: sum_rows<2>(t, source_ld, target, target_ld, rows, cols); break;
    default: sum_rows<1>(t, source_ld, target, target_ld, rows, cols); break;
    }
}
