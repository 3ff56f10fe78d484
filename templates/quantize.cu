// quantize.cu - op "quantize": one read of source, the row copy and the transposed copy in FP8,
// padding included, the scales, and (for dy) dbias from the partial sums that the amax kernel left.
//
// Tiles are taken from the last to the first: the amax kernel before read the tensor front to back,
// so its end is still in L2.
#include "amax.cuh"
#include "convert.cuh"
#include "copies.cuh"
#include "ptx.cuh"
#include "stage.cuh"
#include "sums.cuh"

using source_t = $source;
constexpr bool power_of_two = $power_of_two;
constexpr int threads = tile_threads;

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, const u32 *partials,
           int n_partials, float *scales, u8 *row, i64 row_ld, i64 row_rows, u8 *transposed,
           i64 transposed_ld, i64 transposed_rows, float *dbias, const float *dbias_partials,
           i64 dbias_ld, int accumulate, const u32 *when, int e5m2) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 slots[threads / 32];
    if (!start_kernel(when)) return;
    tile_walk<true> here(rows, cols);
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    copy_target to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;

    scale_pair pair;
    for (bool first = true; here.inside(); first = false) {
        if (!first) __syncthreads();
        in.fetch(here);
        if (first) { // while the tile comes
            float amax = largest_partial<threads>(partials, n_partials, slots);
            pair = scale_from_amax<power_of_two>(amax, e5m2);
            write_scales(scales, pair, amax);
        }
        i64 top = here.top(), left = here.left();
        vec8<source_t> v[patch];
        uint2 q[patch];
        in.take(v);
        cast_rows(q, v, pair.scale, e5m2);
        if (row) store_rows(to, q, top + rg * patch, left + cg * patch);
        __syncthreads(); // the tile has been read: its memory takes the transposed one
        if (transposed) {
            put_transposed(shared, q, rg, cg);
            __syncthreads();
            store_transposed(to, shared, top, left, threadIdx.x);
        }
        if (dbias && here.i == 0 && threadIdx.x < tile && left + threadIdx.x < cols)
            finish_sum(dbias, dbias_partials, dbias_ld, here.rows, left + threadIdx.x, accumulate);
        here.next();
    }
}
