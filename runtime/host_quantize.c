/*
 * host_quantize.c - the ops with one scale for a tensor: quantize, fused, cast, transpose.
 *
 * In: a bf16 or float32 matrix and its amax (or its scale); for transpose, FP8 bytes. Out: FP8
 * copies with their padding, scales, column sums. fused is amax and then quantize, cast measures
 * the tensor beside the cast: one launch on a GPU, the same bits here.
 */
#include <float.h>
#include <math.h>

#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE };

/* ---- one scale for all tiles ---- */

struct cast_job {
    struct fp8_host_source source;
    struct fp8_host_copies copies;
    float scale;
};

static void cast_item(void *user, int64_t index)
{
    const struct cast_job *job = user;
    struct fp8_host_tile tile;
    float scales[TILE];
    for (int i = 0; i < TILE; i++)
        scales[i] = job->scale;
    fp8_host_tile_place(&job->copies, job->source.rows, job->source.cols, index, &tile);
    fp8_host_tile_encode_cols(&job->source, job->copies.to, scales, &tile);
    fp8_host_tile_put_row(&job->copies, &tile);
    fp8_host_tile_put_transposed(&job->copies, &tile);
}

static void cast_all(struct fp8_pool *pool, struct cast_job *job)
{
    if (job->copies.row == NULL && job->copies.transposed == NULL)
        return;
    int64_t tiles = fp8_host_tile_count(&job->copies, job->source.rows, job->source.cols);
    fp8_pool_run(pool, tiles, cast_item, job);
}

static void put_scales(float *scales, float scale, float amax)
{
    memset(scales, 0, FP8_SCALES_COUNT * sizeof *scales);
    scales[FP8_SCALES_SCALE] = scale;
    scales[FP8_SCALES_SCALE_INV] = fp8_scale_inverse(scale);
    scales[FP8_SCALES_AMAX] = amax;
}

static float largest_of(const uint32_t *partials, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = partials[i] > largest ? partials[i] : largest;
    return fp8_float_of_bits(largest);
}

/* ---- quantize ---- */

fp8_status fp8_host_quantize(struct fp8_pool *pool, const fp8_semantics *semantics,
                             const fp8_value *args)
{
    struct cast_job job = { .copies = {
                                .row = args[FP8_QUANTIZE_row].p,
                                .row_ld = args[FP8_QUANTIZE_row_ld].i,
                                .row_rows = args[FP8_QUANTIZE_row_rows].i,
                                .transposed = args[FP8_QUANTIZE_transposed].p,
                                .transposed_ld = args[FP8_QUANTIZE_transposed_ld].i,
                                .transposed_rows = args[FP8_QUANTIZE_transposed_rows].i,
                            } };
    FP8_TRY(fp8_host_source_init(&job.source, "quantize", semantics->source_dtype,
                                 args + FP8_QUANTIZE_source));
    FP8_TRY(fp8_host_format("quantize", semantics->target_dtype, &job.copies.to));
    float amax = largest_of(args[FP8_QUANTIZE_partials].p, args[FP8_QUANTIZE_n_partials].i);
    job.scale = fp8_scale_of_amax(amax, fp8_host_maximum(job.copies.to), semantics->power_of_two);
    put_scales(args[FP8_QUANTIZE_scales].p, job.scale, amax);
    cast_all(pool, &job);
    const fp8_value sums[FP8_COLUMN_SUMS_ARG_COUNT] = {
        [FP8_COLUMN_SUMS_partials] = args[FP8_QUANTIZE_dbias_partials],
        [FP8_COLUMN_SUMS_partials_ld] = args[FP8_QUANTIZE_dbias_ld],
        [FP8_COLUMN_SUMS_partial_rows].i = fp8_ceil_div(job.source.rows, TILE),
        [FP8_COLUMN_SUMS_cols] = args[FP8_QUANTIZE_cols],
        [FP8_COLUMN_SUMS_dbias] = args[FP8_QUANTIZE_dbias],
        [FP8_COLUMN_SUMS_accumulate] = args[FP8_QUANTIZE_accumulate],
    };
    return fp8_host_column_sums(pool, sums);
}

fp8_status fp8_host_fused(struct fp8_pool *pool, const fp8_semantics *semantics,
                          const fp8_value *args)
{
    const fp8_value amax[FP8_AMAX_ARG_COUNT] = {
        [FP8_AMAX_source] = args[FP8_FUSED_source],
        [FP8_AMAX_source_ld] = args[FP8_FUSED_source_ld],
        [FP8_AMAX_rows] = args[FP8_FUSED_rows],
        [FP8_AMAX_cols] = args[FP8_FUSED_cols],
        [FP8_AMAX_partials] = args[FP8_FUSED_partials],
        [FP8_AMAX_n_partials] = args[FP8_FUSED_n_partials],
        [FP8_AMAX_found_inf] = args[FP8_FUSED_found_inf],
        [FP8_AMAX_dbias_partials] = args[FP8_FUSED_dbias_partials],
        [FP8_AMAX_dbias_ld] = args[FP8_FUSED_dbias_ld],
    };
    const fp8_value quantize[FP8_QUANTIZE_ARG_COUNT] = {
        [FP8_QUANTIZE_source] = args[FP8_FUSED_source],
        [FP8_QUANTIZE_source_ld] = args[FP8_FUSED_source_ld],
        [FP8_QUANTIZE_rows] = args[FP8_FUSED_rows],
        [FP8_QUANTIZE_cols] = args[FP8_FUSED_cols],
        [FP8_QUANTIZE_partials] = args[FP8_FUSED_partials],
        [FP8_QUANTIZE_n_partials] = args[FP8_FUSED_n_partials],
        [FP8_QUANTIZE_scales] = args[FP8_FUSED_scales],
        [FP8_QUANTIZE_row] = args[FP8_FUSED_row],
        [FP8_QUANTIZE_row_ld] = args[FP8_FUSED_row_ld],
        [FP8_QUANTIZE_row_rows] = args[FP8_FUSED_row_rows],
        [FP8_QUANTIZE_transposed] = args[FP8_FUSED_transposed],
        [FP8_QUANTIZE_transposed_ld] = args[FP8_FUSED_transposed_ld],
        [FP8_QUANTIZE_transposed_rows] = args[FP8_FUSED_transposed_rows],
        [FP8_QUANTIZE_dbias] = args[FP8_FUSED_dbias],
        [FP8_QUANTIZE_dbias_partials] = args[FP8_FUSED_dbias_partials],
        [FP8_QUANTIZE_dbias_ld] = args[FP8_FUSED_dbias_ld],
        [FP8_QUANTIZE_accumulate] = args[FP8_FUSED_accumulate],
    };
    FP8_TRY(fp8_host_amax(pool, semantics, amax));
    return fp8_host_quantize(pool, semantics, quantize);
}

/* ---- cast ---- */

enum { CAST_PARTIALS = 256 };

/* What the kernel finds while it casts: amax into the running maximum, found_inf, column sums. */
static fp8_status measure(struct fp8_pool *pool, const fp8_semantics *semantics,
                          const fp8_value *args)
{
    uint32_t partials[CAST_PARTIALS];
    const fp8_value amax[FP8_AMAX_ARG_COUNT] = {
        [FP8_AMAX_source] = args[FP8_CAST_source],
        [FP8_AMAX_source_ld] = args[FP8_CAST_source_ld],
        [FP8_AMAX_rows] = args[FP8_CAST_rows],
        [FP8_AMAX_cols] = args[FP8_CAST_cols],
        [FP8_AMAX_partials].p = partials,
        [FP8_AMAX_n_partials].i = CAST_PARTIALS,
        [FP8_AMAX_found_inf] = args[FP8_CAST_found_inf],
        [FP8_AMAX_dbias_partials] = args[FP8_CAST_dbias_partials],
        [FP8_AMAX_dbias_ld] = args[FP8_CAST_dbias_ld],
    };
    FP8_TRY(fp8_host_amax(pool, semantics, amax));
    float *running = args[FP8_CAST_amax].p;
    if (running != NULL) {
        float largest = largest_of(partials, CAST_PARTIALS);
        *running = *running > largest ? *running : largest;
    }
    return FP8_OK;
}

/* An amax from elsewhere may be anything: inf counts as FLT_MAX, NaN and negative as 0. */
static float usable_amax(float amax)
{
    if (!(amax > 0.0f))
        return 0.0f;
    return amax < FLT_MAX ? amax : FLT_MAX;
}

fp8_status fp8_host_cast(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args)
{
    struct cast_job job = { .copies = {
                                .row = args[FP8_CAST_row].p,
                                .row_ld = args[FP8_CAST_row_ld].i,
                                .row_rows = args[FP8_CAST_row_rows].i,
                                .transposed = args[FP8_CAST_transposed].p,
                                .transposed_ld = args[FP8_CAST_transposed_ld].i,
                                .transposed_rows = args[FP8_CAST_transposed_rows].i,
                            } };
    FP8_TRY(
        fp8_host_source_init(&job.source, "cast", semantics->source_dtype, args + FP8_CAST_source));
    FP8_TRY(fp8_host_format("cast", semantics->target_dtype, &job.copies.to));
    float known = *(const float *)args[FP8_CAST_known].p;
    bool is_amax = args[FP8_CAST_known_is_amax].i != 0;
    const uint32_t *fresh = args[FP8_CAST_fresh].p;
    if (fresh != NULL && *fresh != 0) {
        known = largest_of(args[FP8_CAST_partials].p, args[FP8_CAST_n_partials].i);
        is_amax = true;
    }
    if (is_amax)
        known = usable_amax(known);
    float maximum = ldexpf(fp8_host_maximum(job.copies.to), -semantics->margin);
    job.scale = is_amax ? fp8_scale_of_amax(known, maximum, semantics->power_of_two) : known;
    if (args[FP8_CAST_amax].p != NULL || args[FP8_CAST_found_inf].p != NULL ||
        args[FP8_CAST_dbias_partials].p != NULL)
        FP8_TRY(measure(pool, semantics, args));
    put_scales(args[FP8_CAST_scales].p, job.scale, is_amax ? known : 0.0f);
    float *rows = args[FP8_CAST_row_scales].p;
    for (int64_t i = 0; rows && i < fp8_round_up(job.source.rows, FP8_PAD_ROW_SCALES); i++)
        rows[i] = i < job.source.rows ? fp8_scale_inverse(job.scale) : 0.0f;
    cast_all(pool, &job);
    return FP8_OK;
}

/* ---- transpose ---- */

struct turn {
    const uint8_t *source;
    int64_t ld, rows, cols;
    struct fp8_host_copies copies;
};

static void turn_item(void *user, int64_t index)
{
    const struct turn *job = user;
    struct fp8_host_tile tile;
    fp8_host_tile_place(&job->copies, job->rows, job->cols, index, &tile);
    memset(tile.codes, 0, sizeof tile.codes);
    for (int64_t i = 0; i < tile.rows; i++)
        memcpy(tile.codes[i], job->source + (tile.top + i) * job->ld + tile.left,
               (size_t)tile.cols);
    fp8_host_tile_put_transposed(&job->copies, &tile);
}

/* The grid of 128x128 scales belongs to the other copy just as well, turned. from_ld 0: a scale for
 * each row. */
static void turn_scales(const struct turn *job, const fp8_value *args)
{
    const float *from = args[FP8_TRANSPOSE_scales].p;
    float *to = args[FP8_TRANSPOSE_transposed_scales].p;
    int64_t from_ld = args[FP8_TRANSPOSE_scales_ld].i;
    int64_t to_ld = args[FP8_TRANSPOSE_transposed_scales_ld].i;
    int64_t down = fp8_ceil_div(job->rows, TILE), along = fp8_ceil_div(job->cols, TILE);
    for (int64_t j = 0; j < along; j++) {
        for (int64_t i = 0; i < to_ld; i++)
            to[j * to_ld + i] = i >= down ? 0.0f : from[from_ld ? i * from_ld + j : i * TILE];
    }
}

fp8_status fp8_host_transpose(struct fp8_pool *pool, const fp8_value *args)
{
    struct turn job = {
        .source = args[FP8_TRANSPOSE_source].p,
        .ld = args[FP8_TRANSPOSE_source_ld].i,
        .rows = args[FP8_TRANSPOSE_rows].i,
        .cols = args[FP8_TRANSPOSE_cols].i,
        .copies = { .transposed = args[FP8_TRANSPOSE_transposed].p,
                    .transposed_ld = args[FP8_TRANSPOSE_transposed_ld].i,
                    .transposed_rows = args[FP8_TRANSPOSE_transposed_rows].i },
    };
    if (job.source != NULL)
        fp8_pool_run(pool, fp8_host_tile_count(&job.copies, job.rows, job.cols), turn_item, &job);
    if (args[FP8_TRANSPOSE_transposed_scales].p != NULL)
        turn_scales(&job, args);
    return FP8_OK;
}
