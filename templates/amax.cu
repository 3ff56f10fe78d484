// amax.cu - op "amax": the largest finite |source[i,j]|, one partial maximum per CTA.
//
// No atomics and nothing to initialise: every entry of partials is written, the quantise kernel
// takes their maximum. A contiguous matrix is read as one long row, so narrow ones cost nothing
// extra. amax_dbias.cu is the same op for a dy whose column sums are wanted.
#include "amax.cuh"
#include "ptx.cuh"

using source_t = $source;
constexpr int threads = 256;
constexpr int loads = 8;                     // 16-byte vectors in flight per thread
constexpr int segment = threads * loads * 8; // elements a CTA reads at a time

// One segment of a row: elements up to the first 16-byte boundary, whole vectors, the rest.
__device__ __forceinline__ void scan(amax_of<source_t> &amax, const source_t *p, int count) {
    int head = int(((16 - (u64(p) & 15)) & 15) / sizeof(source_t));
    head = head < count ? head : count;
    int vecs = (count - head) / 8, tail = (count - head) % 8;
    const source_t *body = p + head;
    constexpr int parts = sizeof(vec8<source_t>) / 16;
    vec8<source_t> v[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) {
        int k = int(threadIdx.x) + i * threads;
#pragma unroll
        for (int j = 0; j < parts; ++j)
            reinterpret_cast<uint4 *>(v[i].w)[j] =
                load16_if(reinterpret_cast<const uint4 *>(body) + i64(k) * parts + j, k < vecs);
    }
    if (threadIdx.x < head) amax.add(p[threadIdx.x]);
    if (threadIdx.x < tail) amax.add(body[8 * vecs + threadIdx.x]);
#pragma unroll
    for (int i = 0; i < loads; ++i) amax.add(v[i]);
}

extern "C" __global__ void __launch_bounds__(threads, 4)
    $entry(const source_t *source, i64 source_ld, i64 rows, i64 cols, u32 *partials, int n_partials,
           u32 *found_inf, float *dbias_partials, i64 dbias_ld, const u32 *when) {
    __shared__ u32 slots[threads / 32];
    if (!start_kernel(when)) return;
    if (source_ld == cols || rows == 1) {
        cols *= rows;
        rows = 1;
    }
    i64 segments = ceil_div(cols, segment);
    amax_of<source_t> amax;
    for (i64 item = blockIdx.x; item < rows * segments; item += gridDim.x) {
        i64 row = rows == 1 ? 0 : item / segments;
        i64 first = (item - row * segments) * segment;
        scan(amax, source + row * source_ld + first, int(min64(segment, cols - first)));
    }
    write_partial<threads>(amax, slots, partials, n_partials, found_inf);
}
