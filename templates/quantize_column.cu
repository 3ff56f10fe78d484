// quantize_column.cu - op "quantize_column": the transposed copy with a scale for every column of source (a
// row of the copy), from the column maxima that quantize_row left for every 32 rows.
//
// A CTA takes a run of tiles down one column of tiles after another, from the last row up (the end of
// source may still be in L2), and makes the scales of 128 columns once for the part of a column that it has.
#include "convert.cuh"
#include "copies.cuh"
#include "ptx.cuh"
#include "stage.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr int threads = tile_threads;
constexpr int band = 32; // rows of a column partial

// Maxima of 128 columns over all bands: a thread four columns of every eighth band.
__device__ __forceinline__ void column_maxima(float (*best)[tile], const float *partials, i64 ld,
                                              i64 bands, i64 left) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 col = left + lane * 4;
    float4 m = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (col < ld) {
#pragma unroll 8
        for (i64 b = warp; b < bands; b += threads / 32) {
            float4 p = __ldcg(reinterpret_cast<const float4 *>(partials + b * ld + col));
            m = make_float4(fmaxf(m.x, p.x), fmaxf(m.y, p.y), fmaxf(m.z, p.z), fmaxf(m.w, p.w));
        }
    }
    *reinterpret_cast<float4 *>(&best[warp][lane * 4]) = m;
}

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, const float *column_partials,
           i64 column_partials_ld, u8 *transposed, i64 transposed_ld, i64 transposed_rows,
           float *transposed_scales, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(16) float best[threads / 32][tile];
    __shared__ __align__(16) float scale[tile];
    if (!start_kernel(when)) return;
    copy_target to = {nullptr, 0, 0, transposed, transposed_ld, transposed_rows};
    int thread = threadIdx.x, rg = thread / groups, cg = thread % groups;
    column_run here(rows, cols);
    tile_source<source_t> in = {make_matrix(source, source_ld, rows, cols), shared};
    in.fetch(here);

    i64 made = -1; // column of tiles whose scales are there
    while (here.inside()) {
        i64 top = here.top(), left = here.left();
        vec8<source_t> v[patch];
        uint2 q[patch];
        float s[patch];
        if (made != left) {
            made = left;
            column_maxima(best, column_partials, column_partials_ld, ceil_div(rows, band), left);
            __syncthreads();
            if (thread < tile) {
                float amax = 0.0f;
#pragma unroll
                for (int w = 0; w < threads / 32; ++w) amax = fmaxf(amax, best[w][thread]);
                if (left + thread >= cols) amax = 0.0f;
                scale_pair pair = scale_from_amax<format, power_of_two>(amax);
                scale[thread] = pair.scale;
                if (transposed_scales && here.i == 0 && left + thread < ceil_div(cols, 16) * 16)
                    transposed_scales[left + thread] = left + thread < cols ? pair.scale_inv : 0.0f;
            }
        }
        in.take(v);
        read_scales(s, scale + cg * patch);
#pragma unroll
        for (int i = 0; i < patch; ++i) q[i] = repair8<format>(v[i], cast8<format>(v[i], s));
        __syncthreads(); // the tile has been read: its memory takes the transposed one
        put_transposed(shared, q, rg, cg);
        __syncthreads();
        if (transposed) store_transposed(to, shared, top, left, thread);
        here.next();
        if (!here.inside()) break;
        __syncthreads();
        in.fetch(here);
    }
}
