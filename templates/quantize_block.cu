// quantize_block.cu - op "quantize_block", 1 x 128: the row copy with a scale for every 128
// elements of a row, the transposed copy with one for every 128 elements of a column, from one
// read; the inverse scales of both, padding, found_inf, and the column sums of every 128 rows for
// dbias.
//
// A tile is whole blocks of both kinds, so nothing crosses tiles. Of the 256 threads 128 make the
// scales of the rows and 128 those of the columns.
#include "copies.cuh"
#include "maxima.cuh"
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
    __shared__ tile_maxima<source_t> maxima;
    __shared__ tile_sums sums;
    __shared__ __align__(16) float made[2 * tile]; // scales of the rows, then of the columns
    if (!start_kernel(when)) return;
    tile_walk<false> here(rows, cols);
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    copy_target to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    int thread = threadIdx.x, rg = thread / groups, cg = thread % groups;
    bool of_row = thread < tile; // whose scale this thread makes
    float *scales = of_row ? row_scales : transposed_scales;
    i64 scales_ld = of_row ? row_scales_ld : transposed_scales_ld, extent = of_row ? rows : cols;

    for (; here.inside(); here.next()) {
        i64 top = here.top(), left = here.left();
        vec8<source_t> v[patch];
        uint2 q[patch];
        float s[patch];
        in.fetch(here);
        in.take(v);
        bool bad = put_maxima(maxima, v, thread);
        if (bad && found_inf) *found_inf = 1;
        if (dbias_partials) put_sums(sums, v, thread);
        keep_packed(v);
        __syncthreads(); // the tile has been read: its memory takes the transposed one

        scale_pair pair = scale_from_amax<format, power_of_two>(maximum_of(maxima, thread));
        made[thread] = pair.scale;
        i64 block = of_row ? here.col() : here.row(), line = (of_row ? top : left) + thread % tile;
        if (scales && line < scales_ld)
            scales[block * scales_ld + line] = line < extent ? pair.scale_inv : 0.0f;
        if (dbias_partials)
            write_sums(sums, dbias_partials + here.row() * dbias_ld + left, cols - left, thread);
        __syncthreads();

        if (row) {
            read_scales(s, made + rg * patch);
#pragma unroll
            for (int i = 0; i < patch; ++i) q[i] = cast8<format>(v[i], s[i]);
            if (bad) {
#pragma unroll
                for (int i = 0; i < patch; ++i) q[i] = repair8<format>(v[i], q[i]);
            }
            store_rows(to, q, top + rg * patch, left + cg * patch);
        }
        if (transposed) {
            keep_packed(v);
            read_scales(s, made + tile + cg * patch);
#pragma unroll
            for (int i = 0; i < patch; ++i) q[i] = cast8<format>(v[i], s);
            if (bad) {
#pragma unroll
                for (int i = 0; i < patch; ++i) q[i] = repair8<format>(v[i], q[i]);
            }
            put_transposed(shared, q, rg, cg);
            __syncthreads();
            store_transposed(to, shared, top, left, thread);
        }
        __syncthreads(); // it has left
    }
}
