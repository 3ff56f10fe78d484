// quantize_row.cu - op "quantize_row": the row copy with a scale for every row, padding included,
// from one read.
//
// A few rows ("unit") lie in a slot of shared memory: a look for their maxima, then the cast. A CTA
// takes one unit after the other and fetches some ahead; where rows are aligned to 16 bytes a
// thread reads only what it has copied itself. Rows too long for that pass through twice, in parts.
#include "convert.cuh"
#include "ptx.cuh"
#include "stage.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr int shared_bytes = $shared_bytes; // of all slots
constexpr int unit_bytes = shared_bytes / 4;
constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int most_rows = 32; // of a unit
constexpr int most_slots = 4;
constexpr int together = 4; // rows that a thread looks at at once
constexpr int words = vec8<source_t>::words;
constexpr int vector_bytes = sizeof(vec8<source_t>);

struct row_call {
    matrix<source_t> m;
    u8 *row;
    i64 row_ld, row_rows;
    float *row_scales;
};

// How rows go through shared memory; sizes along a row are in vectors of eight elements.
struct plan {
    int size;           // of a row
    int parts, part;    // of a row, size of one
    int held_log;       // rows of a unit, a power of two
    int slots;          // of a unit each
    int lanes;          // threads along a row, whole warps
    int group_rows_log; // rows of a unit that a group of lanes has
    int group, lane;    // of this thread; the last groups may have no rows
    bool has_rows;

    __device__ __forceinline__ int rows() const { return has_rows ? 1 << group_rows_log : 0; }
    __device__ __forceinline__ int first_row() const { return group << group_rows_log; }
    __device__ __forceinline__ int steps() const { return parts == 1 ? 1 : 2 * parts; }
};

__device__ __forceinline__ plan make_plan(const row_call &c) {
    plan p;
    p.size = int(ceil_div(c.row_ld > c.m.cols ? c.row_ld : c.m.cols, 8));
    p.parts = 1, p.part = p.size, p.held_log = 0;
    if (p.size * vector_bytes > shared_bytes)
        p.part = unit_bytes / vector_bytes, p.parts = (p.size + p.part - 1) / p.part;
    while (2 << p.held_log <= most_rows &&
           (p.part * vector_bytes) << (p.held_log + 1) <= unit_bytes)
        ++p.held_log;
    p.slots = min(shared_bytes / ((p.part * vector_bytes) << p.held_log), most_slots);
    p.lanes = p.part < threads ? (p.part + 31) / 32 * 32 : threads;
    int groups_log = 0;
    while (p.lanes << (groups_log + 1) <= threads && groups_log < p.held_log) ++groups_log;
    p.group = int(threadIdx.x) / p.lanes, p.lane = int(threadIdx.x) - p.group * p.lanes;
    p.has_rows = p.group >> groups_log == 0;
    p.group_rows_log = p.held_log - groups_log;
    return p;
}

struct unit {
    i64 top;    // first row
    int first;  // vector of the rows
    int size;   // vectors
    u32 target; // its slot
};

struct shared_words {
    u32 best[warps][most_rows];
    float scale[most_rows];
};

// ---- memory to shared memory --------------------------------------------------------------------
// `width` bytes an access, neighbouring threads at neighbouring bytes.
template <int width>
__device__ __forceinline__ void fetch_by(const row_call &c, const plan &p, const unit &at) {
    i64 row = at.top + p.first_row(), col = i64(at.first) * 8;
    int stride = p.part * vector_bytes, count = p.rows();
    int rows = int(min64(count, c.m.rows - row));
    const char *base = reinterpret_cast<const char *>(c.m.base);
    const char *source = reinterpret_cast<const char *>(c.m.base + row * c.m.ld + col);
    i64 bytes = (c.m.cols - col) * i64(sizeof(source_t)), ld = c.m.ld * i64(sizeof(source_t));
    u32 target = at.target + p.first_row() * stride;
#pragma unroll 1
    for (int piece = p.lane; piece < at.size * (vector_bytes / width); piece += p.lanes) {
        i64 left = bytes - piece * width;
        int valid = left < 0 ? 0 : left < width ? int(left) : width;
        const char *from = source + piece * width;
        u32 to = target + piece * width;
        if (valid == width && rows == count) {
#pragma unroll 4
            for (int i = 0; i < count; ++i, from += ld, to += stride)
                copy_async<width>(to, from, width);
        } else {
#pragma unroll 1
            for (int i = 0; i < count; ++i, from += ld, to += stride) {
                bool there = valid && i < rows;
                copy_async<width>(to, there ? from : base, there ? valid : 0);
            }
        }
    }
}
__device__ __forceinline__ void fetch_by_element(const row_call &c, const plan &p, const unit &at) {
    i64 row = at.top + p.first_row(), col = i64(at.first) * 8, cols = c.m.cols - col;
    int stride = p.part * vector_bytes;
    const u16 *source = reinterpret_cast<const u16 *>(c.m.base) + row * c.m.ld + col;
    u32 target = at.target + p.first_row() * stride;
#pragma unroll 1
    for (int word = p.lane; word < at.size * words; word += p.lanes) {
#pragma unroll 1
        for (int i = 0; i < p.rows(); ++i) {
            const u16 *from = source + i * c.m.ld + 2 * word;
            bool there = row + i < c.m.rows;
            u32 low = there && 2 * word < cols ? __ldg(from) : 0;
            u32 high = there && 2 * word + 1 < cols ? __ldg(from + 1) : 0;
            store_shared(target + i * stride + word * 4, low | high << 16);
        }
    }
}

__device__ __forceinline__ void fetch(const row_call &c, const plan &p, const unit &at) {
    if (c.m.width == 16)
        fetch_by<16>(c, p, at);
    else if (c.m.width == 8)
        fetch_by<8>(c, p, at);
    else if (c.m.width == 4)
        fetch_by<4>(c, p, at);
    else
        fetch_by_element(c, p, at);
}

__device__ __forceinline__ vec8<source_t> vector_at(const plan &p, const u8 *slot, int row, int v) {
    return *reinterpret_cast<const vec8<source_t> *>(slot + (row * p.part + v) * vector_bytes);
}

// ---- the look and the cast ----------------------------------------------------------------------
// The maxima of this warp's rows; more: of the parts before, too.
__device__ __forceinline__ void look(const plan &p, shared_words &s, const unit &at, const u8 *slot,
                                     bool more, u32 &seen) {
    int rows = p.rows(), first = p.first_row(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int i = 0; i < rows; i += together) {
        u32 best[together];
#pragma unroll
        for (int j = 0; j < together; ++j) best[j] = lifted<source_t>::zero;
#pragma unroll 2
        for (int v = p.lane; v < at.size; v += p.lanes) {
#pragma unroll
            for (int j = 0; j < together; ++j) {
                if (i + j >= rows) break;
                vec8<source_t> x = vector_at(p, slot, first + i + j, v);
#pragma unroll
                for (int k = 0; k < words; ++k) {
                    u32 u = lifted<source_t>::of(x.w[k]);
                    seen |= u;
                    best[j] = lifted<source_t>::greater(best[j], u);
                }
            }
        }
        u32 bits = 0; // in lane j that of row j
#pragma unroll
        for (int j = 0; j < together; ++j) {
            u32 all = __reduce_max_sync(0xffffffffu, lifted<source_t>::best(best[j]));
            bits = lane == j ? all : bits;
        }
        if (lane < together && i + lane < rows) {
            u32 *known = &s.best[warp][first + i + lane];
            *known = more && *known > bits ? *known : bits;
        }
    }
}

// The scales of the rows of a unit, whose maxima are there.
__device__ __forceinline__ void make_scales(const row_call &c, const plan &p, shared_words &s,
                                            i64 top) {
    int r = threadIdx.x;
    __syncthreads();
    if (r < 1 << p.held_log) {
        int first = (r >> p.group_rows_log) * (p.lanes / 32), end = first + p.lanes / 32;
        u32 best = 0;
#pragma unroll
        for (int w = 0; w < warps; ++w)
            if (w >= first && w < end) best = max(best, s.best[w][r]);
        scale_pair made = scale_from_amax<format, power_of_two>(__uint_as_float(best));
        s.scale[r] = made.scale;
        if (c.row_scales && top + r < ceil_div(c.m.rows, 16) * 16)
            c.row_scales[top + r] = top + r < c.m.rows ? made.scale_inv : 0.0f;
    }
    __syncthreads();
}

__device__ __forceinline__ void cast(const row_call &c, const plan &p, const shared_words &s,
                                     const unit &at, const u8 *slot) {
    i64 row = at.top + p.first_row();
    int rows = int(min64(p.rows(), c.row_rows - row)), first = p.first_row();
    if (!c.row) return;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
        float scale = s.scale[first + i];
        u8 *to = c.row + (row + i) * c.row_ld;
#pragma unroll 4
        for (int v = p.lane; v < at.size; v += p.lanes) {
            i64 col = i64(at.first + v) * 8;
            vec8<source_t> x = vector_at(p, slot, first + i, v);
            if (col < c.row_ld)
                __stcs(reinterpret_cast<uint2 *>(to + col),
                       repair8<format>(x, cast8<format>(x, scale)));
        }
    }
}

__device__ __forceinline__ void wait_for_slot(int slots) {
    if (slots == 1)
        copy_wait<0>();
    else if (slots == 2)
        copy_wait<1>();
    else if (slots == 3)
        copy_wait<2>();
    else
        copy_wait<3>();
}

extern "C" __global__ void __launch_bounds__(threads, 3)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u8 *row, i64 row_ld,
           i64 row_rows, float *row_scales, u32 *found_inf, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ shared_words s;
    if (!start_kernel(when)) return;
    row_call c = {make_matrix(source, source_ld, rows, cols), row, row ? row_ld : 0, row_rows,
                  row_scales};
    plan p = make_plan(c);
    bool own = c.m.width == vector_bytes; // a thread reads what it has copied itself
    i64 units = (ceil_div(rows, 16) * 16 + (1 << p.held_log) - 1) >> p.held_log;
    i64 mine = blockIdx.x < units ? (units - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    i64 steps = mine * p.steps();
    u32 base = smem_address(shared), seen = 0;
    int slot_bytes = (p.part * vector_bytes) << p.held_log;
    int slot = 0, step = 0, next_step = 0; // of a unit
    i64 top = i64(blockIdx.x) << p.held_log, next_top = top, down = i64(gridDim.x) << p.held_log;
    auto unit_of = [&](i64 at, int n) {
        int part = n < p.parts ? n : n - p.parts;
        return unit{at, part * p.part, min(p.part, p.size - part * p.part),
                    base + slot * slot_bytes};
    };

    // A step is fetched `slots` turns before it is taken, into the slot of the one that has just
    // been.
#pragma unroll 1
    for (i64 n = 0; n < steps + p.slots; ++n) {
        if (n >= p.slots) {
            const u8 *here = shared + slot * slot_bytes;
            unit at = unit_of(top, step);
            wait_for_slot(p.slots);
            if (!own) __syncthreads();
            if (step < p.parts) {
                look(p, s, at, here, step > 0, seen);
                if (step == p.parts - 1) make_scales(c, p, s, top);
            }
            if (p.parts == 1 || step >= p.parts) cast(c, p, s, at, here);
            if (++step == p.steps()) step = 0, top += down;
            if (!own) __syncthreads();
        }
        if (n < steps) {
            fetch(c, p, unit_of(next_top, next_step));
            if (++next_step == p.steps()) next_step = 0, next_top += down;
        }
        copy_commit();
        if (++slot == p.slots) slot = 0;
    }
    if ((seen & lifted<source_t>::marks) && found_inf) *found_inf = 1;
}
