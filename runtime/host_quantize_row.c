/*
 * host_quantize_row.c - the op quantize_row: the row copy with a scale for each row.
 *
 * In: a bf16 or float32 matrix. Out: the row copy and the inverse scales; those of padding rows
 * are 0.
 */
#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE, BAND = 32 /* rows of an item */ };

struct row_job {
    struct fp8_host_source source;
    int to;
    bool power_of_two;
    uint8_t *row;
    int64_t row_ld, row_rows;
    float *row_scales;
    int64_t scale_rows; /* with padding */
    uint32_t *found_inf;
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
        .found_inf = args[FP8_QUANTIZE_ROW_found_inf].p,
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
