// fused.cu - op "fused": amax and quantise of a tensor whose scale is its own, in one cooperative kernel. Its
// part of the tensor stays on chip between the two, so that memory is read once.
//
// Two teams of 256 threads in a CTA, one CTA an SM. A team keeps `held` tiles in shared memory and, of bf16,
// one more in registers; tiles beyond those are read a second time, the last ones first. Column sums for
// dbias go on the way in, their sum over the strips on the way out.
#include "convert.cuh"
#include "copies.cuh"
#include "grid_barrier.cuh"
#include "ptx.cuh"
#include "stage.cuh"
#include "sums.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr u32 held = $held;
constexpr bool in_registers = sizeof(source_t) == 2;
constexpr u32 kept = held + in_registers; // tiles that a team keeps
constexpr int teams = 2;
constexpr int threads = teams * tile_threads;
constexpr int tile_bytes = tile * tile * sizeof(source_t);

struct team {
    matrix<source_t> m;
    copy_target to;
    u8 *tiles;  // held of them
    u8 *turned; // the transposed tile; on the way in: the sums
    float *dbias_partials;
    i64 dbias_ld;
    int thread, rg, cg, number;
    u32 first, step, count; // its tiles, in row-major order

    __device__ __forceinline__ void sync() const { named_barrier(1 + number, tile_threads); }
    __device__ __forceinline__ tile_place at(u32 k) const {
        return place_of(first + k * step, u32(ceil_div(m.cols, tile)));
    }
    __device__ __forceinline__ void load(vec8<source_t> (&v)[patch], u32 k) const {
        tile_place p = at(k);
        load_patch(v, m, p.top() + rg * patch, p.left() + cg * patch,
                   p.top() + tile <= m.rows && p.left() + tile <= m.cols);
    }
};

// What the way in does with a tile.
__device__ __forceinline__ void look(const team &t, amax_of<source_t> &amax,
                                     const vec8<source_t> (&v)[patch], u32 k) {
#pragma unroll
    for (int i = 0; i < patch; ++i) amax.add(v[i]);
    if (!t.dbias_partials) return;
    tile_sums &sums = *reinterpret_cast<tile_sums *>(t.turned);
    tile_place p = t.at(k);
    put_sums(sums, v, t.thread);
    t.sync();
    write_sums(sums, t.dbias_partials + p.row * t.dbias_ld + p.left(), t.m.cols - p.left(),
               t.thread);
    t.sync();
}

// What the way out does with it.
__device__ __forceinline__ void leave(const team &t, const vec8<source_t> (&v)[patch], float scale,
                                      u32 k) {
    tile_place p = t.at(k);
    uint2 q[patch];
#pragma unroll
    for (int i = 0; i < patch; ++i) q[i] = repair8<format>(v[i], cast8<format>(v[i], scale));
    if (t.to.row) store_rows(t.to, q, p.top() + t.rg * patch, p.left() + t.cg * patch);
    if (!t.to.transposed) return;
    t.sync(); // the tile before has left the shared memory
    put_transposed(t.turned, q, t.rg, t.cg);
    t.sync();
    store_transposed(t.to, t.turned, p.top(), p.left(), t.thread);
}

// dbias of the team's tiles in the last row of tiles.
__device__ __forceinline__ void finish_sums(const team &t, float *dbias, int accumulate) {
    u32 tile_rows = u32(ceil_div(t.m.rows, tile));
    for (u32 k = 0; k < t.count; ++k) {
        tile_place p = t.at(k);
        i64 col = p.left() + t.thread;
        if (p.row == tile_rows - 1 && t.thread < tile && col < t.m.cols)
            finish_sum(dbias, t.dbias_partials, t.dbias_ld, tile_rows, col, accumulate);
    }
}

extern "C" __global__ void __launch_bounds__(threads, 1)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u64 *barrier, u64 epoch,
           u32 *partials, int n_partials, float *scales, u8 *row, i64 row_ld, i64 row_rows,
           u8 *transposed, i64 transposed_ld, i64 transposed_rows, u32 *found_inf, float *dbias,
           float *dbias_partials, i64 dbias_ld, int accumulate, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 slots[threads / 32];
    if (!start_kernel(when)) return;
    team t;
    t.m = make_matrix(source, source_ld, rows, cols);
    t.to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    t.number = threadIdx.x / tile_threads, t.thread = threadIdx.x % tile_threads;
    t.rg = t.thread / groups, t.cg = t.thread % groups;
    t.tiles = shared + t.number * held * tile_bytes;
    t.turned = shared + teams * held * tile_bytes + t.number * tile * tile;
    t.dbias_partials = dbias_partials, t.dbias_ld = dbias_ld;
    u32 tiles = u32(ceil_div(rows, tile) * ceil_div(cols, tile));
    t.first = blockIdx.x + t.number * gridDim.x, t.step = teams * gridDim.x;
    t.count = t.first < tiles ? (tiles - t.first + t.step - 1) / t.step : 0;

#pragma unroll 1
    for (u32 k = 0; k < held; ++k) {
        tile_place p = t.at(k);
        if (k < t.count)
            stage_tile(u32(__cvta_generic_to_shared(t.tiles)) + k * tile_bytes, t.m, p.top(),
                       p.left(), t.thread);
        copy_commit();
    }
    vec8<source_t> mine[patch] = {}, v[patch];
    if (in_registers && t.count > held) t.load(mine, held);
    amax_of<source_t> amax;
#pragma unroll 1
    for (u32 k = 0; k < held; ++k) {
        if (k + 1 == held)
            copy_wait<0>();
        else if (k + 2 == held)
            copy_wait<1>();
        else
            copy_wait<2>();
        t.sync();
        if (k >= t.count) continue;
        read_patch(v, t.tiles + k * tile_bytes, t.rg, t.cg);
        look(t, amax, v, k);
    }
    if (in_registers && t.count > held) look(t, amax, mine, held);
    keep_packed(mine);
#pragma unroll 1
    for (u32 k = kept; k < t.count; ++k) {
        t.load(v, k);
        look(t, amax, v, k);
    }

    u32 best = block_max<threads>(amax.bits(), slots);
    bool bad = __syncthreads_or(amax.nonfinite());
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = best;
        if (bad && found_inf) *found_inf = 1;
    }
    meet_grid<threads>(barrier, epoch);
    float largest = largest_partial<threads>(partials, gridDim.x, slots);
    scale_pair pair = scale_from_amax<format, power_of_two>(largest);
    write_scales(scales, pair, largest);

    if (in_registers && t.count > held) leave(t, mine, pair.scale, held);
#pragma unroll 1
    for (u32 k = t.count; k-- > kept;) {
        t.load(v, k);
        leave(t, v, pair.scale, k);
    }
#pragma unroll 1
    for (u32 k = 0; k < held; ++k) {
        if (k >= t.count) break;
        read_patch(v, t.tiles + k * tile_bytes, t.rg, t.cg);
        leave(t, v, pair.scale, k);
    }
    if (dbias) finish_sums(t, dbias, accumulate);
    leave_grid(barrier, epoch);
}
