// quantize_row.cu - op "quantize_row": every row with a scale of its own, read once; and for the column copy
// that follows, the largest finite magnitude of every column in bands of 32 rows. For dbias also the column
// sums of each band.
//
// A CTA takes a band. Its rows pass through shared memory, a few at a time ("slab") with more slabs under way;
// while one slab is looked at, the one before is cast. A thread owns the same columns in every row, so
// their maxima and sums stay in registers. Rows too long for that are read twice: first for the maxima, then
// for the cast.
#include "convert.cuh"
#include "ptx.cuh"
#include "stage.cuh"

using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
constexpr bool with_sums = $dbias;
constexpr int ring_bytes = $ring_bytes;
constexpr int threads = 512;
constexpr int warps = threads / 32;
constexpr int band = 32;
constexpr int most_slots = 6; // slabs in shared memory
constexpr int words = vec8<source_t>::words;
constexpr int most_chunks = (sizeof(source_t) == 4 ? 4 : 8) / (with_sums ? 2 : 1);
constexpr i64 span = most_chunks * threads * 8; // columns that all threads can own

struct row_call {
    matrix<source_t> m;
    u8 *row;
    i64 row_ld, row_rows;
    float *row_scales, *column_partials;
    i64 column_partials_ld;
    float *dbias_partials;
    i64 dbias_ld;
};

struct shared_words {
    u32 best[2][8][warps]; // of the rows of a slab and of the one before, by warp
    float scale[band];     // of rows read twice, as is
    u32 row_best[band];
};

// What a thread knows of its columns: `chunks` vectors of a row.
template <int chunks> struct own_columns {
    u32 best[chunks][words];
    float sum[with_sums ? chunks : 1][8];
    u32 seen; // lifted magnitudes of all elements, or-ed

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
#pragma unroll
            for (int k = 0; k < words; ++k) best[i][k] = lifted<source_t>::zero;
        }
#pragma unroll
        for (int i = 0; i < (with_sums ? chunks : 1); ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[i][k] = 0.0f;
    }
    // A vector of chunk i; returns its lifted maxima folded into `row_best`.
    __device__ __forceinline__ u32 add(int i, const vec8<source_t> &v, u32 row_best) {
#pragma unroll
        for (int k = 0; k < words; ++k) {
            u32 u = lifted<source_t>::of(v.w[k]);
            seen |= u;
            row_best = lifted<source_t>::greater(row_best, u);
            best[i][k] = lifted<source_t>::greater(best[i][k], u);
        }
        if (with_sums) {
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[i][k] += element(v, k);
        }
        return row_best;
    }
};

__device__ __forceinline__ float column_amax(const u32 (&best)[4], int k) {
    u32 w = best[k / 2];
    return __uint_as_float(k % 2 ? lifted<bf16>::high(w) : lifted<bf16>::low(w));
}
__device__ __forceinline__ float column_amax(const u32 (&best)[8], int k) {
    return __uint_as_float(lifted<fp32>::best(best[k]));
}

// Maxima and sums of the band's columns [first, first + span).
template <int chunks>
__device__ __forceinline__ void write_columns(const row_call &c, const own_columns<chunks> &own,
                                              i64 b, i64 first) {
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
        i64 col = first + i64(i * threads + threadIdx.x) * 8;
        if (col >= c.m.cols) break;
        if (c.column_partials) {
            float *p = c.column_partials + b * c.column_partials_ld + col;
#pragma unroll
            for (int k = 0; k < 8; k += 4)
                *reinterpret_cast<float4 *>(p + k) =
                    make_float4(column_amax(own.best[i], k), column_amax(own.best[i], k + 1),
                                column_amax(own.best[i], k + 2), column_amax(own.best[i], k + 3));
        }
        if (with_sums && c.dbias_partials) {
            float *p = c.dbias_partials + b * c.dbias_ld + col;
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (col + k < c.m.cols) p[k] = own.sum[with_sums ? i : 0][k];
        }
    }
}

__device__ __forceinline__ void write_row_scale(const row_call &c, i64 r, float scale_inv) {
    if (c.row_scales && r < ceil_div(c.m.rows, 16) * 16)
        c.row_scales[r] = r < c.m.rows ? scale_inv : 0.0f;
}

// Eight bytes of the row copy.
__device__ __forceinline__ void put(const row_call &c, const vec8<source_t> &v, float scale, i64 r,
                                    i64 col) {
    uint2 q = repair8<format>(v, cast8<format>(v, scale));
    __stcs(reinterpret_cast<uint2 *>(c.row + r * c.row_ld + col), q);
}

// ---- rows that fit --------------------------------------------------------------------------------
template <int width>
__device__ __forceinline__ void stage_row(u32 target, const source_t *p, int bytes, int padded) {
    const char *from = reinterpret_cast<const char *>(p);
    for (int at = threadIdx.x * width; at < padded; at += threads * width) {
        int valid = bytes - at < 0 ? 0 : bytes - at < width ? bytes - at : width;
        copy_async<width>(target + at, valid ? from + at : from, valid);
    }
}
__device__ __forceinline__ void stage_row_by_element(u32 target, const bf16 *p, int bytes,
                                                     int padded) {
    const u16 *from = reinterpret_cast<const u16 *>(p);
    for (int at = threadIdx.x * 4; at < padded; at += threads * 4) {
        u32 low = at < bytes ? __ldg(from + at / 2) : 0;
        u32 high = at + 2 < bytes ? __ldg(from + at / 2 + 1) : 0;
        store_shared(target + at, low | high << 16);
    }
}
__device__ __forceinline__ void stage_row_by_element(u32, const fp32 *, int, int) {}

// Rows [r, r + count) of source; rows outside it as zeros.
__device__ __forceinline__ void stage_slab(u32 target, const row_call &c, i64 r, int count,
                                           int row_bytes) {
    for (int g = 0; g < count; ++g, target += row_bytes) {
        bool there = r + g < c.m.rows;
        const source_t *p = c.m.base + (there ? (r + g) * c.m.ld : 0);
        int bytes = there ? int(c.m.cols) * int(sizeof(source_t)) : 0;
        if (c.m.width == 16)
            stage_row<16>(target, p, bytes, row_bytes);
        else if (c.m.width == 8)
            stage_row<8>(target, p, bytes, row_bytes);
        else if (c.m.width == 4)
            stage_row<4>(target, p, bytes, row_bytes);
        else
            stage_row_by_element(target, p, bytes, row_bytes);
    }
}

// The amaxes of the slab's rows, by this thread's columns and then by its warp.
template <int count, int chunks>
__device__ __forceinline__ void slab_maxima(own_columns<chunks> &own, u32 (*maxima)[warps],
                                            const u8 *slab, int row_bytes) {
    u32 best[count];
#pragma unroll
    for (int g = 0; g < count; ++g) best[g] = lifted<source_t>::zero;
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
        int at = (i * threads + int(threadIdx.x)) * int(sizeof(vec8<source_t>));
        if (at >= row_bytes) break;
        vec8<source_t> v[count];
#pragma unroll
        for (int g = 0; g < count; ++g)
            v[g] = *reinterpret_cast<const vec8<source_t> *>(slab + g * row_bytes + at);
#pragma unroll
        for (int g = 0; g < count; ++g) best[g] = own.add(i, v[g], best[g]);
    }
#pragma unroll
    for (int g = 0; g < count; ++g) {
        u32 bits = __reduce_max_sync(0xffffffffu, lifted<source_t>::best(best[g]));
        if (threadIdx.x % 32 == 0) maxima[g][threadIdx.x / 32] = bits;
    }
}

// The row copy of a slab. Half a warp makes the scale of a row; every warp those of all rows.
template <int count, int chunks>
__device__ __forceinline__ void slab_cast(const row_call &c, const u32 (*maxima)[warps],
                                          const u8 *slab, i64 r, int row_bytes) {
    static_assert(warps == 16, "half a warp reads the maxima of all warps");
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < count; pair += 2) {
        int mine = pair + lane / 16;
        u32 bits = mine < count ? maxima[mine][lane % 16] : 0;
#pragma unroll
        for (int step = 8; step > 0; step /= 2) {
            u32 other = __shfl_xor_sync(0xffffffffu, bits, step);
            bits = other > bits ? other : bits;
        }
        scale_pair made = scale_from_amax<format, power_of_two>(__uint_as_float(bits));
        if (threadIdx.x == lane && lane % 16 == 0 && mine < count)
            write_row_scale(c, r + mine, made.scale_inv);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float scale = __shfl_sync(0xffffffffu, made.scale, 16 * k);
            int g = pair + k;
            if (g >= count || r + g >= c.row_rows || !c.row) continue;
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
                int col = (i * threads + int(threadIdx.x)) * 8, at = col * int(sizeof(source_t));
                if (col >= c.row_ld) break;
                vec8<source_t> v = {};
                if (at < row_bytes)
                    v = *reinterpret_cast<const vec8<source_t> *>(slab + g * row_bytes + at);
                put(c, v, scale, r + g, col);
            }
        }
    }
}

__device__ __forceinline__ void wait_for_slab(int ahead) {
    if (ahead == 1)
        copy_wait<0>();
    else if (ahead == 2)
        copy_wait<1>();
    else if (ahead == 3)
        copy_wait<2>();
    else
        copy_wait<3>();
}

// Slabs of `count` rows, of which a thread owns `chunks` vectors.
template <int count, int chunks>
__device__ __forceinline__ bool bands_in_shared(const row_call &c, shared_words &s,
                                                const u8 *shared) {
    constexpr int per_band = band / count;
    int row_bytes = int(ceil_div(c.m.cols, 8)) * int(sizeof(vec8<source_t>));
    int slots = ring_bytes / (count * row_bytes);
    slots = slots < most_slots ? slots : most_slots;
    int ahead = slots - 2;
    i64 bands = ceil_div(c.m.rows, band);
    int slabs = int(ceil_div(bands - blockIdx.x, gridDim.x)) * per_band;
    u32 target = u32(__cvta_generic_to_shared(shared));
    auto first_row = [&](int slab) {
        return (blockIdx.x + i64(slab / per_band) * gridDim.x) * band + slab % per_band * count;
    };
    auto place = [&](int slab) { return slab % slots * count * row_bytes; };
    auto fetch = [&](int slab) {
        if (slab < slabs) stage_slab(target + place(slab), c, first_row(slab), count, row_bytes);
        copy_commit();
    };
    own_columns<chunks> own;
    own.clear(), own.seen = 0;
    for (int slab = 0; slab < ahead; ++slab) fetch(slab);
    for (int slab = 0; slab <= slabs; ++slab) {
        wait_for_slab(ahead);
        __syncthreads(); // this slab is there; of the one before the maxima; the one before that is cast
        fetch(slab + ahead);
        if (slab < slabs)
            slab_maxima<count>(own, s.best[slab % 2], shared + place(slab), row_bytes);
        if (slab < slabs && slab % per_band == per_band - 1) {
            write_columns(c, own, first_row(slab) / band, 0);
            own.clear();
        }
        if (slab > 0)
            slab_cast<count, chunks>(c, s.best[(slab - 1) % 2], shared + place(slab - 1),
                                     first_row(slab - 1), row_bytes);
    }
    return own.seen & lifted<source_t>::marks;
}

// ---- rows that do not -----------------------------------------------------------------------------
__device__ __forceinline__ vec8<source_t> load_own(const row_call &c, i64 r, i64 col) {
    const source_t *p = c.m.base + r * c.m.ld + col;
    i64 count = r < c.m.rows ? c.m.cols - col : 0;
    return count >= 8 ? load_vec8(p, c.m.width) : load_vec8_edge(p, count);
}

__device__ __forceinline__ void read_band(const row_call &c, own_columns<most_chunks> &own,
                                          shared_words &s, i64 b) {
    for (i64 first = 0; first < c.m.cols; first += span) {
        own.clear();
        for (int g = 0; g < band; ++g) {
            u32 best = lifted<source_t>::zero;
#pragma unroll
            for (int i = 0; i < most_chunks; ++i) {
                i64 col = first + i64(i * threads + threadIdx.x) * 8;
                if (col < c.m.cols) best = own.add(i, load_own(c, b * band + g, col), best);
            }
            u32 bits = __reduce_max_sync(0xffffffffu, lifted<source_t>::best(best));
            if (threadIdx.x % 32 == 0) atomicMax(&s.row_best[g], bits);
        }
        write_columns(c, own, b, first);
    }
}

__device__ __forceinline__ bool bands_read_twice(const row_call &c, shared_words &s) {
    own_columns<most_chunks> own;
    own.seen = 0;
    for (i64 b = blockIdx.x; b < ceil_div(c.m.rows, band); b += gridDim.x) {
        __syncthreads(); // the scales of the band before have been used
        if (threadIdx.x < band) s.row_best[threadIdx.x] = 0;
        __syncthreads();
        read_band(c, own, s, b);
        __syncthreads();
        if (threadIdx.x < band) {
            float amax = __uint_as_float(s.row_best[threadIdx.x]);
            scale_pair made = scale_from_amax<format, power_of_two>(amax);
            s.scale[threadIdx.x] = made.scale;
            write_row_scale(c, b * band + threadIdx.x, made.scale_inv);
        }
        __syncthreads();
        for (int g = 0; c.row && g < band && b * band + g < c.row_rows; ++g) {
#pragma unroll 4
            for (i64 col = threadIdx.x * 8; col < c.row_ld; col += threads * 8)
                put(c, load_own(c, b * band + g, col), s.scale[g], b * band + g, col);
        }
    }
    return own.seen & lifted<source_t>::marks;
}

extern "C" __global__ void __launch_bounds__(threads, 1)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u8 *row, i64 row_ld,
           i64 row_rows, float *row_scales, float *column_partials, i64 column_partials_ld,
           u32 *found_inf, float *dbias_partials, i64 dbias_ld, const u32 *when) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ shared_words s;
    if (!start_kernel(when)) return;
    row_call c = {make_matrix(source, source_ld, rows, cols),
                  row,
                  row_ld,
                  row_rows,
                  row_scales,
                  column_partials,
                  column_partials_ld,
                  dbias_partials,
                  dbias_ld};
    i64 row_bytes = ceil_div(cols, 8) * i64(sizeof(vec8<source_t>));
    constexpr i64 chunk = threads * 8; // columns
    bool found;
    if (cols > span || 3 * row_bytes > ring_bytes)
        found = bands_read_twice(c, s);
    else if (cols <= chunk / 2)
        found = bands_in_shared<8, 1>(c, s, shared);
    else if (cols <= chunk)
        found = bands_in_shared<4, 1>(c, s, shared);
    else if (cols <= 2 * chunk)
        found = bands_in_shared<2, 2>(c, s, shared);
    else
        found = bands_in_shared<1, most_chunks>(c, s, shared);
    if (found && found_inf) *found_inf = 1;
}
