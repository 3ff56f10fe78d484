// exchange.cuh - the flow for few tiles: the `slices` CTAs of a cluster multiply a tile together,
// each over its part of the contraction, and exchange the partial tiles through each other's shared
// memory. Each then adds up and stores its part of the tile, in the order of the slices: equal from
// run to run, and no memory but the CTAs' own is needed.
//
// A partial tile lies in shared memory as out does, so a swapped one is turned on its way there.
// Stores are the threads', with any address and leading dim.
#pragma once

static_assert(!pingpong && cluster == 1, "the CTAs of a cluster share a tile");

constexpr int part_rows = swapped ? bn : bm, part_cols = swapped ? bm : bn;
// Elements from row to row: no two lanes of an access meet in a bank.
constexpr int part_pitch = part_cols + (swapped ? 4 : 8);
constexpr int run_of_stores = 4; // elements that a thread adds up and stores at once

__device__ __forceinline__ u32 part_at(u32 base, int row, int col) {
    return base + out_offset + (row * part_pitch + col) * 4;
}

struct slice {
    int first, blocks; // of K
};
__device__ __forceinline__ slice slice_of(const volatile extents &e) {
    int each = whole_turns((e.blocks + slices - 1) / slices), first = int(cluster_rank()) * each;
    return {first, whole_turns(max(0, min(each, e.blocks - first)))};
}

// All threads of the producer's warpgroup go along, for the sake of the barriers.
__device__ __forceinline__ void produce(const tensor_map &map_a, const tensor_map &map_b,
                                        const output &, const volatile extents &e, u32 base,
                                        const tile_counter &) {
    const raster tiles = tiles_of(e);
    const slice mine = slice_of(e);
    u32 full = base + barriers_offset, empty = full + 8 * stages;
    ring<stages> at;
    bool chosen = threadIdx.x == consumers * 128;
    if (chosen) {
        prefetch(map_a);
        prefetch(map_b);
        wait_for_previous_kernel();
    }
    for (int t = blockIdx.x / slices; t < tiles.count(); t += gridDim.x / slices) {
        tile_at tile = tiles.at(t);
#pragma unroll 1
        for (int k = 0; chosen && k < mine.blocks; ++k) {
            u32 a = base + at.stage * stage_bytes, bar = full + 8 * at.stage;
            stumble();
            mbarrier_wait(empty + 8 * at.stage, at.phase ^ 1);
            mbarrier_expect(bar, stage_bytes);
            tma_load(a, map_a, (mine.first + k) * bk, tile.m * bm, bar);
            tma_load(a + a_bytes, map_b, (mine.first + k) * bk, tile.n * bn, bar);
            at.next();
        }
        __syncwarp();
        cluster_sync(); // the partial tiles are there
        cluster_sync(); // they have been read
    }
}

// The warpgroup's part of the CTA's partial tile.
__device__ __forceinline__ void put_part(const float (&acc)[waves][accumulators], u32 base) {
    int row = thread() / 128 * waves * 64 + thread() / 32 % 4 * 16 + thread() % 32 / 4;
    int quad = thread() % 4;
#pragma unroll
    for (int w = 0; w < waves; ++w)
#pragma unroll
        for (int j = 0; j < bn / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int r = row + 64 * w + 8 * half, c = 8 * j + 2 * quad;
                float x = acc[w][4 * j + 2 * half], y = acc[w][4 * j + 2 * half + 1];
                if (!swapped) {
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(part_at(base, r, c)),
                                 "f"(x), "f"(y)
                                 : "memory");
                } else {
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(part_at(base, c, r)), "f"(x)
                                 : "memory");
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(part_at(base, c + 1, r)), "f"(y)
                                 : "memory");
                }
            }
}

using store_run = pack<fp32, run_of_stores>;

__device__ __forceinline__ store_run load_run(u32 address, int cta) {
    store_run x;
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %4, %5;\n\t"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n\t}"
                 : "=f"(x.e[0].value), "=f"(x.e[1].value), "=f"(x.e[2].value), "=f"(x.e[3].value)
                 : "r"(address), "r"(cta)
                 : "memory");
    return x;
}

// This CTA's share of the tile at [row, col] of out.
__device__ __forceinline__ void add_up(const scales &s, const output &out, u32 base, int row,
                                       int col) {
    constexpr int runs = part_rows * part_cols / run_of_stores / slices;
    bool aligned = access_bytes<out_t>(out.base, out.ld) >= run_of_stores * int(sizeof(out_t));
    int first = int(cluster_rank()) * runs;
#pragma unroll 1
    for (int i = thread(); i < runs; i += consumers * 128) {
        int r = (first + i) / (part_cols / run_of_stores);
        int c = (first + i) % (part_cols / run_of_stores) * run_of_stores;
        if (row + r >= out.rows || col + c >= out.cols) continue;
        u32 at = part_at(base, r, c);
        store_run parts[slices], sum;
#pragma unroll
        for (int k = 0; k < slices; ++k) parts[k] = load_run(at, k);
        sum = parts[0];
        float of_row = row_scaled ? scale_at<a_row_scaled>(s.of_rows, row + r, out.rows) : 0;
#pragma unroll
        for (int j = 0; j < run_of_stores; ++j) {
            float &x = sum.e[j].value;
#pragma unroll
            for (int k = 1; k < slices; ++k) x += parts[k].e[j].value;
            float bias = biased && s.bias ? entry(s.bias, col + c + j, out.cols) : -0.0f;
            int c_at = col + c + j;
            if (row_scaled)
                x = finished(x, of_row, scale_at<b_row_scaled>(s.of_cols, c_at, out.cols), bias);
            else
                x = finished(x, s, bias);
        }
        store(out.base + (row + r) * out.ld + col + c, sum, out.cols - col - c, aligned);
    }
}

__device__ __forceinline__ void consume(const output &out, const scales &s,
                                        const volatile extents &e, u32 base) {
    pipeline p(base, uniform(thread() / 128));
    for (int t = blockIdx.x / slices; t < tiles_of(e).count(); t += gridDim.x / slices) {
        float acc[waves][accumulators];
        multiply(acc, p, uniform(slice_of(e).blocks));
        stumble();
        put_part(acc, base);
        cluster_sync();
        stumble();
        tile_at tile = tiles_of(e).at(t);
        int m = tile.m * bm, n = tile.n * bn;
        add_up(s, out, base, swapped ? n : m, swapped ? m : n);
        __syncwarp(); // its lanes took unequal ways, and the barrier is the warp's
        cluster_sync();
    }
}
