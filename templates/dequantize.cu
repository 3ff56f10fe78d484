// dequantize.cu - op "dequantize": target = decode(q) * scale_inv as fp32, from the row copy or the
// transposed one. For inspection and tests; a thread per element along the target's rows.
//
// Scalings: tensor - scales[4]; row - one per row of the operand; block - [128 of depth][row]; tile
// - [128 rows][128 of depth]. An operand's rows are its own: those of the transposed copy are
// columns of target.
#include "convert.cuh"
#include "ptx.cuh"

enum scaling { tensor, row, block, tile };
constexpr scaling kind = $scaling;
constexpr int threads = 256;

__device__ __forceinline__ float inverse_scale(const float *scales, i64 ld, i64 line, i64 depth) {
    switch (kind) {
    case tensor: return scales[4];
    case row: return scales[line];
    case block: return scales[depth / 128 * ld + line];
    default: return scales[line / 128 * ld + depth / 128];
    }
}

extern "C" __global__ void __launch_bounds__(threads)
    $entry(const u8 *source, i64 source_ld, const float *scales, i64 scales_ld, float *target,
           i64 target_ld, i64 rows, i64 cols, int is_transposed, int is_e5m2) {
    start_kernel(nullptr);
    i64 segments = ceil_div(cols, threads);
    for (i64 item = blockIdx.x; item < rows * segments; item += gridDim.x) {
        i64 i = item / segments, j = (item - i * segments) * threads + threadIdx.x;
        if (j >= cols) continue;
        i64 line = is_transposed ? j : i, depth = is_transposed ? i : j;
        u8 q = source[line * source_ld + depth];
        target[i * target_ld + j] = __fmul_rn(is_e5m2 ? decode<e5m2>(q) : decode<e4m3>(q),
                                              inverse_scale(scales, scales_ld, line, depth));
    }
}
