// column_sums.cu - op "column_sums": dbias from the partial sums that a quantising kernel left.
//
// A CTA takes 32 columns, each of its warps every eighth strip of them in ascending order, and then
// adds up the warps: an order that depends on the number of strips alone, and enough reads under
// way for a launch this short.
#include "ptx.cuh"

constexpr int threads = 256;
constexpr int warps = threads / 32;

extern "C" __global__ void __launch_bounds__(threads)
    $entry(const float *partials, i64 partials_ld, i64 partial_rows, i64 cols, float *dbias,
           int accumulate) {
    __shared__ float sums[warps][32];
    start_kernel(nullptr);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (i64 left = i64(blockIdx.x) * 32; left < cols; left += i64(gridDim.x) * 32) {
        i64 col = left + lane;
        float s = 0.0f;
        if (col < cols) {
            const float *p = partials + col;
#pragma unroll 16
            for (i64 r = warp; r < partial_rows; r += warps) s += __ldcg(p + r * partials_ld);
        }
        sums[warp][lane] = s;
        __syncthreads();
        if (warp == 0 && col < cols) {
#pragma unroll
            for (int w = 1; w < warps; ++w) s += sums[w][lane];
            dbias[col] = accumulate ? dbias[col] + s : s;
        }
        __syncthreads();
    }
}
