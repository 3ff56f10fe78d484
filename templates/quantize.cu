// quantize.cu - op "quantize": one read of source, the row copy and the transposed copy in FP8, padding
// included, the scales, and (for dy) dbias from the partial sums that the amax kernel left.
//
// Tiles are taken from the last to the first: the amax kernel before read the tensor front to back, so
// its end is still in L2. The row copy leaves straight from the registers; the transposed copy is turned
// 4 x 4 bytes at a time with prmt, laid into shared memory, and leaves as whole 128-byte lines. Both are
// streaming stores, so that they do not push out of L2 what is still to be read.
//
// Shared tile: 128 rows (columns of source) of 16 chunks of 8 bytes. Chunk c of row r lies at
// c ^ (r / 8), so that the 16 threads which write one chunk of 16 rows meet 16 different bank pairs, and
// 16-byte reads along a row stay whole (the two halves swapped where r / 8 is odd).
#include "amax.cuh"
#include "convert.cuh"
#include "tile.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;

// Bytes of four rows (one word each) to four columns: byte i of column j = byte j of row i.
__device__ __forceinline__ void transpose4(u32 (&c)[4], u32 r0, u32 r1, u32 r2, u32 r3) {
    u32 a = __byte_perm(r0, r1, 0x5140), b = __byte_perm(r2, r3, 0x5140);
    u32 d = __byte_perm(r0, r1, 0x7362), e = __byte_perm(r2, r3, 0x7362);
    c[0] = __byte_perm(a, b, 0x5410);
    c[1] = __byte_perm(a, b, 0x7632);
    c[2] = __byte_perm(d, e, 0x5410);
    c[3] = __byte_perm(d, e, 0x7632);
}

// The patch, transposed, into the shared tile. rg, cg: the patch's place among the tile's patches.
__device__ __forceinline__ void put_transposed(u8 *shared, const uint2 (&q)[patch], int rg,
                                               int cg) {
#pragma unroll
    for (int half = 0; half < 2; ++half) { // columns 0..3 and 4..7
        u32 top[4], bottom[4];             // rows 0..3 and 4..7 of each column
        if (half == 0) {
            transpose4(top, q[0].x, q[1].x, q[2].x, q[3].x);
            transpose4(bottom, q[4].x, q[5].x, q[6].x, q[7].x);
        } else {
            transpose4(top, q[0].y, q[1].y, q[2].y, q[3].y);
            transpose4(bottom, q[4].y, q[5].y, q[6].y, q[7].y);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int r = cg * patch + half * 4 + j;
            *reinterpret_cast<uint2 *>(shared + r * tile + ((rg ^ cg) * 8)) =
                make_uint2(top[j], bottom[j]);
        }
    }
}

// The shared tile to rows [col, col + 128) of the transposed copy, bytes [row, row + 128) of each.
__device__ __forceinline__ void store_transposed(const u8 *shared, u8 *transposed, i64 ld, i64 row,
                                                 i64 col, i64 transposed_rows) {
#pragma unroll
    for (int i = 0; i < tile * groups / 2 / threads; ++i) {
        int item = int(threadIdx.x) + i * threads;
        int r = item / 8, c = item % 8, g = r / patch;
        uint4 v = *reinterpret_cast<const uint4 *>(shared + r * tile + (((2 * c) ^ g) & ~1) * 8);
        if (g & 1) v = make_uint4(v.z, v.w, v.x, v.y);
        if (col + r < transposed_rows)
            __stcs(reinterpret_cast<uint4 *>(transposed + (col + r) * ld + row + 16 * c), v);
    }
}

// dbias of the tile's columns: the partials of the amax kernel, in ascending order.
__device__ __forceinline__ void sum_dbias(float *dbias, const float *partials, i64 ld,
                                          i64 tile_rows, i64 col, int accumulate) {
    float s = 0.0f;
#pragma unroll 16
    for (i64 r = 0; r < tile_rows; ++r) s += __ldg(partials + r * ld + col);
    dbias[col] = accumulate ? dbias[col] + s : s;
}

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, const u32 *partials,
           int n_partials, float *scales, u8 *row, i64 row_ld, i64 row_rows, u8 *transposed,
           i64 transposed_ld, i64 transposed_rows, float *dbias, const float *dbias_partials,
           i64 dbias_ld, int accumulate) {
    __shared__ alignas(16) u8 turned[tile * tile];
    __shared__ u32 slots[threads / 32];
    matrix<source_t> m = make_matrix(source, source_ld, rows, cols);
    i64 tile_rows = ceil_div(rows, tile), tile_cols = ceil_div(cols, tile);
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;
    float scale = 0.0f;
    bool first = true;

    for (i64 t = tile_rows * tile_cols - 1 - blockIdx.x; t >= 0; t -= gridDim.x) {
        tile_place at = place_of(t, tile_cols);
        i64 top = at.row * tile, left = at.col * tile;
        vec8<source_t> v[patch];
        load_patch(v, m, top + rg * patch, left + cg * patch,
                   top + tile <= rows && left + tile <= cols);

        if (first) { // while the first tile is on its way
            first = false;
            u32 best = 0;
            for (int i = threadIdx.x; i < n_partials; i += threads) {
                u32 p = __ldg(partials + i);
                best = p > best ? p : best;
            }
            float amax = __uint_as_float(block_max<threads>(best, slots));
            scale_pair pair = scale_from_amax<format, power_of_two>(amax);
            scale = pair.scale;
            if (blockIdx.x == 0 && threadIdx.x < 16)
                scales[threadIdx.x] = threadIdx.x == 0   ? pair.scale
                                      : threadIdx.x == 4 ? pair.scale_inv
                                      : threadIdx.x == 8 ? amax
                                                         : 0.0f;
        }

        uint2 q[patch];
#pragma unroll
        for (int i = 0; i < patch; ++i) q[i] = quantize8<format>(v[i], scale);
        if (row) {
            i64 r = top + rg * patch;
            u8 *p = row + r * row_ld + left + cg * patch;
#pragma unroll
            for (int i = 0; i < patch; ++i)
                if (r + i < row_rows) __stcs(reinterpret_cast<uint2 *>(p + i * row_ld), q[i]);
        }
        if (transposed) {
            __syncthreads(); // the tile before has left the shared memory
            put_transposed(turned, q, rg, cg);
            __syncthreads();
            store_transposed(turned, transposed, transposed_ld, top, left, transposed_rows);
        }
        if (dbias && at.row == tile_rows - 1 && threadIdx.x < tile && left + threadIdx.x < cols)
            sum_dbias(dbias, dbias_partials, dbias_ld, tile_rows, left + threadIdx.x, accumulate);
    }
}
