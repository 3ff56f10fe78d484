// epilogue.cuh - accumulators to the output in slabs, under the next tile.
//
// A warpgroup's 64 rows leave in slabs of 128 bytes a row, laid into shared memory with the 128-byte
// swizzle. By TMA, where the output's address, leading dim and row are multiples of 16 bytes: the store (or
// reduce-add) drains while the next slab is filled and the next tile multiplied. Otherwise by the threads,
// eight bytes a lane where the output's alignment allows it; nothing outside the output is touched. Which of
// the two is the caller's choice, call by call. A sum into 16 bits takes the threads' way.
//
// One loop over the slabs serves both ways: only the registers of a slab must be spelled out for each.
#pragma once

// A sum into a 16-bit output waits in shared memory as fp32.
template <bool wide> struct slab_element { using type = out_t; };
template <> struct slab_element<true> { using type = fp32; };
using slab_t = slab_element<add && sizeof(out_t) == 2>::type;

constexpr int slab_rows = 64, slab_row_bytes = 128, slab_bytes = slab_rows * slab_row_bytes;
constexpr int slab_cols = slab_row_bytes / sizeof(slab_t);
constexpr int slab_barrier = 3; // named barriers, one a warpgroup

static_assert(bn % slab_cols == 0, "tile");

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

// The slab by the warpgroup's threads: a warp takes two rows, a lane eight bytes.
__device__ __forceinline__ void store_slab(u32 slab, const output &out, int row, int col) {
    constexpr int n = 8 / sizeof(slab_t), lanes = slab_row_bytes / 8; // of a row
    int t = thread() % 128, lane = t % lanes, left = out.cols - col - lane * n;
    bool aligned = access_bytes<out_t>(out.base, out.ld) >= int(n * sizeof(out_t));
#pragma unroll 2
    for (int r = t / lanes; r < slab_rows; r += 128 / lanes) {
        pack<slab_t, n> x;
        u32(&words)[2] = reinterpret_cast<u32(&)[2]>(x);
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(words[0]), "=r"(words[1])
                     : "r"(chunk_at(slab, r, lane / 2) + lane % 2 * 8));
        if (row + r < out.rows)
            store(out.base + (row + r) * out.ld + col + lane * n, x, left, aligned);
    }
}

// What the columns and rows of a slab have of their own waits in shared memory, for each warpgroup: the bias,
// and with row_scaled the scales of the columns and of the 64 rows.
constexpr int vector_bytes = 4 * 64;

__device__ __forceinline__ void put_float(u32 at, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ float get_float(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ float2 get_floats(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void put_vectors(u32 at, const scales &s, const output &out, int row,
                                            int col) {
    int t = thread() % 128;
    if (t >= 64) return;
    at += 4 * t, row += t, col += t;
    // a sum with -0 changes nothing, not even 0
    put_float(at, s.bias ? entry(s.bias, col, out.cols) : -0.0f);
    if (!row_scaled) return;
    put_float(at + vector_bytes, scale_at<b_row_scaled>(s.of_cols, col, out.cols));
    put_float(at + 2 * vector_bytes, scale_at<a_row_scaled>(s.of_rows, row, out.rows));
}

// Scales and bias of a slab's part of the fragment.
__device__ __forceinline__ void finish(float *d, const scales &s, u32 vectors) {
    u32 at = vectors + thread() % 4 * 8;
    u32 rows = vectors + 2 * vector_bytes + (thread() / 32 % 4 * 16 + thread() % 32 / 4) * 4;
#pragma unroll
    for (int j = 0; j < slab_cols / 8; ++j, d += 4) {
        float2 bias = get_floats(at + 32 * j);
        if (row_scaled) {
            float2 scale = get_floats(at + 32 * j + vector_bytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float of_row = get_float(rows + 32 * half); // anew: registers are scarce
                d[2 * half] = finished(d[2 * half], of_row, scale.x, bias.x);
                d[2 * half + 1] = finished(d[2 * half + 1], of_row, scale.y, bias.y);
            }
        } else {
            d[0] = finished(d[0], s, bias.x), d[1] = finished(d[1], s, bias.y);
            d[2] = finished(d[2], s, bias.x), d[3] = finished(d[3], s, bias.y);
        }
    }
}

// The warpgroup's accumulators to rows [first_row, first_row + 64 waves), columns [col, col + bn). `turn` is
// the slab to use next, over the life of the warpgroup.
__device__ __forceinline__ void write_out(float (&acc)[waves][accumulators], const scales &s,
                                          const output &out, u32 base, int &turn, int first_row,
                                          int col) {
    u32 slabs_at = base + out_offset + warpgroup() * slabs * slab_bytes;
    u32 vectors = base + vectors_offset + warpgroup() * 3 * vector_bytes;
    int barrier = slab_barrier + warpgroup();
    int lane = thread() % 32, warp = thread() / 32 % 4;
    bool leader = thread() % 128 == 0;
    constexpr int across = bn / slab_cols;
#pragma unroll 1
    for (int i = 0; i < waves * across; ++i) {
        u32 slab = slabs_at + turn * slab_bytes;
        if (++turn == slabs) turn = 0;
        int row = first_row + i / across * 64, first = col + i % across * slab_cols;
        put_vectors(vectors, s, out, row, first);
        if (leader) tma_wait_read<slabs - 1>();
        named_barrier(barrier, 128);
#pragma unroll
        for (int j = 0; j < waves * across; ++j)
            if (i == j) {
                float *d = acc[j / across] + j % across * slab_cols / 2;
                finish(d, s, vectors);
                fill(slab, d, warp, lane, slab_t{});
            }
        fence_async_shared();
        named_barrier(barrier, 128);
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
