// tile.cuh - a tile of 128 x 128 elements held by 256 threads, 8 rows x 8 columns each, and the
// order in which a grid takes the tiles of a matrix.
//
// Thread t holds the patch (t / 16, t % 16): sixteen neighbours hold 256 consecutive bytes of a
// bf16 row. Elements outside the matrix read as zero, which is what padding must be. Tiles are
// counted in 32 bits: enough for 2^46 elements.
#pragma once
#include "vec.cuh"

constexpr int tile = 128;                     // rows and columns of a tile
constexpr int patch = 8;                      // rows and columns of a thread's patch
constexpr int groups = tile / patch;          // patches along each side
constexpr int tile_threads = groups * groups; // threads that hold a tile

template <class T> struct matrix {
    const T *base;
    i64 ld, rows, cols;
    int width; // bytes of the widest access at which every row is aligned
};

template <class T>
__device__ __forceinline__ matrix<T> make_matrix(const T *base, i64 ld, i64 rows, i64 cols) {
    return {base, ld, rows, cols, access_bytes<T>(base, rows > 1 ? ld : 0)};
}

struct tile_place {
    u32 row, col; // in tiles
    __device__ __forceinline__ i64 top() const { return i64(row) * tile; }
    __device__ __forceinline__ i64 left() const { return i64(col) * tile; }
};
// Tile t in row-major order.
__device__ __forceinline__ tile_place place_of(u32 t, u32 tile_cols) {
    u32 row = t / tile_cols;
    return {row, t - row * tile_cols};
}

// The tiles of a CTA, every gridDim-th one in row-major order, without a division on the way;
// backwards: from the last to the first.
template <bool backwards> struct tile_walk {
    u32 rows, cols; // of the matrix, in tiles
    u32 step_rows, step_cols;
    u32 i, j; // how far it has come

    __device__ __forceinline__ tile_walk(i64 matrix_rows, i64 matrix_cols) {
        const u32 first = blockIdx.x, step = gridDim.x;
        rows = u32(ceil_div(matrix_rows, tile)), cols = u32(ceil_div(matrix_cols, tile));
        step_rows = step / cols, step_cols = step - step_rows * cols;
        i = first / cols, j = first - i * cols;
    }
    __device__ __forceinline__ bool inside() const { return i < rows; }
    __device__ __forceinline__ void next() {
        i += step_rows, j += step_cols;
        if (j >= cols) j -= cols, ++i;
    }
    __device__ __forceinline__ u32 row() const { return backwards ? rows - 1 - i : i; }
    __device__ __forceinline__ u32 col() const { return backwards ? cols - 1 - j : j; }
    __device__ __forceinline__ i64 top() const { return i64(row()) * tile; }
    __device__ __forceinline__ i64 left() const { return i64(col()) * tile; }
};

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
