// quantize.cu - op "quantize": one read of source, the row copy and the transposed copy in FP8, padding
// included, the scales, and (for dy) dbias.
//
// A CTA strides over tiles of 128 x 128 elements, last tile first: the amax kernel before it read the
// tensor front to back, so its end is still in L2. A thread holds a patch of 8 rows x 8 columns in
// registers. The row copy leaves straight from there; the transposed copy is turned 4 x 4 bytes at a
// time with prmt, laid into shared memory, and leaves as whole 128-byte lines.
//
// Shared tile: 128 rows (columns of source) of 16 chunks of 8 bytes. Chunk c of row r lies at
// c ^ (r / 8), so that the 16 threads which write one chunk of 16 rows meet 16 different bank pairs, and
// 16-byte reads along a row stay whole (the two halves swapped where r / 8 is odd).
//
// dbias: each tile leaves its column sums in dbias_partials; the CTA that finishes a column strip (ticket)
// adds them in ascending order. No float atomics: the same bits from run to run.
#include "amax.cuh"
#include "convert.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr int threads = 256;
constexpr int tile = 128; // rows and columns of a tile
constexpr int patch = 8; // rows and columns of a thread's patch
constexpr int groups = tile / patch; // patches along each side; threads = groups * groups

struct matrix {
    const source_t *base;
    i64 ld, rows, cols;
    int width; // bytes of the widest aligned access
};

__device__ __forceinline__ void load_patch(vec8<source_t> (&v)[patch], const matrix &m, i64 row,
                                           i64 col, bool whole) {
    if (whole) {
        const source_t *p = m.base + row * m.ld + col;
        if (m.width == 16) { // spelled out, so that the eight loads are issued back to back
#pragma unroll
            for (int i = 0; i < patch; ++i) v[i] = load_vec8(p + i * m.ld, 16);
        } else if (m.width == 8) {
#pragma unroll
            for (int i = 0; i < patch; ++i) v[i] = load_vec8(p + i * m.ld, 8);
        } else {
#pragma unroll
            for (int i = 0; i < patch; ++i) v[i] = load_vec8(p + i * m.ld, m.width);
        }
    } else {
#pragma unroll
        for (int i = 0; i < patch; ++i)
            v[i] = load_vec8_edge(m.base + (row + i) * m.ld + col,
                                  row + i < m.rows ? m.cols - col : 0);
    }
}

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
__device__ __forceinline__ void put_transposed(u8 *shared, const uint2 (&q)[patch], int rg, int cg) {
#pragma unroll
    for (int half = 0; half < 2; ++half) { // columns 0..3 and 4..7
        u32 top[4], bottom[4]; // rows 0..3 and 4..7 of each column
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
            *reinterpret_cast<uint4 *>(transposed + (col + r) * ld + row + 16 * c) = v;
    }
}

struct dbias_args {
    float *dbias, *partials;
    i64 ld;
    u32 *tickets;
    int accumulate;
};

// Column sums of the tile in a fixed order: 8 rows in a thread, two patches in a warp, then the warps.
// `sums`: one row of 128 floats a warp. Called by the whole block.
__device__ __forceinline__ void add_dbias(const vec8<source_t> (&v)[patch], float (*sums)[tile],
                                          const dbias_args &a, i64 tile_row, i64 tile_rows,
                                          i64 tile_col, i64 cols) {
    __shared__ bool last;
    int cg = threadIdx.x % groups, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < patch; ++j) {
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < patch; ++i) s += element(v[i], j);
        s += __shfl_xor_sync(0xffffffffu, s, 16);
        if (threadIdx.x % 32 < 16) sums[warp][cg * patch + j] = s;
    }
    __syncthreads();
    i64 col = tile_col * tile + threadIdx.x;
    if (threadIdx.x < tile) {
        float s = 0.0f;
#pragma unroll
        for (int w = 0; w < threads / 32; ++w) s += sums[w][threadIdx.x];
        a.partials[tile_row * a.ld + col] = s;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(a.tickets + tile_col, 1) == tile_rows - 1;
    __syncthreads();
    if (last && threadIdx.x < tile && col < cols) {
        __threadfence();
        float s = 0.0f;
#pragma unroll 8
        for (i64 i = 0; i < tile_rows; ++i) s += __ldcg(a.partials + i * a.ld + col);
        a.dbias[col] = a.accumulate ? a.dbias[col] + s : s;
    }
}

extern "C" __global__ void __launch_bounds__(threads, sizeof(source_t) == 2 ? 3 : 2)
$entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, const u32 *partials, int n_partials,
       float *scales, u8 *row, i64 row_ld, i64 row_rows, u8 *transposed, i64 transposed_ld,
       i64 transposed_rows, float *dbias, float *dbias_partials, i64 dbias_ld, u32 *tickets,
       int accumulate) {
    __shared__ alignas(16) u8 turned[tile * tile];
    __shared__ float sums[threads / 32][tile];
    __shared__ u32 slots[threads / 32];
    matrix m = {source, source_ld, rows, cols, access_bytes<source_t>(source, source_ld)};
    i64 tile_rows = ceil_div(rows, tile), tile_cols = ceil_div(cols, tile);
    int rg = threadIdx.x / groups, cg = threadIdx.x % groups;
    float scale = 0.0f;
    bool first = true;

    for (i64 t = tile_rows * tile_cols - 1 - blockIdx.x; t >= 0; t -= gridDim.x) {
        i64 tile_row = t / tile_cols, tile_col = t - tile_row * tile_cols;
        i64 top = tile_row * tile, left = tile_col * tile;
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

        if (dbias)
            add_dbias(v, sums, {dbias, dbias_partials, dbias_ld, tickets, accumulate}, tile_row,
                      tile_rows, tile_col, cols);
#pragma unroll
        for (int i = 0; i < patch; ++i) keep_packed(v[i]);
        uint2 q[patch];
#pragma unroll
        for (int i = 0; i < patch; ++i) q[i] = quantize8<format>(v[i], scale);
        if (row) {
            i64 r = top + rg * patch;
            u8 *p = row + r * row_ld + left + cg * patch;
#pragma unroll
            for (int i = 0; i < patch; ++i)
                if (r + i < row_rows) *reinterpret_cast<uint2 *>(p + i * row_ld) = q[i];
        }
        if (transposed) {
            __syncthreads(); // the tile before has left the shared memory
            put_transposed(turned, q, rg, cg);
            __syncthreads();
            store_transposed(turned, transposed, transposed_ld, top, left, transposed_rows);
        }
    }
}
