/*
 * host_lines.c - the ops line_amax, line_scales and quantize_lines: a scale for every row of the
 * row copy and one for every column of the source, a row of the transposed copy.
 *
 * In: a bf16 or float32 matrix. line_amax leaves the amax of every row within each 128 columns,
 * that of every column within each 128 rows, and column sums; line_scales makes one amax of each
 * line and its inverse scale, and dbias; quantize_lines casts both copies. Scales of padding are 0.
 */
#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE };
_Static_assert((int)TILE == FP8_LINE_ELEMENTS && (int)TILE == FP8_DBIAS_ROWS, "one partial a tile");

/* ---- line_amax ---- */

struct amax_job {
    struct fp8_host_source source;
    struct fp8_host_copies copies; /* neither is wanted: for the order of tiles */
    uint32_t *row_partials, *column_partials;
    int64_t row_ld, column_ld;
    uint32_t *found_inf;
    float *dbias_partials;
    int64_t dbias_ld;
};

static void amax_item(void *user, int64_t index)
{
    const struct amax_job *job = user;
    const struct fp8_host_source *source = &job->source;
    struct fp8_host_tile tile;
    union fp8_host_piece room;
    uint32_t largest[TILE] = { 0 }, bad = 0;
    fp8_host_tile_place(&job->copies, source->rows, source->cols, index, &tile);
    int64_t down = tile.top / TILE, along = tile.left / TILE;
    for (int64_t i = 0; i < tile.rows; i++) {
        const void *piece = fp8_host_piece(source, tile.top + i, tile.left, &room);
        uint32_t row = source->simd->amax[source->from](piece, 1, &bad);
        source->simd->column_amax[source->from](piece, largest, &bad);
        if (job->row_partials != NULL)
            job->row_partials[along * job->row_ld + tile.top + i] = row;
    }
    if (job->column_partials != NULL)
        memcpy(job->column_partials + down * job->column_ld + tile.left, largest,
               (size_t)tile.cols * sizeof *largest);
    if (job->dbias_partials != NULL)
        fp8_host_tile_sums(source, tile.left, tile.top, tile.top + tile.rows,
                           job->dbias_partials + down * job->dbias_ld);
    fp8_host_report_bad(job->found_inf, bad);
}

fp8_status fp8_host_line_amax(struct fp8_pool *pool, const fp8_semantics *semantics,
                              const fp8_value *args)
{
    struct amax_job job = {
        .row_partials = args[FP8_LINE_AMAX_row_partials].p,
        .column_partials = args[FP8_LINE_AMAX_column_partials].p,
        .row_ld = args[FP8_LINE_AMAX_row_partials_ld].i,
        .column_ld = args[FP8_LINE_AMAX_column_partials_ld].i,
        .found_inf = args[FP8_LINE_AMAX_found_inf].p,
        .dbias_partials = args[FP8_LINE_AMAX_dbias_partials].p,
        .dbias_ld = args[FP8_LINE_AMAX_dbias_ld].i,
    };
    FP8_TRY(fp8_host_source_init(&job.source, "line_amax", semantics->source_dtype,
                                 args + FP8_LINE_AMAX_source));
    job.copies.tile_cols = fp8_ceil_div(job.source.cols, TILE);
    fp8_pool_run(pool, fp8_ceil_div(job.source.rows, TILE) * job.copies.tile_cols, amax_item, &job);
    return FP8_OK;
}

/* ---- line_scales ---- */

struct scales_job {
    const uint32_t *partials;
    int64_t ld, count, each; /* lines, partials of a line */
    uint32_t *maxima;
    float *scales;
    float maximum;
    bool power_of_two;
};

static void scales_item(void *user, int64_t index)
{
    const struct scales_job *job = user;
    int64_t first = index * TILE, end = fp8_min_i64(first + TILE, job->count);
    for (int64_t i = first; i < end; i++) {
        uint32_t largest = 0;
        for (int64_t k = 0; k < job->each; k++) {
            uint32_t part = job->partials[k * job->ld + i];
            largest = part > largest ? part : largest;
        }
        if (job->maxima != NULL)
            job->maxima[i] = largest;
        if (job->scales != NULL)
            job->scales[i] = fp8_scale_inverse(
                fp8_scale_of_amax(fp8_float_of_bits(largest), job->maximum, job->power_of_two));
    }
    int64_t padded = fp8_round_up(job->count, FP8_PAD_ROW_SCALES);
    for (int64_t i = end; job->scales != NULL && end == job->count && i < padded; i++)
        job->scales[i] = 0.0f;
}

static void make_scales(struct fp8_pool *pool, struct scales_job job)
{
    job.each = fp8_ceil_div(job.each, TILE);
    if (job.partials != NULL)
        fp8_pool_run(pool, fp8_ceil_div(job.count, TILE), scales_item, &job);
}

fp8_status fp8_host_line_scales(struct fp8_pool *pool, const fp8_semantics *semantics,
                                const fp8_value *args)
{
    int to;
    FP8_TRY(fp8_host_format("line_scales", semantics->target_dtype, &to));
    int64_t rows = args[FP8_LINE_SCALES_rows].i, cols = args[FP8_LINE_SCALES_cols].i;
    make_scales(pool, (struct scales_job){
                          .partials = args[FP8_LINE_SCALES_row_partials].p,
                          .ld = args[FP8_LINE_SCALES_row_partials_ld].i,
                          .count = rows,
                          .each = cols,
                          .maxima = args[FP8_LINE_SCALES_row_maxima].p,
                          .scales = args[FP8_LINE_SCALES_row_scales].p,
                          .maximum = fp8_host_maximum(to),
                          .power_of_two = semantics->power_of_two,
                      });
    make_scales(pool, (struct scales_job){
                          .partials = args[FP8_LINE_SCALES_column_partials].p,
                          .ld = args[FP8_LINE_SCALES_column_partials_ld].i,
                          .count = cols,
                          .each = rows,
                          .maxima = args[FP8_LINE_SCALES_column_maxima].p,
                          .scales = args[FP8_LINE_SCALES_transposed_scales].p,
                          .maximum = fp8_host_maximum(to),
                          .power_of_two = semantics->power_of_two,
                      });
    const fp8_value sums[FP8_COLUMN_SUMS_ARG_COUNT] = {
        [FP8_COLUMN_SUMS_partials] = args[FP8_LINE_SCALES_dbias_partials],
        [FP8_COLUMN_SUMS_partials_ld] = args[FP8_LINE_SCALES_dbias_ld],
        [FP8_COLUMN_SUMS_partial_rows].i = fp8_ceil_div(rows, FP8_DBIAS_ROWS),
        [FP8_COLUMN_SUMS_cols].i = cols,
        [FP8_COLUMN_SUMS_dbias] = args[FP8_LINE_SCALES_dbias],
        [FP8_COLUMN_SUMS_accumulate] = args[FP8_LINE_SCALES_accumulate],
    };
    return fp8_host_column_sums(pool, sums);
}

/* ---- quantize_lines ---- */

struct lines_job {
    struct fp8_host_source source;
    struct fp8_host_copies copies;
    bool power_of_two;
    const uint32_t *row_maxima, *column_maxima;
};

/* Scales of the lines [first, first + count) of a tile; 1 beyond, where only zeros are cast. */
static void scales_of(const struct lines_job *job, const uint32_t *maxima, int64_t first,
                      int64_t count, float scales[TILE])
{
    for (int64_t i = 0; i < TILE; i++)
        scales[i] = i < count
                        ? fp8_scale_of_amax(fp8_float_of_bits(maxima[first + i]),
                                            fp8_host_maximum(job->copies.to), job->power_of_two)
                        : 1.0f;
}

static void lines_item(void *user, int64_t index)
{
    const struct lines_job *job = user;
    struct fp8_host_tile tile;
    float scales[TILE];
    fp8_host_tile_place(&job->copies, job->source.rows, job->source.cols, index, &tile);
    if (job->copies.row != NULL) {
        scales_of(job, job->row_maxima, tile.top, tile.rows, scales);
        fp8_host_tile_encode_rows(&job->source, job->copies.to, scales, &tile);
        fp8_host_tile_put_row(&job->copies, &tile);
    }
    if (job->copies.transposed != NULL) {
        scales_of(job, job->column_maxima, tile.left, tile.cols, scales);
        fp8_host_tile_encode_cols(&job->source, job->copies.to, scales, &tile);
        fp8_host_tile_put_transposed(&job->copies, &tile);
    }
}

fp8_status fp8_host_quantize_lines(struct fp8_pool *pool, const fp8_semantics *semantics,
                                   const fp8_value *args)
{
    struct lines_job job = {
        .copies = { .row = args[FP8_QUANTIZE_LINES_row].p,
                    .row_ld = args[FP8_QUANTIZE_LINES_row_ld].i,
                    .row_rows = args[FP8_QUANTIZE_LINES_row_rows].i,
                    .transposed = args[FP8_QUANTIZE_LINES_transposed].p,
                    .transposed_ld = args[FP8_QUANTIZE_LINES_transposed_ld].i,
                    .transposed_rows = args[FP8_QUANTIZE_LINES_transposed_rows].i },
        .power_of_two = semantics->power_of_two,
        .row_maxima = args[FP8_QUANTIZE_LINES_row_maxima].p,
        .column_maxima = args[FP8_QUANTIZE_LINES_column_maxima].p,
    };
    FP8_TRY(fp8_host_source_init(&job.source, "quantize_lines", semantics->source_dtype,
                                 args + FP8_QUANTIZE_LINES_source));
    FP8_TRY(fp8_host_format("quantize_lines", semantics->target_dtype, &job.copies.to));
    fp8_pool_run(pool, fp8_host_tile_count(&job.copies, job.source.rows, job.source.cols),
                 lines_item, &job);
    return FP8_OK;
}
