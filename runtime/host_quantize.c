/*
 * host_quantize.c - the ops amax and quantize on the CPU.
 *
 * In: a bf16 or float32 matrix of any alignment and leading dim. Out: partial maxima and column
 * sums; then FP8 copies (row and transposed, with their padding), scales and column sums. quantize
 * works on tiles of 128 x 128: each row of a tile is brought to 128 elements, zeros beyond the
 * matrix, and encoded whole, so the padding of both copies comes out of the loop of the values.
 *
 * Column sums for dbias follow the kernels: amax leaves one float32 partial per 128 rows (rounded
 * from float64 here), quantize adds these in ascending order.
 */
#include "runtime/host.h"

#include <stddef.h>
#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_format.h"
#include "runtime/host_simd.h"

enum { TILE = FP8_HOST_PIECE };
enum { AMAX_GRAIN = 1 << 16 }; /* elements of one item, at least */

/* FP8_HOST_FROM_*, or -1. */
static int source_kind(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_BF16   ? FP8_HOST_FROM_BF16
           : dtype == FP8_DTYPE_FP32 ? FP8_HOST_FROM_FP32
                                     : -1;
}

/* ---- amax ---- */

struct amax {
    const struct fp8_host_simd *simd;
    const void *source;
    int64_t ld, rows, cols;
    fp8_dtype dtype;
    int from;
    int64_t items;
    uint32_t *partials;
    uint32_t *found_inf;
    float *dbias_partials;
    int64_t dbias_ld;
};

/* `count` elements in a row. */
static uint32_t amax_of_run(const struct amax *job, const char *run, int64_t count, uint32_t *bad)
{
    size_t bytes = fp8_dtype_bytes(job->dtype);
    uint32_t largest = job->simd->amax[job->from](run, count / TILE, bad);
    int64_t rest = count % TILE;
    if (rest == 0)
        return largest;
    char padded[TILE * sizeof(float)] __attribute__((aligned(16))) = { 0 };
    memcpy(padded, run + (size_t)(count - rest) * bytes, (size_t)rest * bytes);
    uint32_t last = job->simd->amax[job->from](padded, 1, bad);
    return largest > last ? largest : last;
}

/* Item i takes an equal share of the elements, counted row by row. */
static void amax_item(void *user, int64_t index)
{
    const struct amax *job = user;
    int64_t total = job->rows * job->cols;
    int64_t share = total / job->items, more = total % job->items;
    int64_t at = index * share + fp8_min_i64(index, more);
    int64_t end = at + share + (index < more);
    uint32_t largest = 0, bad = 0;
    while (at < end) {
        int64_t row = at / job->cols, col = at % job->cols;
        int64_t count = fp8_min_i64(end - at, job->cols - col);
        const char *run = fp8_host_at(job->source, job->dtype, job->ld, row, col);
        uint32_t part = amax_of_run(job, run, count, &bad);
        largest = largest > part ? largest : part;
        at += count;
    }
    job->partials[index] = largest;
    if (bad != 0 && job->found_inf != NULL)
        __atomic_store_n(job->found_inf, 1u, __ATOMIC_RELAXED);
}

/* Column sums of one tile of 128 x 128. */
static void sums_item(void *user, int64_t index)
{
    const struct amax *job = user;
    int64_t tile_cols = fp8_ceil_div(job->cols, TILE);
    int64_t strip = index / tile_cols, left = index % tile_cols * TILE;
    int64_t cols = fp8_min_i64(TILE, job->cols - left);
    int64_t end = fp8_min_i64(strip * TILE + TILE, job->rows);
    size_t bytes = fp8_dtype_bytes(job->dtype);
    char padded[TILE * sizeof(float)] __attribute__((aligned(16))) = { 0 };
    double sums[TILE] = { 0 };
    for (int64_t i = strip * TILE; i < end; i++) {
        const void *piece = fp8_host_at(job->source, job->dtype, job->ld, i, left);
        if (cols < TILE) {
            memcpy(padded, piece, (size_t)cols * bytes);
            piece = padded;
        }
        job->simd->add[job->from](piece, sums);
    }
    for (int64_t j = 0; j < cols; j++)
        job->dbias_partials[strip * job->dbias_ld + left + j] = (float)sums[j];
}

fp8_status fp8_host_amax(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args)
{
    struct amax job = {
        .simd = fp8_host_simd(),
        .source = args[FP8_AMAX_source].p,
        .ld = args[FP8_AMAX_source_ld].i,
        .rows = args[FP8_AMAX_rows].i,
        .cols = args[FP8_AMAX_cols].i,
        .dtype = semantics->source_dtype,
        .from = source_kind(semantics->source_dtype),
        .partials = args[FP8_AMAX_partials].p,
        .found_inf = args[FP8_AMAX_found_inf].p,
        .dbias_partials = args[FP8_AMAX_dbias_partials].p,
        .dbias_ld = args[FP8_AMAX_dbias_ld].i,
    };
    int64_t n_partials = args[FP8_AMAX_n_partials].i;
    if (job.from < 0)
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no amax of %s",
                        fp8_dtype_name(job.dtype));
    if (n_partials < 1)
        return fp8_fail(FP8_ERR_INTERNAL, "host backend: amax has %lld partials",
                        (long long)n_partials);
    if (job.rows == 1)
        job.ld = job.cols;
    job.items = fp8_min_i64(fp8_ceil_div(job.rows * job.cols, AMAX_GRAIN), n_partials);
    fp8_pool_run(pool, job.items, amax_item, &job);
    for (int64_t i = job.items; i < n_partials; i++)
        job.partials[i] = 0;
    if (job.dbias_partials != NULL)
        fp8_pool_run(pool, fp8_ceil_div(job.rows, TILE) * fp8_ceil_div(job.cols, TILE), sums_item,
                     &job);
    return FP8_OK;
}

/* ---- quantize ---- */

struct quantize {
    const struct fp8_host_simd *simd;
    const void *source;
    int64_t ld, rows, cols;
    fp8_dtype dtype;
    int from, to;
    float scale;
    uint8_t *row;
    int64_t row_ld, row_rows;
    uint8_t *transposed;
    int64_t transposed_ld, transposed_rows;
    float *dbias;
    const float *dbias_partials;
    int64_t dbias_ld;
    bool accumulate;
    int64_t tile_cols; /* tiles in a row of tiles */
};

struct tile {
    int64_t top, left;
    int64_t rows, cols; /* of the matrix inside the tile; may be 0 where only padding is */
    uint8_t codes[TILE][TILE];
};

static void encode_tile(const struct quantize *job, struct tile *tile)
{
    size_t bytes = fp8_dtype_bytes(job->dtype);
    char padded[TILE * sizeof(float)] __attribute__((aligned(16))) = { 0 };
    for (int64_t i = 0; i < tile->rows; i++) {
        const void *piece =
            fp8_host_at(job->source, job->dtype, job->ld, tile->top + i, tile->left);
        if (tile->cols < TILE) {
            memcpy(padded, piece, (size_t)tile->cols * bytes);
            piece = padded;
        }
        job->simd->encode[job->from][job->to](piece, job->scale, tile->codes[i]);
    }
    if (tile->rows < TILE)
        memset(tile->codes[tile->rows], 0, (size_t)(TILE - tile->rows) * TILE);
}

static void put_row_copy(const struct quantize *job, const struct tile *tile)
{
    int64_t rows = fp8_min_i64(TILE, job->row_rows - tile->top);
    int64_t cols = fp8_min_i64(TILE, job->row_ld - tile->left);
    for (int64_t i = 0; i < rows && cols > 0; i++)
        memcpy(job->row + (tile->top + i) * job->row_ld + tile->left, tile->codes[i], (size_t)cols);
}

typedef uint8_t bytes16 __attribute__((vector_size(16)));

/* 16 x 16 bytes: four rounds of interleaving row i with row i + 8 make rows of columns. */
static void turn16(const uint8_t *source, uint8_t *target)
{
    bytes16 from[16], to[16];
    for (int i = 0; i < 16; i++)
        memcpy(&from[i], source + i * TILE, 16);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            to[2 * i] = __builtin_shufflevector(from[i], from[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                                20, 5, 21, 6, 22, 7, 23);
            to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 8], 8, 24, 9, 25, 10, 26, 11,
                                                    27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(from, to, sizeof from);
    }
    for (int i = 0; i < 16; i++)
        memcpy(target + i * TILE, &from[i], 16);
}

static void put_transposed_copy(const struct quantize *job, const struct tile *tile)
{
    int64_t rows = fp8_min_i64(TILE, job->transposed_rows - tile->left);
    int64_t cols = fp8_min_i64(TILE, job->transposed_ld - tile->top);
    for (int64_t j = 0; j < rows && cols > 0; j += 16) {
        uint8_t turned[16][TILE];
        for (int64_t i = 0; i < TILE; i += 16)
            turn16(&tile->codes[i][j], &turned[0][i]);
        for (int64_t k = 0; k < 16 && j + k < rows; k++)
            memcpy(job->transposed + (tile->left + j + k) * job->transposed_ld + tile->top,
                   turned[k], (size_t)cols);
    }
}

static void quantize_item(void *user, int64_t index)
{
    const struct quantize *job = user;
    struct tile tile;
    int64_t tile_row = index / job->tile_cols;
    tile.top = tile_row * TILE;
    tile.left = index % job->tile_cols * TILE;
    tile.rows = fp8_max_i64(0, fp8_min_i64(TILE, job->rows - tile.top));
    tile.cols = fp8_max_i64(0, fp8_min_i64(TILE, job->cols - tile.left));
    if (tile.cols == 0)
        tile.rows = 0;
    encode_tile(job, &tile);
    if (job->row != NULL)
        put_row_copy(job, &tile);
    if (job->transposed != NULL)
        put_transposed_copy(job, &tile);
}

static void dbias_item(void *user, int64_t index)
{
    const struct quantize *job = user;
    int64_t first = index * TILE, last = fp8_min_i64(first + TILE, job->cols);
    int64_t strips = fp8_ceil_div(job->rows, TILE);
    for (int64_t j = first; j < last; j++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < strips; i++)
            sum += job->dbias_partials[i * job->dbias_ld + j];
        job->dbias[j] = job->accumulate ? job->dbias[j] + sum : sum;
    }
}

/* Writes the scales and returns the factor of the cast. */
static float make_scales(const fp8_semantics *semantics, const fp8_value *args)
{
    const uint32_t *partials = args[FP8_QUANTIZE_partials].p;
    int64_t n_partials = args[FP8_QUANTIZE_n_partials].i;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n_partials; i++)
        largest = partials[i] > largest ? partials[i] : largest;
    float amax = fp8_float_of_bits(largest);
    float maximum = semantics->target_dtype == FP8_DTYPE_E4M3 ? FP8_E4M3_MAXIMUM : FP8_E5M2_MAXIMUM;
    float scale = fp8_scale_of_amax(amax, maximum, semantics->power_of_two);
    float scales[FP8_SCALES_COUNT] = { 0 };
    scales[FP8_SCALES_SCALE] = scale;
    scales[FP8_SCALES_SCALE_INV] = fp8_scale_inverse(scale);
    scales[FP8_SCALES_AMAX] = amax;
    memcpy(args[FP8_QUANTIZE_scales].p, scales, sizeof scales);
    return scale;
}

fp8_status fp8_host_quantize(struct fp8_pool *pool, const fp8_semantics *semantics,
                             const fp8_value *args)
{
    struct quantize job = {
        .simd = fp8_host_simd(),
        .source = args[FP8_QUANTIZE_source].p,
        .ld = args[FP8_QUANTIZE_source_ld].i,
        .rows = args[FP8_QUANTIZE_rows].i,
        .cols = args[FP8_QUANTIZE_cols].i,
        .dtype = semantics->source_dtype,
        .from = source_kind(semantics->source_dtype),
        .to = semantics->target_dtype == FP8_DTYPE_E4M3 ? FP8_HOST_TO_E4M3 : FP8_HOST_TO_E5M2,
        .row = args[FP8_QUANTIZE_row].p,
        .row_ld = args[FP8_QUANTIZE_row_ld].i,
        .row_rows = args[FP8_QUANTIZE_row_rows].i,
        .transposed = args[FP8_QUANTIZE_transposed].p,
        .transposed_ld = args[FP8_QUANTIZE_transposed_ld].i,
        .transposed_rows = args[FP8_QUANTIZE_transposed_rows].i,
        .dbias = args[FP8_QUANTIZE_dbias].p,
        .dbias_partials = args[FP8_QUANTIZE_dbias_partials].p,
        .dbias_ld = args[FP8_QUANTIZE_dbias_ld].i,
        .accumulate = args[FP8_QUANTIZE_accumulate].i != 0,
    };
    if (job.from < 0 ||
        (semantics->target_dtype != FP8_DTYPE_E4M3 && semantics->target_dtype != FP8_DTYPE_E5M2))
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no quantize from %s to %s",
                        fp8_dtype_name(job.dtype), fp8_dtype_name(semantics->target_dtype));
    job.scale = make_scales(semantics, args);
    int64_t height = job.rows, width = job.cols;
    if (job.row != NULL) {
        height = fp8_max_i64(height, job.row_rows);
        width = fp8_max_i64(width, job.row_ld);
    }
    if (job.transposed != NULL) {
        height = fp8_max_i64(height, job.transposed_ld);
        width = fp8_max_i64(width, job.transposed_rows);
    }
    job.tile_cols = fp8_ceil_div(width, TILE);
    fp8_pool_run(pool, fp8_ceil_div(height, TILE) * job.tile_cols, quantize_item, &job);
    if (job.dbias != NULL)
        fp8_pool_run(pool, fp8_ceil_div(job.cols, TILE), dbias_item, &job);
    return FP8_OK;
}
