// epilogue.cuh - accumulators to the output: scales, bias, rounding, and the way out.
//
// A warpgroup's 64 rows leave in slabs of 128 bytes a row, laid into shared memory with the 128-byte
// swizzle. By TMA, where the output's address, leading dim and row are multiples of 16 bytes: the store (or
// reduce-add) drains while the next slab is filled and the next tile multiplied. Otherwise by the threads,
// with the widest access that the output's alignment allows; nothing outside the output is touched.
// Which of the two is the caller's choice, call by call.
//
// Order of the scales: the smaller of the two first, so that no product on the way overflows or vanishes
// that the result would not. A sum into bf16 or fp16 is formed in fp32 and rounded once, so it takes the
// threads' way.
#pragma once

template <class T, int n> struct alignas(n * sizeof(T)) pack { T e[n]; };

template <class T> __device__ __forceinline__ u32 pack2(float low, float high);
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}
template <> __device__ __forceinline__ u32 pack2<fp16>(float low, float high) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}

struct output {
    const tensor_map *map;
    out_t *base;
    i64 ld;
    int rows, cols;
    int by_tma;
};

struct scales {
    float smaller, larger;
    const bf16 *bias;
};

__device__ __forceinline__ float finished(float x, const scales &s) {
    return x * s.smaller * s.larger;
}

// 16-byte chunk c of row r.
__device__ __forceinline__ u32 chunk_at(u32 slab, int r, int c) {
    return slab + r * slab_row_bytes + ((c ^ (r & 7)) * 16);
}

// A 64-row accumulator fragment: d[4j], d[4j+1] are columns 8j + 2 quad, + 1 of row lane / 4 of the
// warp's 16, d[4j+2], d[4j+3] the same of row lane / 4 + 8.
template <class T> // 16 bits: stmatrix takes four 8 x 8 matrices, rows 0-7 and 8-15 of two chunks
__device__ __forceinline__ void fill(u32 slab, const float *d, int warp, int lane, T) {
    int r = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                chunk_at(slab, r, 2 * j + lane / 16)),
            "r"(pack2<T>(d[8 * j], d[8 * j + 1])), "r"(pack2<T>(d[8 * j + 2], d[8 * j + 3])),
            "r"(pack2<T>(d[8 * j + 4], d[8 * j + 5])), "r"(pack2<T>(d[8 * j + 6], d[8 * j + 7]))
            : "memory");
}
__device__ __forceinline__ void fill(u32 slab, const float *d, int warp, int lane, fp32) {
    int quad = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 at =
                chunk_at(slab, warp * 16 + lane / 4 + 8 * half, 2 * j + quad / 2) + quad % 2 * 8;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(d[4 * j + 2 * half]),
                         "f"(d[4 * j + 2 * half + 1])
                         : "memory");
        }
}

__device__ __forceinline__ void store_element(out_t *target, slab_t x) {
    *target = from_float<out_t>(add ? to_float(*target) + to_float(x) : to_float(x));
}

// The slab by the warpgroup's threads: a warp takes a row, a lane four bytes of it, so that every access is
// one whole line. Two 16-bit elements go together where the output's alignment allows it.
__device__ __forceinline__ void store_slab(u32 slab, const output &out, int row, int col) {
    constexpr int elements = 4 / sizeof(slab_t); // of a lane
    int lane = thread() % 32, j = lane * elements, left = out.cols - col - j;
    bool together = elements == 2 && !add && access_bytes<out_t>(out.base, out.ld) >= 4;
#pragma unroll 1
    for (int r = thread() / 32 % 4; r < slab_rows; r += 4) {
        if (row + r >= out.rows) break;
        pack<slab_t, elements> x;
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(reinterpret_cast<u32 &>(x))
                     : "r"(chunk_at(slab, r, lane / 4) + lane % 4 * 4));
        out_t *target = out.base + (row + r) * out.ld + col + j;
        if (together && left >= elements) {
            *reinterpret_cast<pack<slab_t, elements> *>(target) = x;
        } else {
#pragma unroll
            for (int i = 0; i < elements; ++i)
                if (i < left) store_element(target + i, x.e[i]);
        }
    }
}

// The warpgroup's 64 x bn accumulator of one wave to rows [row, row + 64), columns [col, col + bn).
// `turn` is the slab to use next, over the life of the warpgroup.
__device__ __forceinline__ void write_out(float (&d)[accumulators], const scales &s,
                                          const output &out, u32 base, int &turn, int row,
                                          int col) {
    u32 slabs_at = base + slabs_offset + warpgroup() * slabs * slab_bytes;
    int barrier = slab_barrier + warpgroup();
    int lane = thread() % 32, warp = thread() / 32 % 4;
    bool leader = thread() % 128 == 0;
#pragma unroll
    for (int i = 0; i < accumulators; ++i) d[i] = finished(d[i], s);
    if (s.bias) {
#pragma unroll
        for (int j = 0; j < bn / 8; ++j) {
            int c = col + 8 * j + 2 * (lane % 4);
            float b0 = c < out.cols ? to_float(s.bias[c]) : 0.0f;
            float b1 = c + 1 < out.cols ? to_float(s.bias[c + 1]) : 0.0f;
            d[4 * j] += b0, d[4 * j + 1] += b1, d[4 * j + 2] += b0, d[4 * j + 3] += b1;
        }
    }
#pragma unroll
    for (int i = 0; i < bn / slab_cols; ++i) {
        u32 slab = slabs_at + turn * slab_bytes;
        turn ^= 1;
        if (leader) tma_wait_read<slabs - 1>();
        named_barrier(barrier, 128);
        fill(slab, d + i * slab_cols / 2, warp, lane, slab_t{});
        fence_async_shared();
        named_barrier(barrier, 128);
        int first = col + i * slab_cols;
        if (!out.by_tma) {
            store_slab(slab, out, row, first);
        } else if (leader) {
            if (row < out.rows && first < out.cols) {
                if (add)
                    tma_add(*out.map, slab, first, row);
                else
                    tma_store(*out.map, slab, first, row);
            }
            tma_commit();
        }
    }
}
