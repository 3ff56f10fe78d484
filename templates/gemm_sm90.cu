// gemm_sm90.cu - op "gemm": out[rows,cols] = (a[rows,depth] b[cols,depth]^T) * scale_inv's (+ bias)
// (+ out), FP8 operands with the contraction along their rows, for sm_90a.
//
// A persistent kernel of three or four warpgroups: one producer, which feeds a ring of
// shared-memory stages by TMA, and two or three consumers. What they do from tile to tile is one of
// two flows:
//   stream     many tiles; the way out of one is hidden under the next (stream.cuh, epilogue.cuh)
//   exchange   few tiles; the CTAs of a cluster share a tile's contraction, and with swapped
//              operands the tile is transposed, so that few rows of out fill it (exchange.cuh)
//
// The other pieces: ptx.cuh, tma.cuh (instructions), scheduler.cuh (order of tiles, ring),
// mainloop.cuh (accumulation), output.cuh (scales, conversion, stores).
#include "scheduler.cuh"
#include "tma.cuh"
#include "vec.cuh"
#include "wgmma.cuh"

constexpr int bm = $bm, bn = $bn; // tile in elements
constexpr int bk = 128;           // elements of K in a stage: 128 bytes, one swizzle row
constexpr int stages = $stages;
constexpr int cluster = $cluster;  // CTAs along the rows that share b
constexpr int slices = $slices;    // CTAs of a cluster that share a tile's contraction
constexpr bool swapped = $swapped; // the tile's rows are columns of out: it multiplies b a^T
constexpr int group = $group;      // rows of clusters in a raster group
constexpr bool pingpong = $pingpong;
constexpr int partials = $partials; // partial sums of split accumulation; 0: fast
constexpr int run = $run;           // blocks of K in a partial sum
constexpr bool add = $add;          // out +=
constexpr bool biased = $biased;    // with a bias; a call may leave it out
// Whether scale_inv's are a vector, one for each row of a, of b.
constexpr bool a_row_scaled = $a_row_scaled, b_row_scaled = $b_row_scaled;
constexpr bool row_scaled = a_row_scaled || b_row_scaled;
// Whether b's are a grid, one for 128 of its rows and 128 of K: they are applied to partial sums
// (mainloop.cuh).
constexpr bool b_tile_scaled = $b_tile_scaled;
using out_t = $target;

constexpr int consumers = $consumers; // warpgroups
constexpr int threads = 128 * (consumers + 1);
constexpr int waves = bm / 64 / (pingpong ? 1 : consumers); // 64-row blocks of a warpgroup
constexpr int accumulators = bn / 2;                        // registers of one wave
constexpr int a_bytes = bm * bk, b_bytes = bn * bk, stage_bytes = a_bytes + b_bytes;
constexpr int vectors_bytes = $vectors; // of a warpgroup (epilogue.cuh)
constexpr int turn_barrier = 1;         // named barriers, one a warpgroup

// Registers of the warpgroups come out of what the kernel starts with, the same for every thread.
constexpr int registers_at_start = 65536 / threads / 8 * 8;
static_assert($producer_registers + consumers * $consumer_registers <=
                  (consumers + 1) * registers_at_start,
              "registers");
static_assert(bm % (pingpong ? 64 : 64 * consumers) == 0 && bn <= 256, "tile");
static_assert(waves * accumulators + partials * accumulators <= 208, "accumulators would spill");
static_assert(partials == 0 || waves == 1, "partial sums are of one wave");
static_assert(run == 1 || partials == 1, "runs are for one partial sum");
static_assert(!b_tile_scaled ||
                  (partials > 0 && run == 1 && slices == 1 && !swapped && bk % bn == 0),
              "a partial sum of a tile has one scale");
static_assert(group > 1, "the inverse of a group of one tile is 2^32");
static_assert(!pingpong || (partials == 0 && consumers == 2),
              "two take turns, and multiply with one accumulator each");

//% local n = bn // 2
//% local function comma(i) return i < n - 1 and "," or "" end
// d (+)= a[64,128] b[bn,128]^T, in four steps of 32; a, b: matrix_descriptor; fresh: starts from
// zero. One statement, since the compiler's time goes with the number of operands.
// clang-format off
__device__ __forceinline__ void multiply_block(float (&d)[$n], u32 a, u32 b, bool fresh) {
    asm volatile("{\n\t.reg .pred keep;\n\t.reg .b32 la, lb;\n\t.reg .b64 a, b;\n\t"
                 "setp.eq.b32 keep, %$(n + 2), 0;\n\t"
                 "mov.b32 la, %$n;\n\tmov.b32 lb, %$(n + 1);\n\t"
//% for step = 0, 3 do
//%     if step > 0 then
                 "add.u32 la, la, 2;\n\tadd.u32 lb, lb, 2;\n\t"
//%     end
                 "mov.b64 a, {la, %$(n + 3)};\n\tmov.b64 b, {lb, %$(n + 3)};\n\t"
                 "wgmma.mma_async.sync.aligned.m64n$(bn)k32.f32."
                 "$(swapped and b_format or a_format).$(swapped and a_format or b_format) {"
//%     for i = 0, n - 1 do
                 "%$i$(comma(i))"
//%     end
                 "}, a, b, keep, 1, 1;\n\tsetp.eq.b32 keep, 0, 0;\n\t"
//% end
                 "}"
                 :
//% for i = 0, n - 1 do
                 "+f"(d[$i])$(comma(i))
//% end
                 : "r"(a), "r"(b), "r"(int(fresh)), "n"(descriptor_high));
}
// clang-format on

constexpr int barriers_offset = stages * stage_bytes;
constexpr int extents_offset = barriers_offset + 16 * stages;
constexpr int tiles_offset = extents_offset + 16;                                   // counter.cuh
constexpr int vectors_offset = tiles_offset + $(scheduler == "atomic" and 80 or 0); // epilogue.cuh
constexpr int out_offset = // tiles on their way out
    (vectors_offset + vectors_bytes * consumers + 1023) / 1024 * 1024;

// The extents in tiles, computed once and kept in shared memory: over the main loop the
// accumulators leave no register for them.
struct extents {
    int rows, cols, blocks; // clusters along the rows, tiles along the columns, blocks of K
    u32 inverse;            // raster
};
// Two partial sums take turns as often as each other: a block beyond K is of zeros.
__device__ __forceinline__ int whole_turns(int blocks) {
    return partials == 2 ? (blocks + 1) / 2 * 2 : blocks;
}
__device__ __forceinline__ raster tiles_of(const volatile extents &e) {
    return {e.rows, e.cols, group, e.inverse};
}

#include "mainloop.cuh"
#include "output.cuh"

//% if scheduler == "atomic" then
#include "counter.cuh"
//% else
#include "walk.cuh"
//% end
//% if flow == "exchange" then
#include "exchange.cuh"
//% else
constexpr int slabs = $slabs; // of a warpgroup, in which its output leaves
#include "stream.cuh"
//% end

extern "C" __global__ void __launch_bounds__(threads, 1)
    $entry(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
           const __grid_constant__ tensor_map map_out, const float *a_scales, const float *b_scales,
           const bf16 *bias, out_t *out, i64 out_ld, i64 rows, i64 cols, i64 depth,
           int by_tma
           //% if scheduler == "atomic" then
           ,
           u64 *tiles, u64 epoch
           //% end
    ) {
    //% if scheduler == "atomic" then
    const tile_counter counter = {tiles, epoch};
    //% else
    const tile_counter counter = {};
    //% end
    extern __shared__ __align__(1024) u8 memory[];
    u32 base = smem_address(memory);
    u32 full = base + barriers_offset, empty = full + 8 * stages;
    extents &e = *reinterpret_cast<extents *>(memory + extents_offset);
    if (threadIdx.x == 0) {
        i64 tile_rows = swapped ? cols : rows, tile_cols = swapped ? rows : cols;
        int m = int(ceil_div(tile_rows, bm * cluster)), n = int(ceil_div(tile_cols, bn));
        e = {m, n, int(ceil_div(depth, bk)), inverse_of(group * n)};
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, (pingpong ? 1 : consumers) * 4 * cluster); // a warp each
        }
        init_slots(base);
        mbarrier_init_fence();
    }
    if (cluster > 1)
        cluster_sync();
    else
        __syncthreads();
    let_next_kernel_start(); // its CTAs wait for room, then for the end of this kernel

    const output o = {&map_out, out, out_ld, int(rows), int(cols), by_tma};
    if (threadIdx.x >= consumers * 128) {
        give_registers<$producer_registers>();
        const tensor_map &left = swapped ? map_b : map_a, &right = swapped ? map_a : map_b;
        produce(left, right, o, e, base, counter);
    } else {
        take_registers<$consumer_registers>();
        wait_for_previous_kernel();
        scales s = {0, 0, a_scales, b_scales, bias};
        if (b_tile_scaled) {
            s.smaller = s.larger = 1.0f; // the sums are scaled already
        } else if (!row_scaled) {
            float sa = __ldg(a_scales + 4), sb = __ldg(b_scales + 4);
            s.smaller = fminf(sa, sb), s.larger = fmaxf(sa, sb);
        }
        consume(o, s, e, base);
    }
    if (cluster > 1) cluster_sync(); // a neighbour may still arrive at this CTA's barriers
}
