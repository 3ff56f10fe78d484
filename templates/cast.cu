// cast.cu - op "cast": a tensor whose scale, or amax, is known before it is read (or, where `fresh`
// says that nothing is known yet, its own amax from partial maxima). One read, the row copy and the
// transposed copy in FP8, padding included, the running amax, found_inf, and the column sums of
// every 128 rows for dbias. The scale goes to every row of row_scales too, where these are wanted.
//
// The running amax is a maximum of float bits as int32: magnitudes order as their bits do, and a
// negative float (did not run yet) is below all of them, so the order of the CTAs does not matter.
#include "amax.cuh"
#include "convert.cuh"
#include "copies.cuh"
#include "ptx.cuh"
#include "stage.cuh"
#include "sums.cuh"

using source_t = $source;
constexpr bool power_of_two = $power_of_two;
constexpr int margin = $margin;
constexpr int threads = tile_threads;

// An amax from elsewhere may be anything: inf counts as the largest finite number, NaN and negative
// as 0.
__device__ __forceinline__ float usable_amax(float amax) {
    return amax > 0.0f ? fminf(amax, largest_float) : 0.0f;
}

// The inverse scale, for the rows of a tile, and zeros up to a multiple of 16 rows.
__device__ __forceinline__ void write_rows(float *row_scales, i64 top, i64 rows, float scale_inv) {
    i64 row = top + threadIdx.x;
    if (threadIdx.x < tile && row < (rows + 15) / 16 * 16)
        row_scales[row] = row < rows ? scale_inv : 0.0f;
}

// Once, at the end: this CTA's maximum into the running one.
__device__ __forceinline__ void write_running(const amax_of<source_t> &seen, u32 *slots,
                                              float *amax, u32 *found_inf) {
    u32 best = block_max<threads>(seen.bits(), slots);
    bool bad = __syncthreads_or(seen.nonfinite());
    if (threadIdx.x != 0) return;
    if (amax) atomicMax(reinterpret_cast<int *>(amax), int(best));
    if (bad && found_inf) *found_inf = 1;
}

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, const float *known,
           int known_is_amax, const u32 *fresh, const u32 *partials, int n_partials, float *scales,
           float *row_scales, u8 *row, i64 row_ld, i64 row_rows, u8 *transposed, i64 transposed_ld,
           i64 transposed_rows, float *amax, u32 *found_inf, float *dbias_partials, i64 dbias_ld,
           const u32 *when, int e5m2) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 slots[threads / 32];
    __shared__ tile_sums sums;
    if (!start_kernel(when)) return;
    tile_walk<false> here(rows, cols);
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    copy_target to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;

    scale_pair pair;
    amax_of<source_t> seen;
    for (bool first = true; here.inside(); first = false) {
        if (!first) __syncthreads();
        in.fetch(here);
        if (first) {                         // while the tile comes
            bool own = fresh && *fresh != 0; // the scale is made of the tensor's own amax
            float given = own ? largest_partial<threads>(partials, n_partials, slots) : *known;
            bool is_amax = own || known_is_amax;
            pair = {given, __fdiv_rn(1.0f, given)};
            if (is_amax) {
                given = usable_amax(given);
                pair = scale_from_amax<power_of_two, margin>(given, e5m2);
            }
            write_scales(scales, pair, is_amax ? given : 0.0f);
        }
        i64 top = here.top(), left = here.left();
        if (row_scales && left == 0) write_rows(row_scales, top, rows, pair.scale_inv);
        vec8<source_t> v[patch];
        uint2 q[patch];
        in.take(v);
        if (dbias_partials) put_sums(sums, v, threadIdx.x);
        keep_packed(v);
#pragma unroll
        for (int i = 0; i < patch; ++i) seen.add(v[i]);
        cast_rows(q, v, pair.scale, e5m2);
        if (row) store_rows(to, q, top + rg * patch, left + cg * patch);
        __syncthreads(); // the tile has been read: its memory takes the transposed one
        if (dbias_partials)
            write_sums(sums, dbias_partials + here.row() * dbias_ld + left, cols - left,
                       threadIdx.x);
        if (transposed) {
            put_transposed(shared, q, rg, cg);
            __syncthreads();
            store_transposed(to, shared, top, left, threadIdx.x);
        }
        here.next();
    }
    write_running(seen, slots, amax, found_inf);
}
