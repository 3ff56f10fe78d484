// copies.cuh - the two FP8 copies of a tile on their way to memory, padding included.
//
// The row copy leaves straight from the registers, 128 bytes a row. The transposed copy is turned 4
// x 4 bytes at a time with prmt, laid into shared memory, and leaves as whole 128-byte lines. Both
// are streaming stores, so that they do not push out of L2 what is still to be read.
//
// Shared tile: 128 rows (columns of source) of 16 chunks of 8 bytes. Chunk c of row r lies at c ^
// (r / 8), so that the 16 threads which write one chunk of 16 rows meet 16 different bank pairs,
// and 16-byte reads along a row stay whole (the two halves swapped where r / 8 is odd).
#pragma once
#include "tile.cuh"

struct copy_target { // of one operand
    u8 *row;         // may be NULL
    i64 row_ld, row_rows;
    u8 *transposed; // may be NULL
    i64 transposed_ld, transposed_rows;
};

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

// The shared tile to rows [left, left + 128) of the transposed copy, bytes [top, top + 128) of
// each.
__device__ __forceinline__ void store_transposed(const copy_target &to, const u8 *shared, i64 top,
                                                 i64 left, int thread) {
    int c = thread % 8, first = thread / 8;
    constexpr int step = tile_threads / 8;
    u8 *p = to.transposed + (left + first) * to.transposed_ld + top + 16 * c;
#pragma unroll
    for (int i = 0; i < tile / step; ++i) {
        int r = first + i * step, g = r / patch;
        uint4 v = *reinterpret_cast<const uint4 *>(shared + r * tile + (((2 * c) ^ g) & ~1) * 8);
        if (g & 1) v = make_uint4(v.z, v.w, v.x, v.y);
        if (left + r < to.transposed_rows)
            __stcs(reinterpret_cast<uint4 *>(p + i * step * to.transposed_ld), v);
    }
}

// The patch's rows of the row copy. row, col: its first element.
__device__ __forceinline__ void store_rows(const copy_target &to, const uint2 (&q)[patch], i64 row,
                                           i64 col) {
    u8 *p = to.row + row * to.row_ld + col;
#pragma unroll
    for (int i = 0; i < patch; ++i)
        if (row + i < to.row_rows) __stcs(reinterpret_cast<uint2 *>(p + i * to.row_ld), q[i]);
}

// The inverse scale of a 128 x 128 tile at `place` of a line of `count`; with the last one, zeros
// to the end of the line.
__device__ __forceinline__ void write_inverse(float *scales, i64 ld, u32 line, u32 place, u32 count,
                                              float scale_inv) {
    float *p = scales + line * ld;
    p[place] = scale_inv;
    if (place == count - 1)
#pragma unroll 1
        for (u32 i = count; i < u32(ld); ++i) p[i] = 0.0f;
}
