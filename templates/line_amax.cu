// line_amax.cu - op "line_amax": the largest finite magnitudes of every row and of every column of
// source, in one read: of a row, one for each 128 of its columns, of a column, one for each 128 of
// its rows. For dy of a layer with a bias also the fp32 column sums of every 128 rows.
//
// While a tile is looked at the next one is on its way into the shared memory that this one came
// in.
#include "maxima.cuh"
#include "ptx.cuh"
#include "stage.cuh"
#include "sums.cuh"

using source_t = $source;
constexpr int threads = tile_threads;

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, float *row_partials,
           i64 row_partials_ld, float *column_partials, i64 column_partials_ld, u32 *found_inf,
           float *dbias_partials, i64 dbias_ld, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ tile_maxima<source_t> maxima;
    __shared__ tile_sums sums;
    if (!start_kernel(when)) return;
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    int thread = threadIdx.x, line = thread % tile;
    bool of_row = thread < tile; // whose maxima this thread writes
    float *partials = of_row ? row_partials : column_partials;
    i64 ld = of_row ? row_partials_ld : column_partials_ld, extent = of_row ? rows : cols;

    tile_walk<false> here(rows, cols), next = here;
    bool bad = false;
#pragma unroll 1
    for (bool first = true; here.inside(); first = false) {
        i64 top = here.top(), left = here.left();
        if (!first) {
            vec8<source_t> v[patch];
            in.take(v);
            bad |= put_maxima(maxima, v, thread);
            keep_packed(v);
            if (dbias_partials) put_sums(sums, v, thread);
            __syncthreads(); // the tile has been read
        }
        if (next.inside()) in.fetch(next);
        next.next();
        if (first) continue;
        i64 i = (of_row ? top : left) + line;
        if (partials && i < extent)
            partials[(of_row ? here.col() : here.row()) * ld + i] = maximum_of(maxima, thread);
        if (dbias_partials)
            write_sums(sums, dbias_partials + here.row() * dbias_ld + left, cols - left, thread);
        here.next();
    }
    if (bad && found_inf) *found_inf = 1;
}
