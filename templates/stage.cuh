// stage.cuh - tiles of a matrix on their way through shared memory.
//
// cp.async copies without registers in between, 16, 8 or 4 bytes an access as the alignment of the
// rows allows, neighbouring threads at neighbouring bytes whatever the width: a matrix whose rows
// are aligned to 8 bytes is read as fast as one aligned to 16. What lies outside the matrix arrives
// as zeros and is not read. Rows of bf16 aligned to 2 bytes go through registers.
#pragma once
#include "ptx.cuh"
#include "tile.cuh"

template <int width>
__device__ __forceinline__ void copy_async(u32 target, const void *source, int valid) {
    if constexpr (width == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                     "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                     "n"(width), "r"(valid)
                     : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most `pending` of this thread's groups are under way.
template <int pending> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// One tile in accesses of `width` bytes, by tile_threads threads.
template <int width, class T>
__device__ __forceinline__ void stage_by(u32 target, const matrix<T> &m, i64 top, i64 left,
                                         int thread) {
    constexpr int row_bytes = tile * sizeof(T);
    constexpr int pieces = row_bytes / width;   // of a row
    constexpr int step = tile_threads / pieces; // rows from one access of a thread to its next
    int row = thread / pieces, offset = thread % pieces * width;
    const char *p = reinterpret_cast<const char *>(m.base + (top + row) * m.ld + left) + offset;
    i64 stride = m.ld * i64(step * sizeof(T));
    target += row * row_bytes + offset;
    i64 valid = (m.cols - left) * i64(sizeof(T)) - offset, below = m.rows - top - row;
    if (width > 4 && valid >= width && below > tile - step) {
#pragma unroll
        for (int i = 0; i < tile / step; ++i)
            copy_async<width>(target + i * step * row_bytes, p + i * stride, width);
    } else {
        int bytes = valid < 0 ? 0 : valid < width ? int(valid) : width;
#pragma unroll 2
        for (int i = 0; i < tile / step; ++i) {
            int wanted = i * step < below ? bytes : 0;
            copy_async<width>(target + i * step * row_bytes,
                              wanted ? p + i * stride : (const char *)m.base, wanted);
        }
    }
}

__device__ __forceinline__ void store_shared(u32 target, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(word) : "memory");
}

// The same for bf16 at any address: two elements a word.
__device__ __forceinline__ void stage_by_element(u32 target, const matrix<bf16> &m, i64 top,
                                                 i64 left, int thread) {
    constexpr int words = tile / 2, step = tile_threads / words;
    i64 col = left + thread % words * 2;
    int row = thread / words;
    target += row * tile * 2 + thread % words * 4;
#pragma unroll 4
    for (int i = 0; i < tile / step; ++i) {
        const u16 *p = reinterpret_cast<const u16 *>(m.base + (top + row + i * step) * m.ld + col);
        bool there = top + row + i * step < m.rows;
        u32 low = there && col < m.cols ? __ldg(p) : 0;
        u32 high = there && col + 1 < m.cols ? __ldg(p + 1) : 0;
        store_shared(target + i * step * tile * 2, low | high << 16);
    }
}
__device__ __forceinline__ void stage_by_element(u32, const matrix<fp32> &, i64, i64, int) {}

template <class T>
__device__ __forceinline__ void stage_tile(u32 target, const matrix<T> &m, i64 top, i64 left,
                                           int thread) {
    if (m.width == 16)
        stage_by<16>(target, m, top, left, thread);
    else if (m.width == 8)
        stage_by<8>(target, m, top, left, thread);
    else if (m.width == 4)
        stage_by<4>(target, m, top, left, thread);
    else
        stage_by_element(target, m, top, left, thread);
}

// This thread's patch of a staged tile.
template <class T>
__device__ __forceinline__ void read_patch(vec8<T> (&v)[patch], const u8 *staged, int rg, int cg) {
    constexpr int row_bytes = tile * sizeof(T), parts = sizeof(vec8<T>) / 16;
    const u8 *p = staged + rg * patch * row_bytes + cg * sizeof(vec8<T>);
#pragma unroll
    for (int i = 0; i < patch; ++i)
#pragma unroll
        for (int j = 0; j < parts; ++j)
            reinterpret_cast<uint4 *>(v[i].w)[j] =
                *reinterpret_cast<const uint4 *>(p + i * row_bytes + j * 16);
}

// One tile of shared memory, filled ahead of its use: fetch(), something else, take(), and once no
// thread can still be reading the tile, its memory is free for other things until the next fetch().
template <class T> struct tile_source {
    matrix<T> m;
    u8 *shared;

    template <class walk> __device__ __forceinline__ void fetch(const walk &at) const {
        stage_tile(smem_address(shared), m, at.top(), at.left(), threadIdx.x);
        copy_commit();
    }
    __device__ __forceinline__ void take(vec8<T> (&v)[patch]) const {
        copy_wait<0>();
        __syncthreads();
        read_patch(v, shared, threadIdx.x / groups, threadIdx.x % groups);
    }
};
