// roll.cu - op "roll": the end of an optimizer step for all tensors of a delayed-scaling state. A
// tensor that ran puts its running amax into its history, takes a new scale, and is ready for the
// next step; one that did not (running < 0) stays as it is.
//
// The scale: maxima[t] = max / 2^margin over the largest amax of the history, or over the newest
// one; an amax of 0 leaves the scale as it was. A block takes 32 tensors, neighbours in memory, and
// its 8 warps share the entries of the history.
#include "ptx.cuh"

constexpr int threads = 256, lanes = 32, warps = threads / lanes;

__device__ __forceinline__ float new_scale(float old, float amax, float maximum,
                                           bool power_of_two) {
    if (!(amax > 0.0f)) return old;
    float scale = __fdiv_rn(maximum, amax);
    if (scale > largest_float) scale = largest_float;
    return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

extern "C" __global__ void __launch_bounds__(threads)
    $entry(float *scale, float *running, float *history, int *counts, u32 *fresh,
           const float *maxima, i64 tensors, i64 length, int most_recent, int power_of_two) {
    __shared__ float best[warps][lanes];
    start_kernel(nullptr);
    int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes;
    for (i64 first = i64(blockIdx.x) * lanes; first < tensors; first += i64(gridDim.x) * lanes) {
        i64 t = first + lane;
        bool ran = t < tensors && running[t] >= 0.0f;
        float amax = ran ? running[t] : 0.0f;
        i64 count = ran ? counts[t] : 0, place = count % length;
        if (ran && !most_recent) { // of the entries that exist; the one at `place` is about to go
            i64 filled = min64(count, length);
#pragma unroll 8
            for (i64 i = warp; i < filled; i += warps) {
                float h = history[i * tensors + t];
                if (i != place) amax = h > amax ? h : amax;
            }
        }
        best[warp][lane] = amax;
        __syncthreads();
        if (warp == 0 && ran) {
#pragma unroll
            for (int w = 1; w < warps; ++w) amax = best[w][lane] > amax ? best[w][lane] : amax;
            history[place * tensors + t] = running[t];
            counts[t] = int(count + 1 < 2 * length ? count + 1 : length);
            scale[t] = new_scale(scale[t], amax, maxima[t], power_of_two);
            running[t] = -1.0f;
            if (fresh) fresh[t] = 0;
        }
        __syncthreads();
    }
}
