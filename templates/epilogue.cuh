// epilogue.cuh - accumulators to the output in slabs, under the next tile.
//
// A warpgroup's 64 rows leave in slabs of 128 bytes a row, laid into shared memory with the
// 128-byte swizzle. Each warp lays and sends its own 16 rows, and waits for the others of its
// warpgroup only where the columns have a bias or scales. By TMA, where the output's address,
// leading dim and row are multiples of 16 bytes: the store (or reduce-add) drains while the next
// slab is filled and the next tile multiplied. Otherwise by the threads, eight bytes a lane where
// the output's alignment allows it; nothing outside the output is touched. Which of the two is the
// caller's choice, call by call. A sum into 16 bits takes the threads' way.
//
// One loop over the slabs serves all of it; only what reads a slab's registers is spelled out for
// each, since registers have no index.
#pragma once

// A sum into a 16-bit output waits in shared memory as fp32.
template <bool wide> struct slab_element { using type = out_t; };
template <> struct slab_element<true> { using type = fp32; };
using slab_t = slab_element<add && sizeof(out_t) == 2>::type;

constexpr int slab_rows = 64, slab_row_bytes = 128, slab_bytes = slab_rows * slab_row_bytes;
constexpr int slab_cols = slab_row_bytes / sizeof(slab_t);
constexpr int slab_barrier = 3; // named barriers, one a warpgroup
constexpr int warp_rows = 16, warp_bytes = warp_rows * slab_row_bytes; // a warp's part of a slab

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
__device__ __forceinline__ void fill(u32 part, const float *d, int lane, T) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                chunk_at(part, lane % 16, 2 * j + lane / 16)),
            "r"(pack2<T>(d[8 * j], d[8 * j + 1])), "r"(pack2<T>(d[8 * j + 2], d[8 * j + 3])),
            "r"(pack2<T>(d[8 * j + 4], d[8 * j + 5])), "r"(pack2<T>(d[8 * j + 6], d[8 * j + 7]))
            : "memory");
}
__device__ __forceinline__ void fill(u32 part, const float *d, int lane, fp32) {
    int quad = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 at = chunk_at(part, lane / 4 + 8 * half, 2 * j + quad / 2) + quad % 2 * 8;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(d[4 * j + 2 * half]),
                         "f"(d[4 * j + 2 * half + 1])
                         : "memory");
        }
}

// Eight bytes of row r.
__device__ __forceinline__ void load_words(u32 (&words)[2], u32 part, int r, int lane) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(chunk_at(part, r, lane / 2) + lane % 2 * 8));
}

// A warp's part of a slab by its threads: two rows at once, a lane eight bytes. Where all of it
// lies inside and is aligned, with few instructions.
__device__ __forceinline__ void store_part(u32 part, const output &out, int row, int col) {
    constexpr int n = 8 / sizeof(slab_t), lanes = slab_row_bytes / 8; // of a row
    constexpr int at_once = 32 / lanes;                               // rows
    int t = lane_of_warp(), lane = t % lanes, left = out.cols - col - lane * n;
    bool aligned = access_bytes<out_t>(out.base, out.ld) >= int(n * sizeof(out_t));
    bool whole = row + warp_rows <= out.rows && col + slab_cols <= out.cols;
    row += t / lanes;
    out_t *to = out.base + row * out.ld + col + lane * n;
    if (!add && aligned && whole) {
        u32 words[warp_rows / at_once][2];
#pragma unroll
        for (int i = 0; i < warp_rows / at_once; ++i)
            load_words(words[i], part, t / lanes + i * at_once, lane);
#pragma unroll
        for (int i = 0; i < warp_rows / at_once; ++i, to += at_once * out.ld)
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[i][0]),
                         "r"(words[i][1])
                         : "memory");
        return;
    }
#pragma unroll 1
    for (int i = 0; i < warp_rows; i += at_once, to += at_once * out.ld) {
        pack<slab_t, n> x;
        load_words(reinterpret_cast<u32(&)[2]>(x), part, t / lanes + i, lane);
        if (row + i < out.rows) store(to, x, left, aligned);
    }
}

// A warp's part of a slab to out.
__device__ __forceinline__ void send_part(u32 part, const output &out, int row, int col) {
    if (out.by_tma) {
        fence_async_shared();
        __syncwarp();
        stumble();
        if (is_elected()) {
            if (row < out.rows && col < out.cols) {
                if (add)
                    tma_add(*out.map, part, col, row);
                else
                    tma_store(*out.map, part, col, row);
            }
            tma_commit();
        }
    } else {
        __syncwarp();
        store_part(part, out, row, col);
    }
}

constexpr int boxes_of_tile = bm / warp_rows * (bn / slab_cols);

// Asks L2 for boxes of what a tile is added to, from `first` on: they come from memory while the
// tile is multiplied. [row, col]: of the tile.
__device__ __forceinline__ void fetch_boxes(const output &out, int first, int count, int row,
                                            int col) {
    constexpr int across = bn / slab_cols;
#pragma unroll 1
    for (int i = first; i < min(first + count, boxes_of_tile); ++i) {
        int r = row + i / across * warp_rows, c = col + i % across * slab_cols;
        if (r < out.rows && c < out.cols) tma_prefetch(*out.map, c, r);
    }
}
// What the columns of a tile have of their own waits in shared memory, for each warpgroup: the
// bias, and with row_scaled the scales.
constexpr bool has_vectors = biased || row_scaled;
constexpr int scales_at = biased ? 4 * bn : 0; // behind the bias

__device__ __forceinline__ u32 vectors_of(const pipeline &p) {
    return p.base + vectors_offset + p.group * vectors_bytes;
}
__device__ __forceinline__ void put_float(u32 at, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ float2 get_floats(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
// Called before the main loop, while registers are free.
__device__ __forceinline__ void put_vectors(const pipeline &p, const scales &s, const output &out,
                                            int col) {
    u32 vectors = vectors_of(p);
    named_barrier(slab_barrier + p.group, 128); // the tile before has read them
#pragma unroll 1
    for (int i = thread() % 128; i < bn; i += 128) {
        if (biased) // a sum with -0 changes nothing, not even 0
            put_float(vectors + 4 * i, s.bias ? entry(s.bias, col + i, out.cols) : -0.0f);
        if (row_scaled)
            put_float(vectors + scales_at + 4 * i,
                      scale_at<b_row_scaled>(s.of_cols, col + i, out.cols));
    }
}

// Scales and bias of a slab's part of the fragment. row: the thread's first one; vectors: of its
// first column.
__device__ __forceinline__ void finish(float *d, const scales &s, const output &out, u32 vectors,
                                       int row) {
    float of_rows[2] = {0, 0};
    if (row_scaled)
        for (int half = 0; half < 2; ++half)
            of_rows[half] = scale_at<a_row_scaled>(s.of_rows, row + 8 * half, out.rows);
#pragma unroll
    for (int j = 0; j < slab_cols / 8; ++j) {
        float2 bias = {-0.0f, -0.0f}, scale = {0, 0};
        if (biased) bias = get_floats(vectors + 32 * j);
        if (row_scaled) scale = get_floats(vectors + 32 * j + scales_at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float &x = d[4 * j + i], beside = i % 2 ? bias.y : bias.x;
            if (row_scaled)
                x = finished(x, of_rows[i / 2], i % 2 ? scale.y : scale.x, beside);
            else
                x = finished(x, s, beside);
        }
    }
}

// The warpgroup's accumulators to rows [first_row, first_row + 64 waves), columns [col, col + bn).
// `turn` is the slab to use next, over the life of the warpgroup.
__device__ __forceinline__ void write_out(float (&acc)[waves][accumulators], const scales &s,
                                          const output &out, const pipeline &p, int &turn,
                                          int first_row, int col) {
    const int lane = lane_of_warp(), warp = uniform(thread() / 32) % 4;
    u32 parts_at = p.base + out_offset + p.group * slabs * slab_bytes + warp * warp_bytes;
    u32 vectors = vectors_of(p) + lane % 4 * 8;
    if (has_vectors) named_barrier(slab_barrier + p.group, 128); // all are put
    constexpr int across = bn / slab_cols;
#pragma unroll 1
    for (int i = 0; i < waves * across; ++i) {
        u32 part = parts_at + turn * slab_bytes;
        int row = first_row + i / across * 64 + warp * warp_rows;
        if (++turn == slabs) turn = 0;
        stumble();
        tma_wait_read<slabs - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < waves * across; ++j)
            if (i == j) {
                float *d = acc[j / across] + j % across * slab_cols / 2;
                finish(d, s, out, vectors + j % across * slab_cols * 4, row + lane / 4);
                fill(part, d, lane, slab_t{});
            }
        send_part(part, out, row, col + i % across * slab_cols);
    }
}
