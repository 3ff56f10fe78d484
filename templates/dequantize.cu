// dequantize.cu - op "dequantize": target = decode(q) * scale_inv as fp32, from the row copy or the
// transposed one. For inspection and tests; a thread per element along the target's rows.
#include "convert.cuh"

using format = $format;
constexpr int threads = 256;

extern "C" __global__ void __launch_bounds__(threads)
    $entry(const u8 *source, i64 source_ld, const float *scales, float *target, i64 target_ld,
           i64 rows, i64 cols, int is_transposed) {
    float scale_inv = scales[4];
    i64 segments = ceil_div(cols, threads);
    for (i64 item = blockIdx.x; item < rows * segments; item += gridDim.x) {
        i64 i = item / segments, j = (item - i * segments) * threads + threadIdx.x;
        if (j < cols)
            target[i * target_ld + j] =
                __fmul_rn(decode<format>(is_transposed ? source[j * source_ld + i]
                                                       : source[i * source_ld + j]),
                          scale_inv);
    }
}
