// quantize_lines.cu - op "quantize_lines": the row copy with a scale for every row and the
// transposed copy with one for every column, from one read and the maxima of the rows and columns
// (line_scales); padding included.
//
// Tiles are taken from the last to the first: the maxima were found front to back, so the end of
// source is still in L2. Of the 256 threads 128 make the scales of the rows and 128 those of the
// columns.
#include "convert.cuh"
#include "copies.cuh"
#include "ptx.cuh"
#include "stage.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr int threads = tile_threads;

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, const float *row_maxima,
           const float *column_maxima, u8 *row, i64 row_ld, i64 row_rows, u8 *transposed,
           i64 transposed_ld, i64 transposed_rows, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(16) float made[2 * tile]; // scales of the rows, then of the columns
    if (!start_kernel(when)) return;
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    copy_target to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    int thread = threadIdx.x, rg = thread / groups, cg = thread % groups;
    bool of_row = thread < tile; // whose scale this thread makes
    const float *maxima = of_row ? row_maxima : column_maxima;
    i64 extent = of_row ? rows : cols;

#pragma unroll 1
    for (tile_walk<true> here(rows, cols); here.inside(); here.next()) {
        i64 top = here.top(), left = here.left(), line = (of_row ? top : left) + thread % tile;
        vec8<source_t> v[patch];
        uint2 q[patch];
        float s[patch];
        in.fetch(here);
        float amax = maxima && line < extent ? __ldcg(maxima + line) : 0.0f;
        made[thread] = scale_from_amax<format, power_of_two>(amax).scale;
        in.take(v);
        keep_packed(v);
        if (row) {
            read_scales(s, made + rg * patch);
#pragma unroll
            for (int i = 0; i < patch; ++i) q[i] = repair8<format>(v[i], cast8<format>(v[i], s[i]));
            store_rows(to, q, top + rg * patch, left + cg * patch);
        }
        __syncthreads(); // the tile has been read: its memory takes the transposed one
        if (transposed) {
            keep_packed(v);
            read_scales(s, made + tile + cg * patch);
#pragma unroll
            for (int i = 0; i < patch; ++i) q[i] = repair8<format>(v[i], cast8<format>(v[i], s));
            put_transposed(shared, q, rg, cg);
            __syncthreads();
            store_transposed(to, shared, top, left, thread);
        }
        __syncthreads(); // it has left
    }
}
