// amax_dbias.cu - op "amax" for dy of a layer with a bias: the same partial maxima, and the fp32 column
// sums of every 128 rows, from the one read.
//
// The sums are formed in a fixed order (8 rows in a thread, two threads by shuffle, the warps in turn);
// the quantise kernel adds the strips in ascending order. No float atomics: equal bits from run to run.
#include "amax.cuh"
#include "tile.cuh"

using source_t = $source;

// Column sums of the tile into `partials` (its first column). Called by the whole block.
__device__ __forceinline__ void sum_columns(const vec8<source_t> (&v)[patch], float (*sums)[tile],
                                            float *partials, i64 cols) {
    int cg = threadIdx.x % groups, warp = threadIdx.x / 32;
    __syncthreads(); // the tile before has been read
#pragma unroll
    for (int j = 0; j < patch; ++j) {
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < patch; ++i) s += element(v[i], j);
        s += __shfl_xor_sync(0xffffffffu, s, groups);
        if (threadIdx.x % 32 < groups) sums[warp][cg * patch + j] = s;
    }
    __syncthreads();
    if (threadIdx.x < tile && threadIdx.x < cols) {
        float s = 0.0f;
#pragma unroll
        for (int w = 0; w < threads / 32; ++w) s += sums[w][threadIdx.x];
        partials[threadIdx.x] = s;
    }
}

extern "C" __global__ void __launch_bounds__(threads, 4)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u32 *partials, int n_partials,
           u32 *found_inf, float *dbias_partials, i64 dbias_ld) {
    __shared__ float sums[threads / 32][tile];
    __shared__ u32 slots[threads / 32];
    matrix<source_t> m = make_matrix(source, source_ld, rows, cols);
    i64 tile_rows = ceil_div(rows, tile), tile_cols = ceil_div(cols, tile);
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;
    amax_of<source_t> amax;
    for (i64 t = blockIdx.x; t < tile_rows * tile_cols; t += gridDim.x) {
        tile_place at = place_of(t, tile_cols);
        i64 top = at.row * tile, left = at.col * tile;
        vec8<source_t> v[patch];
        load_patch(v, m, top + rg * patch, left + cg * patch,
                   top + tile <= rows && left + tile <= cols);
#pragma unroll
        for (int i = 0; i < patch; ++i) amax.add(v[i]);
        if (dbias_partials)
            sum_columns(v, sums, dbias_partials + at.row * dbias_ld + left, cols - left);
    }
    write_partial<threads>(amax, slots, partials, n_partials, found_inf);
}
