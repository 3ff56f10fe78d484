// gemm_sm90.cu - op "gemm": out[rows,cols] = (a[rows,depth] b[cols,depth]^T) * scale_inv's (+ bias)
// (+ out), FP8 operands with the contraction along their rows, for sm_90a.
//
// A persistent kernel of three warpgroups. One is the producer: a single thread feeds a ring of
// shared-memory stages by TMA. Two are consumers, in one of two schedules:
//   cooperative   both work on one tile, half of its rows each
//   pingpong      each has a tile of its own; while one writes its tile out, the other multiplies
// In a cluster of two CTAs the tiles lie one below the other and share b: each CTA loads half of it and
// multicasts it to both, which saves a quarter to a third of what L2 must deliver.
//
// The pieces: ptx.cuh, tma.cuh (instructions), scheduler.cuh (order of tiles, ring), mainloop.cuh
// (accumulation), epilogue.cuh (the way out).
#include "scheduler.cuh"
#include "tma.cuh"
#include "vec.cuh"
#include "wgmma.cuh"

constexpr int bm = $bm, bn = $bn,
              bk = 128; // tile in elements; bk is also 128 bytes, one swizzle row
constexpr int stages = $stages;
constexpr int cluster = $cluster; // CTAs along the rows that share b
constexpr int group = $group;     // rows of clusters in a raster group
constexpr bool pingpong = $pingpong;
constexpr int partials =
    $partials;             // 0: fast accumulation; 1, 2: split, with that many partial sums
constexpr bool add = $add; // out +=
using out_t = $target;

constexpr int consumers = 2; // warpgroups
constexpr int threads = 128 * (consumers + 1);
constexpr int waves = bm / 64 / (pingpong ? 1 : consumers); // 64-row blocks of a warpgroup
constexpr int accumulators = bn / 2;                        // registers of one wave
constexpr int a_bytes = bm * bk, b_bytes = bn * bk, stage_bytes = a_bytes + b_bytes;
// A sum into a 16-bit output waits in shared memory as fp32.
template <bool wide> struct slab_element { using type = out_t; };
template <> struct slab_element<true> { using type = fp32; };
using slab_t = slab_element<add && sizeof(out_t) == 2>::type;
constexpr int slab_cols = 128 / sizeof(slab_t);
constexpr int turn_barrier = 1, slab_barrier = 3; // named barriers, one a warpgroup

// Registers of the three warpgroups come out of what the kernel starts with: 168 a thread.
static_assert($producer_registers + consumers * $consumer_registers <= 3 * 168, "registers");
static_assert(bm % (pingpong ? 64 : 128) == 0 && bn % slab_cols == 0 && bn <= 256, "tile");
static_assert(waves * accumulators + partials * accumulators <= 208, "accumulators would spill");
static_assert(partials != 2 || waves == 1, "two partial sums serve one wave");
static_assert(!pingpong || partials == 0, "pingpong multiplies with one accumulator");

//% local n = bn // 2
//% local function comma(i) return i < n - 1 and "," or "" end
// d (+)= a[64,32] b[bn,32]^T; keep = 0 starts from zero.
// clang-format off
__device__ __forceinline__ void wgmma(float (&d)[$n], u64 a, u64 b, int keep) {
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %$(n + 2), 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n$(bn)k32.f32.$a_format.$b_format {"
//% for i = 0, n - 1 do
                 "%$i$(comma(i))"
//% end
                 "}, %$n, %$(n + 1), keep, 1, 1;\n\t}"
                 :
//% for i = 0, n - 1 do
                 "+f"(d[$i])$(comma(i))
//% end
                 : "l"(a), "l"(b), "r"(keep));
}
// clang-format on

constexpr int slab_rows = 64, slab_row_bytes = 128, slab_bytes = slab_rows * slab_row_bytes;
constexpr int slabs = 2; // of a warpgroup, in turn
constexpr int slabs_offset = stages * stage_bytes;
constexpr int barriers_offset = slabs_offset + consumers * slabs * slab_bytes;
constexpr int extents_offset = barriers_offset + 16 * stages;

// The extents in tiles, computed once and kept in shared memory: over the main loop the accumulators
// leave no register for them.
struct extents {
    int rows, cols, blocks; // clusters along the rows, tiles along the columns, blocks of K
};
__device__ __forceinline__ raster tiles_of(const volatile extents &e) {
    return {e.rows, e.cols, group};
}

#include "mainloop.cuh"
#include "epilogue.cuh"

__device__ __forceinline__ void produce(const tensor_map &map_a, const tensor_map &map_b,
                                        const volatile extents &e, u32 base) {
    const raster tiles = tiles_of(e);
    const int blocks = e.blocks;
    u32 full = base + barriers_offset, empty = full + 8 * stages;
    u32 rank = cluster > 1 ? cluster_rank() : 0;
    ring<stages> at;
    prefetch(map_a);
    prefetch(map_b);
    wait_for_previous_kernel();
    for (int t = blockIdx.x / cluster; t < tiles.count(); t += gridDim.x / cluster) {
        tile_at tile = tiles.at(t);
        int row = (tile.m * cluster + int(rank)) * bm, col = tile.n * bn;
#pragma unroll 1 // 24 registers must do
        for (int k = 0; k < blocks; ++k) {
            u32 a = base + at.stage * stage_bytes, b = a + a_bytes, bar = full + 8 * at.stage;
            mbarrier_wait(empty + 8 * at.stage, at.phase ^ 1);
            mbarrier_expect(bar, stage_bytes);
            tma_load(a, map_a, k * bk, row, bar);
            if (cluster == 1) {
                tma_load(b, map_b, k * bk, col, bar);
            } else {
                constexpr int part = bn / cluster;
                tma_load_multicast(b + rank * part * bk, map_b, k * bk, col + rank * part, bar,
                                   u16((1 << cluster) - 1));
            }
            at.next();
        }
    }
}

__device__ __forceinline__ void consume(const output &out, const scales &s,
                                        const volatile extents &e, u32 base) {
    int slab = 0;
    u32 rank = cluster > 1 ? cluster_rank() : 0;
    int step = gridDim.x / cluster;
    int first_row = pingpong ? 0 : warpgroup() * waves * 64;
    pipeline p = {base, {}};
    if (pingpong && warpgroup() == 1) {
        p.pass_turn(); // the first one is the other's
        p.at.skip(e.blocks);
    }
    for (int t = blockIdx.x / cluster + (pingpong ? warpgroup() * step : 0);
         t < tiles_of(e).count(); t += pingpong ? 2 * step : step) {
        float acc[waves][accumulators];
        multiply(acc, p, e.blocks);
        if (pingpong) p.at.skip(e.blocks); // the other one's stages
        tile_at tile = tiles_of(e).at(t);
        int row = (tile.m * cluster + int(rank)) * bm + first_row, col = tile.n * bn;
#pragma unroll
        for (int w = 0; w < waves; ++w) write_out(acc[w], s, out, base, slab, row + 64 * w, col);
    }
    if (thread() % 128 == 0) tma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(threads, 1)
    $entry(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
           const __grid_constant__ tensor_map map_out, const float *a_scales, const float *b_scales,
           const bf16 *bias, out_t *out, i64 out_ld, i64 rows, i64 cols, i64 depth, int by_tma) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 base = smem_address(memory);
    u32 full = base + barriers_offset, empty = full + 8 * stages;
    extents &e = *reinterpret_cast<extents *>(memory + extents_offset);
    if (threadIdx.x == 0) {
        e = {int(ceil_div(rows, bm * cluster)), int(ceil_div(cols, bn)), int(ceil_div(depth, bk))};
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, (pingpong ? 1 : consumers) * 4 * cluster); // a warp each
        }
        mbarrier_init_fence();
    }
    if (cluster > 1)
        cluster_sync();
    else
        __syncthreads();

    if (threadIdx.x >= consumers * 128) {
        give_registers<$producer_registers>();
        if (threadIdx.x == consumers * 128) produce(map_a, map_b, e, base);
    } else {
        take_registers<$consumer_registers>();
        wait_for_previous_kernel();
        float sa = __ldg(a_scales + 4), sb = __ldg(b_scales + 4);
        scales s = {fminf(sa, sb), fmaxf(sa, sb), bias};
        output o = {&map_out, out, out_ld, int(rows), int(cols), by_tma};
        consume(o, s, e, base);
    }
    let_next_kernel_start();
    if (cluster > 1) cluster_sync(); // a neighbour may still arrive at this CTA's barriers
}
