// quantize_tile.cu - op "quantize_block", 128 x 128: one scale for a tile, the same for both
// copies, from one read; the inverse scales in the layouts of both, padding, found_inf, and the
// column sums of every 128 rows for dbias.
#include "amax.cuh"
#include "convert.cuh"
#include "copies.cuh"
#include "ptx.cuh"
#include "stage.cuh"
#include "sums.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr int threads = tile_threads;

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u8 *row, i64 row_ld,
           i64 row_rows, float *row_scales, i64 row_scales_ld, u8 *transposed, i64 transposed_ld,
           i64 transposed_rows, float *transposed_scales, i64 transposed_scales_ld, u32 *found_inf,
           float *dbias_partials, i64 dbias_ld, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 slots[threads / 32];
    __shared__ tile_sums sums;
    if (!start_kernel(when)) return;
    tile_walk<false> here(rows, cols);
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    copy_target to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    int thread = threadIdx.x, rg = thread / groups, cg = thread % groups;

    for (; here.inside(); here.next()) {
        i64 top = here.top(), left = here.left();
        vec8<source_t> v[patch];
        uint2 q[patch];
        in.fetch(here);
        in.take(v);
        if (dbias_partials) put_sums(sums, v, thread);
        keep_packed(v);
        amax_of<source_t> amax;
#pragma unroll
        for (int i = 0; i < patch; ++i) amax.add(v[i]);
        if (amax.nonfinite() && found_inf) *found_inf = 1;
        keep_packed(v);
        float largest = __uint_as_float(
            block_max<threads>(amax.bits(), slots)); // and a barrier: the tile has been read
        if (dbias_partials)
            write_sums(sums, dbias_partials + here.row() * dbias_ld + left, cols - left, thread);
        scale_pair pair = scale_from_amax<format, power_of_two>(largest);
        if (thread == 0 && row_scales)
            write_inverse(row_scales, row_scales_ld, here.row(), here.col(), here.cols,
                          pair.scale_inv);
        if (thread == 0 && transposed_scales)
            write_inverse(transposed_scales, transposed_scales_ld, here.col(), here.row(),
                          here.rows, pair.scale_inv);
#pragma unroll
        for (int i = 0; i < patch; ++i)
            q[i] = repair8<format>(v[i], cast8<format>(v[i], pair.scale));
        if (row) store_rows(to, q, top + rg * patch, left + cg * patch);
        if (transposed) {
            put_transposed(shared, q, rg, cg);
            __syncthreads();
            store_transposed(to, shared, top, left, thread);
        }
        __syncthreads(); // it has left
    }
}
