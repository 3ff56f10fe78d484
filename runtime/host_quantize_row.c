/*
 * host_quantize_row.c - the ops quantize_row and quantize_column: a scale for each row of a copy.
 *
 * In: a bf16 or float32 matrix. quantize_row gives every row its own scale and leaves the finite
 * amax of every column in bands of 32 rows; quantize_column makes the transposed copy from these, a
 * scale for each of its rows. Scales of padding rows are 0.
 */
#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE, BAND = FP8_BAND_ROWS };

/* ---- quantize_row ---- */

struct row_job {
    struct fp8_host_source source;
    int to;
    bool power_of_two;
    uint8_t *row;
    int64_t row_ld, row_rows;
    float *row_scales;
    int64_t scale_rows; /* with padding */
    uint32_t *column_partials;
    int64_t column_partials_ld;
    uint32_t *found_inf;
    float *dbias_partials;
    int64_t dbias_ld;
};

static void quantize_a_row(const struct row_job *job, int64_t row, float scale)
{
    const struct fp8_host_source *source = &job->source;
    uint8_t *codes = job->row + row * job->row_ld;
    union fp8_host_piece room;
    float scales[TILE];
    for (int j = 0; j < TILE; j++)
        scales[j] = scale;
    int64_t left = 0;
    for (; left < source->cols; left += TILE) {
        uint8_t piece[TILE];
        source->simd->encode[source->from][job->to](fp8_host_piece(source, row, left, &room),
                                                    scales, piece);
        memcpy(codes + left, piece, (size_t)fp8_min_i64(TILE, job->row_ld - left));
    }
    if (left < job->row_ld)
        memset(codes + left, 0, (size_t)(job->row_ld - left));
}

/* Amaxes and sums of the band's columns. */
static void measure_columns(const struct row_job *job, int64_t band, int64_t first, int64_t end)
{
    const struct fp8_host_source *source = &job->source;
    union fp8_host_piece room;
    for (int64_t left = 0; left < source->cols; left += TILE) {
        if (job->dbias_partials != NULL)
            fp8_host_tile_sums(source, left, first, end,
                               job->dbias_partials + band * job->dbias_ld);
        if (job->column_partials == NULL)
            continue;
        uint32_t largest[TILE] = { 0 }, bad = 0;
        for (int64_t i = first; i < end; i++)
            source->simd->column_amax[source->from](fp8_host_piece(source, i, left, &room), largest,
                                                    &bad);
        memcpy(job->column_partials + band * job->column_partials_ld + left, largest,
               (size_t)fp8_min_i64(TILE, source->cols - left) * sizeof *largest);
    }
}

static void row_item(void *user, int64_t band)
{
    const struct row_job *job = user;
    int64_t first = band * BAND, end = fp8_min_i64(first + BAND, job->source.rows);
    uint32_t bad = 0;
    for (int64_t i = first; i < end; i++) {
        float amax = fp8_float_of_bits(fp8_host_amax_of_row(&job->source, i, &bad));
        float scale = fp8_scale_of_amax(amax, fp8_host_maximum(job->to), job->power_of_two);
        if (job->row_scales != NULL)
            job->row_scales[i] = fp8_scale_inverse(scale);
        if (job->row != NULL)
            quantize_a_row(job, i, scale);
    }
    for (int64_t i = fp8_max_i64(end, first); i < first + BAND; i++) {
        if (job->row_scales != NULL && i < job->scale_rows)
            job->row_scales[i] = 0.0f;
        if (job->row != NULL && i < job->row_rows)
            memset(job->row + i * job->row_ld, 0, (size_t)job->row_ld);
    }
    fp8_host_report_bad(job->found_inf, bad);
    if (end > first)
        measure_columns(job, band, first, end);
}

fp8_status fp8_host_quantize_row(struct fp8_pool *pool, const fp8_semantics *semantics,
                                 const fp8_value *args)
{
    struct row_job job = {
        .power_of_two = semantics->power_of_two,
        .row = args[FP8_QUANTIZE_ROW_row].p,
        .row_ld = args[FP8_QUANTIZE_ROW_row_ld].i,
        .row_rows = args[FP8_QUANTIZE_ROW_row_rows].i,
        .row_scales = args[FP8_QUANTIZE_ROW_row_scales].p,
        .column_partials = args[FP8_QUANTIZE_ROW_column_partials].p,
        .column_partials_ld = args[FP8_QUANTIZE_ROW_column_partials_ld].i,
        .found_inf = args[FP8_QUANTIZE_ROW_found_inf].p,
        .dbias_partials = args[FP8_QUANTIZE_ROW_dbias_partials].p,
        .dbias_ld = args[FP8_QUANTIZE_ROW_dbias_ld].i,
    };
    FP8_TRY(fp8_host_source_init(&job.source, "quantize_row", semantics->source_dtype,
                                 args + FP8_QUANTIZE_ROW_source));
    FP8_TRY(fp8_host_format("quantize_row", semantics->target_dtype, &job.to));
    job.scale_rows = fp8_round_up(job.source.rows, FP8_PAD_ROW_SCALES);
    int64_t rows = job.scale_rows;
    if (job.row != NULL)
        rows = fp8_max_i64(rows, job.row_rows);
    fp8_pool_run(pool, fp8_ceil_div(rows, BAND), row_item, &job);
    return FP8_OK;
}

/* ---- quantize_column ---- */

enum { GROUP = 16 }; /* tiles, one below another, that share the work of making scales */

struct column_job {
    struct fp8_host_source source;
    struct fp8_host_copies copies;
    bool power_of_two;
    const uint32_t *partials;
    int64_t partials_ld;
    float *scales_inv;
    int64_t tile_rows; /* tiles in a column of tiles */
};

/* Of columns [left, left + 128); 1 beyond the matrix, where only zeros are cast. */
static void make_column_scales(const struct column_job *job, int64_t left, float scales[TILE])
{
    int64_t cols = fp8_min_i64(TILE, job->source.cols - left);
    int64_t bands = fp8_ceil_div(job->source.rows, BAND);
    uint32_t largest[TILE] = { 0 };
    for (int64_t band = 0; band < bands; band++) {
        const uint32_t *partials = job->partials + band * job->partials_ld + left;
        for (int64_t j = 0; j < cols; j++)
            largest[j] = partials[j] > largest[j] ? partials[j] : largest[j];
    }
    for (int64_t j = 0; j < TILE; j++)
        scales[j] = j < cols
                        ? fp8_scale_of_amax(fp8_float_of_bits(largest[j]),
                                            fp8_host_maximum(job->copies.to), job->power_of_two)
                        : 1.0f;
}

static void put_column_scales(const struct column_job *job, int64_t left, const float *scales)
{
    int64_t end = fp8_round_up(job->source.cols, FP8_PAD_ROW_SCALES);
    for (int64_t j = left; j < fp8_min_i64(left + TILE, end); j++)
        job->scales_inv[j] = j < job->source.cols ? fp8_scale_inverse(scales[j - left]) : 0.0f;
}

static void column_item(void *user, int64_t index)
{
    const struct column_job *job = user;
    struct fp8_host_tile tile;
    float scales[TILE];
    int64_t strip = index % job->copies.tile_cols, group = index / job->copies.tile_cols;
    make_column_scales(job, strip * TILE, scales);
    if (group == 0 && job->scales_inv != NULL)
        put_column_scales(job, strip * TILE, scales);
    int64_t last = fp8_min_i64(group * GROUP + GROUP, job->tile_rows);
    for (int64_t row = group * GROUP; row < last; row++) {
        fp8_host_tile_place(&job->copies, job->source.rows, job->source.cols,
                            row * job->copies.tile_cols + strip, &tile);
        fp8_host_tile_encode_cols(&job->source, job->copies.to, scales, &tile);
        fp8_host_tile_put_transposed(&job->copies, &tile);
    }
}

fp8_status fp8_host_quantize_column(struct fp8_pool *pool, const fp8_semantics *semantics,
                                    const fp8_value *args)
{
    struct column_job job = {
        .copies = { .transposed = args[FP8_QUANTIZE_COLUMN_transposed].p,
                    .transposed_ld = args[FP8_QUANTIZE_COLUMN_transposed_ld].i,
                    .transposed_rows = args[FP8_QUANTIZE_COLUMN_transposed_rows].i },
        .power_of_two = semantics->power_of_two,
        .partials = args[FP8_QUANTIZE_COLUMN_column_partials].p,
        .partials_ld = args[FP8_QUANTIZE_COLUMN_column_partials_ld].i,
        .scales_inv = args[FP8_QUANTIZE_COLUMN_transposed_scales].p,
    };
    FP8_TRY(fp8_host_source_init(&job.source, "quantize_column", semantics->source_dtype,
                                 args + FP8_QUANTIZE_COLUMN_source));
    FP8_TRY(fp8_host_format("quantize_column", semantics->target_dtype, &job.copies.to));
    int64_t tiles = fp8_host_tile_count(&job.copies, job.source.rows, job.source.cols);
    if (tiles == 0)
        return FP8_OK;
    job.tile_rows = tiles / job.copies.tile_cols;
    fp8_pool_run(pool, fp8_ceil_div(job.tile_rows, GROUP) * job.copies.tile_cols, column_item,
                 &job);
    return FP8_OK;
}
