// line_scales.cu - op "line_scales": from the maxima that line_amax left the one of each row and of
// each column, and the inverse scales that follow, with their padding; and dbias from the sums that
// it left.
//
// A CTA takes 32 lines, each of its warps every eighth of their partials in ascending order, and
// then puts the warps together: sums in an order that depends on the number of partials alone.
#include "convert.cuh"
#include "ptx.cuh"

using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int side = 128; // elements of a line that one partial stands for

struct lines { // the rows, or the columns
    const float *partials;
    i64 ld, count, each; // partials of a line
    float *maxima, *scales;
};

// The maximum of line i in the threads of warp 0.
__device__ __forceinline__ float largest(const lines &l, i64 i, float (*shared)[32]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float best = 0.0f;
    if (i < l.count) {
#pragma unroll 16
        for (i64 k = warp; k < l.each; k += warps)
            best = fmaxf(best, __ldcg(l.partials + k * l.ld + i));
    }
    shared[warp][lane] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < warps; ++w) best = fmaxf(best, shared[w][lane]);
    return best;
}
// The sum of column i, of `count`, over its `each` partials, likewise.
__device__ __forceinline__ float sum(const float *partials, i64 ld, i64 each, i64 i, i64 count,
                                     float (*shared)[32]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float s = 0.0f;
    if (i < count) {
#pragma unroll 16
        for (i64 k = warp; k < each; k += warps) s += __ldcg(partials + k * ld + i);
    }
    shared[warp][lane] = s;
    __syncthreads();
    s = 0.0f;
#pragma unroll
    for (int w = 0; w < warps; ++w) s += shared[w][lane];
    return s;
}

extern "C" __global__ void __launch_bounds__(threads)
    $entry(const float *row_partials, i64 row_partials_ld, i64 rows, i64 cols,
           const float *column_partials, i64 column_partials_ld, float *row_maxima,
           float *column_maxima, float *row_scales, float *transposed_scales, float *dbias,
           const float *dbias_partials, i64 dbias_ld, int accumulate, const u32 *when) {
    __shared__ float shared[2][warps][32];
    if (!start_kernel(when)) return;
    i64 of_rows = ceil_div(rows, 32), all = of_rows + ceil_div(cols, 32);
#pragma unroll 1
    for (i64 k = blockIdx.x; k < all; k += gridDim.x) {
        bool is_row = k < of_rows;
        const lines l = {is_row ? row_partials : column_partials,
                         is_row ? row_partials_ld : column_partials_ld,
                         is_row ? rows : cols,
                         ceil_div(is_row ? cols : rows, side),
                         is_row ? row_maxima : column_maxima,
                         is_row ? row_scales : transposed_scales};
        i64 i = (is_row ? k : k - of_rows) * 32 + threadIdx.x % 32;
        float amax = l.partials ? largest(l, i, shared[0]) : 0.0f;
        float total = 0.0f;
        bool sums = dbias && !is_row;
        if (sums) total = sum(dbias_partials, dbias_ld, l.each, i, cols, shared[1]);
        if (threadIdx.x < 32) {
            if (l.maxima && i < l.count) l.maxima[i] = amax;
            if (l.scales && i < ceil_div(l.count, 16) * 16)
                l.scales[i] =
                    i < l.count ? scale_from_amax<format, power_of_two>(amax).scale_inv : 0.0f;
            if (sums && i < cols) dbias[i] = accumulate ? dbias[i] + total : total;
        }
        __syncthreads();
    }
}
