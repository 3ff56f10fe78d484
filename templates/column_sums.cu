// column_sums.cu - op "column_sums": dbias from the partial sums that a quantising kernel left, in ascending
// order of the strips; a thread per column.
#include "ptx.cuh"
#include "sums.cuh"

constexpr int threads = 128;

extern "C" __global__ void __launch_bounds__(threads)
    $entry(const float *partials, i64 partials_ld, i64 partial_rows, i64 cols, float *dbias,
           int accumulate) {
    start_kernel(nullptr);
    for (i64 col = i64(blockIdx.x) * threads + threadIdx.x; col < cols;
         col += i64(gridDim.x) * threads)
        finish_sum(dbias, partials, partials_ld, partial_rows, col, accumulate);
}
