// maxima.cuh - the largest finite magnitude of every row and of every column of a tile: lifted, see
// amax.cuh; bf16 two to a word.
#pragma once
#include "amax.cuh"
#include "convert.cuh"
#include "tile.cuh"

template <class T> struct tile_maxima { // in shared memory
    static constexpr int in_word = lifted<T>::in_word;
    alignas(16) u32 row[tile / in_word];
    alignas(16) u32 col[tile_threads / 32][tile / in_word]; // of the 16 rows of each warp
};

// The larger of the two halves of a and of b, side by side.
__device__ __forceinline__ u32 fold_pair(u32 a, u32 b) {
    return lifted<bf16>::greater(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

// A patch's maxima, 8 of the rows and 8 of the columns; says whether it holds inf or NaN.
template <class T>
__device__ __forceinline__ bool patch_maxima(u32 (&row)[vec8<T>::words], u32 (&col)[vec8<T>::words],
                                             const vec8<T> (&v)[patch]) {
    constexpr int words = vec8<T>::words;
    u32 best[patch], seen = 0;
#pragma unroll
    for (int k = 0; k < words; ++k) col[k] = lifted<T>::zero;
#pragma unroll
    for (int i = 0; i < patch; ++i) {
        best[i] = lifted<T>::zero;
#pragma unroll
        for (int k = 0; k < words; ++k) {
            u32 u = lifted<T>::of(v[i].w[k]);
            seen |= u;
            best[i] = lifted<T>::greater(best[i], u);
            col[k] = lifted<T>::greater(col[k], u);
        }
    }
#pragma unroll
    for (int k = 0; k < words; ++k)
        row[k] =
            words == patch ? best[k] : fold_pair(best[2 * k % patch], best[(2 * k + 1) % patch]);
    return seen & lifted<T>::marks;
}

// This thread's part of both; says whether the patch holds inf or NaN. A barrier follows.
template <class T>
__device__ __forceinline__ bool put_maxima(tile_maxima<T> &shared, const vec8<T> (&v)[patch],
                                           int thread) {
    constexpr int words = vec8<T>::words;
    u32 row[words], col[words];
    bool bad = patch_maxima(row, col, v);
#pragma unroll
    for (int i = 0; i < words; ++i) {
#pragma unroll
        for (int step = groups / 2; step > 0; step /= 2)
            row[i] = lifted<T>::greater(row[i], __shfl_xor_sync(0xffffffffu, row[i], step));
        col[i] = lifted<T>::greater(col[i], __shfl_xor_sync(0xffffffffu, col[i], groups));
    }
    int rg = thread / groups, cg = thread % groups;
    uint4 *to_row = reinterpret_cast<uint4 *>(shared.row + rg * words);
    uint4 *to_col = reinterpret_cast<uint4 *>(shared.col[thread / 32] + cg * words);
#pragma unroll
    for (int i = 0; i < words; i += 4) {
        if (cg == 0) to_row[i / 4] = make_uint4(row[i], row[i + 1], row[i + 2], row[i + 3]);
        if (rg % 2 == 0) to_col[i / 4] = make_uint4(col[i], col[i + 1], col[i + 2], col[i + 3]);
    }
    return bad;
}

// Bits of the float at one place of a line of lifted maxima.
__device__ __forceinline__ u32 maximum_at(const u32 *line, int i, bf16) {
    return (u32(reinterpret_cast<const u16 *>(line)[i]) - 0x80u) << 16;
}
__device__ __forceinline__ u32 maximum_at(const u32 *line, int i, fp32) {
    return line[i] - lifted<fp32>::zero;
}

// The amax of this thread's row (threads 0..127) or column (128..255) of the tile.
template <class T>
__device__ __forceinline__ float maximum_of(const tile_maxima<T> &shared, int thread) {
    if (thread < tile) return __uint_as_float(maximum_at(shared.row, thread, T{}));
    u32 best = 0;
#pragma unroll
    for (int w = 0; w < tile_threads / 32; ++w) {
        u32 bits = maximum_at(shared.col[w], thread - tile, T{});
        best = bits > best ? bits : best;
    }
    return __uint_as_float(best);
}
