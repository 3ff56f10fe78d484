// tile.cuh - a tile of 128 x 128 elements held by a block of 256 threads, 8 rows x 8 columns each.
//
// Thread t holds the patch (t / 16, t % 16): sixteen neighbours read 256 consecutive bytes of a bf16 row.
// Elements outside the matrix read as zero, which is what padding must be.
#pragma once
#include "vec.cuh"

constexpr int tile = 128;            // rows and columns of a tile
constexpr int patch = 8;             // rows and columns of a thread's patch
constexpr int groups = tile / patch; // patches along each side
constexpr int threads = groups * groups;

template <class T> struct matrix {
    const T *base;
    i64 ld, rows, cols;
    int width; // bytes of the widest access at which every row is aligned
};

template <class T>
__device__ __forceinline__ matrix<T> make_matrix(const T *base, i64 ld, i64 rows, i64 cols) {
    return {base, ld, rows, cols, access_bytes<T>(base, rows > 1 ? ld : 0)};
}

// Tile t in row-major order.
struct tile_place {
    i64 row, col; // in tiles
};
__device__ __forceinline__ tile_place place_of(i64 t, i64 tile_cols) {
    i64 row = t / tile_cols;
    return {row, t - row * tile_cols};
}

// `row`, `col`: first element of this thread's patch. `whole`: the tile lies inside the matrix.
template <class T>
__device__ __forceinline__ void load_patch(vec8<T> (&v)[patch], const matrix<T> &m, i64 row,
                                           i64 col, bool whole) {
    const T *p = m.base + row * m.ld + col;
    if (whole && m.width == 16) { // the usual case apart, so that its loads go out back to back
#pragma unroll
        for (int i = 0; i < patch; ++i) v[i] = load_vec8(p + i * m.ld, 16);
    } else if (whole && m.width == 8) {
#pragma unroll
        for (int i = 0; i < patch; ++i) v[i] = load_vec8(p + i * m.ld, 8);
    } else {
#pragma unroll
        for (int i = 0; i < patch; ++i) {
            i64 count = row + i < m.rows ? m.cols - col : 0;
            v[i] =
                count >= 8 ? load_vec8(p + i * m.ld, m.width) : load_vec8_edge(p + i * m.ld, count);
        }
    }
}
