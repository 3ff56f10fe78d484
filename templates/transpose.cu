// transpose.cu - op "transpose": FP8 bytes, row copy to transposed copy, padding as zeros.
//
// A scale of the tensor stays as it is. Those of tiles of 128 x 128 are transposed too. Where
// scales_ld is 0 there is one for each row, the same for all of 128 rows, and the tiles of the
// transposed copy get it. Without a source only the scales are written.
#include "copies.cuh"
#include "ptx.cuh"

constexpr int threads = tile_threads;

// Eight bytes of a row, or those of them that exist.
__device__ __forceinline__ uint2 load_bytes(const u8 *p, i64 count, bool aligned) {
    if (count >= 8 && aligned) return load8(p);
    u64 bytes = 0;
#pragma unroll 1
    for (int i = 0; i < 8 && i < count; ++i) bytes |= u64(__ldg(p + i)) << (8 * i);
    return make_uint2(u32(bytes), u32(bytes >> 32));
}

extern "C" __global__ void __launch_bounds__(threads, 4)
    $entry(const u8 *source, i64 source_ld, i64 rows, i64 cols, u8 *transposed, i64 transposed_ld,
           i64 transposed_rows, const float *scales, i64 scales_ld, float *transposed_scales,
           i64 transposed_scales_ld, const u32 *when) {
    __shared__ __align__(16) u8 turned[tile * tile];
    if (!start_kernel(when)) return;
    copy_target to = {nullptr, 0, 0, transposed, transposed_ld, transposed_rows};
    bool aligned = ((u64(source) | u64(source_ld)) & 7) == 0;
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;
    for (tile_walk<false> here(rows, cols); here.inside(); here.next()) {
        if (transposed_scales && threadIdx.x == 0)
            write_inverse(transposed_scales, transposed_scales_ld, here.col(), here.row(),
                          here.rows,
                          scales[scales_ld ? here.row() * scales_ld + here.col() : here.top()]);
        if (!source) continue;
        i64 row = here.top() + rg * patch, col = here.left() + cg * patch;
        const u8 *p = source + row * source_ld + col;
        uint2 q[patch];
        if (aligned && row + patch <= rows && col + patch <= cols) {
#pragma unroll
            for (int i = 0; i < patch; ++i) q[i] = load8(p + i * source_ld);
        } else {
#pragma unroll
            for (int i = 0; i < patch; ++i)
                q[i] = load_bytes(p + i * source_ld, row + i < rows ? cols - col : 0, aligned);
        }
        __syncthreads(); // the tile before has left the shared memory
        put_transposed(turned, q, rg, cg);
        __syncthreads();
        store_transposed(to, turned, here.top(), here.left(), threadIdx.x);
    }
}
