// fused.cu - op "fused": amax and quantise of a tensor whose scale is its own, in one cooperative
// kernel. Its part of the tensor stays on chip between the two, so that memory is read once.
//
// Two teams of 256 threads in a CTA, one CTA an SM. A team keeps `held` tiles in shared memory and,
// of bf16, one more in registers; tiles beyond those are read a second time, the last ones first.
// Column sums for dbias go on the way in, their sum over the strips on the way out.
#include "convert.cuh"
#include "copies.cuh"
#include "grid_barrier.cuh"
#include "ptx.cuh"
#include "stage.cuh"
#include "sums.cuh"

using source_t = $source;
constexpr bool power_of_two = $power_of_two;
constexpr u32 held = $held;
constexpr bool may_use_registers = sizeof(source_t) == 2;
constexpr int teams = 2;
constexpr int threads = teams * tile_threads;
constexpr int tile_bytes = tile * tile * sizeof(source_t);

struct team {
    matrix<source_t> m;
    copy_target to;
    const u8 *from; // its slots, a tile each
    u32 tiles;      // the same as an address of shared memory
    u8 *turned;     // the transposed tile; on the way in: the sums
    float *dbias_partials;
    i64 dbias_ld;
    int thread, rg, cg, number;
    u32 first, step, count; // its tiles, in row-major order
    bool in_registers;      // whether it keeps one there
    bool to_e5m2;

    __device__ __forceinline__ void sync() const { named_barrier(1 + number, tile_threads); }
    __device__ __forceinline__ tile_place at(u32 k) const {
        return place_of(first + k * step, u32(ceil_div(m.cols, tile)));
    }
    // Its tile k on the way to the slot of that name, in a group of copies of its own.
    __device__ __forceinline__ void fetch(u32 k, u32 slot, bool wanted) const {
        tile_place p = at(k);
        if (wanted) stage_tile(tiles + slot % held * tile_bytes, m, p.top(), p.left(), thread);
        copy_commit();
    }
    __device__ __forceinline__ void read(vec8<source_t> (&v)[patch], u32 slot) const {
        copy_wait<held - 1>();
        sync();
        read_patch(v, from + slot % held * tile_bytes, rg, cg);
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

// What the way out does with it. There was a barrier since the transposed tile before was stored.
__device__ __forceinline__ void leave(const team &t, const vec8<source_t> (&v)[patch], float scale,
                                      u32 k) {
    tile_place p = t.at(k);
    uint2 q[patch];
    cast_rows(q, v, scale, t.to_e5m2);
    if (t.to.row) store_rows(t.to, q, p.top() + t.rg * patch, p.left() + t.cg * patch);
    if (!t.to.transposed) return;
    put_transposed(t.turned, q, t.rg, t.cg);
    t.sync();
    store_transposed(t.to, t.turned, p.top(), p.left(), t.thread);
}

// All tiles pass through the slots. The last ones stay there, the one before them in `kept`.
__device__ __forceinline__ void way_in(const team &t, amax_of<source_t> &amax,
                                       vec8<source_t> (&kept)[patch]) {
    vec8<source_t> v[patch];
    // A tile is fetched `held` turns before it is looked at.
#pragma unroll 1
    for (u32 next = 0; next < t.count + held; ++next) {
        if (next >= held) {
            u32 k = next - held;
            t.read(v, k);
            look(t, amax, v, k);
            if (t.in_registers && next + 1 == t.count) {
#pragma unroll
                for (int i = 0; i < patch; ++i) kept[i] = v[i];
            }
            if (next < t.count) t.sync(); // the slot has been read
        }
        t.fetch(next, next, next < t.count);
    }
}

// `kept`, what is in the slots, then the others from memory once more, the last ones first.
__device__ __forceinline__ void way_out(const team &t, vec8<source_t> (&v)[patch], float scale) {
    u32 others = t.count - t.in_registers; // that pass through a slot
#pragma unroll 1
    for (u32 done = !t.in_registers; done <= others; ++done) {
        u32 k = t.count - done - (done > held && t.in_registers);
        if (done == 0)
            k = t.count - 1 - held;
        else
            t.read(v, t.count - done);
        leave(t, v, scale, k);
        if (done == 0) continue;
        u32 next = done + held;
        if (next <= others) t.sync(); // the slot has been read
        t.fetch(t.count - next - t.in_registers, t.count - next, next <= others);
    }
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
           float *dbias_partials, i64 dbias_ld, int accumulate, const u32 *when, int e5m2) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 slots[threads / 32];
    if (!start_kernel(when)) return;
    team t;
    t.m = make_matrix(source, source_ld, rows, cols);
    t.to = {row, row_ld, row_rows, transposed, transposed_ld, transposed_rows};
    t.number = threadIdx.x / tile_threads, t.thread = threadIdx.x % tile_threads;
    t.rg = t.thread / groups, t.cg = t.thread % groups;
    t.from = shared + t.number * held * tile_bytes;
    t.tiles = smem_address(t.from);
    t.turned = shared + teams * held * tile_bytes + t.number * tile * tile;
    t.dbias_partials = dbias_partials, t.dbias_ld = dbias_ld;
    u32 tiles = u32(ceil_div(rows, tile) * ceil_div(cols, tile));
    t.first = blockIdx.x + t.number * gridDim.x, t.step = teams * gridDim.x;
    t.count = t.first < tiles ? (tiles - t.first + t.step - 1) / t.step : 0;
    t.to_e5m2 = e5m2;
    t.in_registers = may_use_registers && t.count > held;

    amax_of<source_t> amax;
    vec8<source_t> kept[patch];
    way_in(t, amax, kept);

    u32 best = block_max<threads>(amax.bits(), slots);
    bool bad = __syncthreads_or(amax.nonfinite());
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = best;
        if (bad && found_inf) *found_inf = 1;
    }
    meet_grid<threads>(barrier, epoch);
    float largest = largest_partial<threads>(partials, gridDim.x, slots);
    scale_pair pair = scale_from_amax<power_of_two>(largest, e5m2);
    write_scales(scales, pair, largest);

    way_out(t, kept, pair.scale);
    if (dbias) finish_sums(t, dbias, accumulate);
    leave_grid(barrier, epoch);
}
