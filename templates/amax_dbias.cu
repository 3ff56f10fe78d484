// amax_dbias.cu - op "amax" for dy of a layer with a bias: the same partial maxima, and the fp32
// column sums of every 128 rows, from the one read. The quantise kernel adds the strips in
// ascending order.
#include "amax.cuh"
#include "ptx.cuh"
#include "sums.cuh"

using source_t = $source;
constexpr int threads = tile_threads;

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 4 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u32 *partials, int n_partials,
           u32 *found_inf, float *dbias_partials, i64 dbias_ld, const u32 *when) {
    __shared__ tile_sums sums;
    __shared__ u32 slots[threads / 32];
    if (!start_kernel(when)) return;
    matrix<source_t> m = make_matrix(source, source_ld, rows, cols);
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;
    amax_of<source_t> amax;
    for (tile_walk<false> here(rows, cols); here.inside(); here.next()) {
        i64 top = here.top(), left = here.left();
        vec8<source_t> v[patch];
        load_patch(v, m, top + rg * patch, left + cg * patch,
                   top + tile <= rows && left + tile <= cols);
#pragma unroll
        for (int i = 0; i < patch; ++i) amax.add(v[i]);
        if (dbias_partials) {
            __syncthreads(); // the sums of the tile before have been read
            put_sums(sums, v, threadIdx.x);
            __syncthreads();
            write_sums(sums, dbias_partials + here.row() * dbias_ld + left, cols - left,
                       threadIdx.x);
        }
    }
    write_partial<threads>(amax, slots, partials, n_partials, found_inf);
}
