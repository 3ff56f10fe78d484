// column_maxima.cu - op "column_maxima": the largest of every column of partial maxima; a thread
// per column.
#include "ptx.cuh"

constexpr int threads = 128;

extern "C" __global__ void __launch_bounds__(threads)
    $entry(const float *partials, i64 partials_ld, i64 partial_rows, i64 cols, float *maxima) {
    start_kernel(nullptr);
    for (i64 col = i64(blockIdx.x) * threads + threadIdx.x; col < cols;
         col += i64(gridDim.x) * threads) {
        float best = 0.0f;
#pragma unroll 8
        for (i64 row = 0; row < partial_rows; ++row)
            best = fmaxf(best, __ldg(partials + row * partials_ld + col));
        maxima[col] = best;
    }
}
