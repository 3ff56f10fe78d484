/*
 * host_dequantize.c - the op dequantize on the CPU: codes times the scale of their group.
 *
 * In: either copy of an operand with the scales of its layout. Out: float32 of the matrix as the
 * caller has it. A group's scale_inv is looked up per run of elements that share it.
 */
#include "runtime/check.h"
#include "runtime/host.h"

enum { ROW_GRAIN = 65536, BLOCK = 128 };

struct dequantize {
    const uint8_t *source;
    float *target;
    const float *scales;
    int64_t source_ld, scales_ld, target_ld, rows, cols, rows_per_item;
    fp8_scaling scaling;
    bool transposed;
    float values[256];
};

/* scale_inv of the copy's element (row, k). */
static float scale_at(const struct dequantize *job, int64_t row, int64_t k)
{
    switch (job->scaling) {
    case FP8_SCALING_ROW:
        return job->scales[row];
    case FP8_SCALING_BLOCK:
        return job->scales[k / BLOCK * job->scales_ld + row];
    case FP8_SCALING_TILE:
        return job->scales[row / BLOCK * job->scales_ld + k / BLOCK];
    default:
        return job->scales[FP8_SCALES_SCALE_INV];
    }
}

static void dequantize_item(void *user, int64_t index)
{
    const struct dequantize *job = user;
    int64_t first = index * job->rows_per_item;
    int64_t last = fp8_min_i64(first + job->rows_per_item, job->rows);
    for (int64_t i = first; i < last; i++) {
        float *target = job->target + i * job->target_ld;
        for (int64_t j = 0; j < job->cols; j++) {
            int64_t row = job->transposed ? j : i, k = job->transposed ? i : j;
            target[j] = job->values[job->source[row * job->source_ld + k]] * scale_at(job, row, k);
        }
    }
}

fp8_status fp8_host_dequantize(struct fp8_pool *pool, const fp8_semantics *semantics,
                               const fp8_value *args)
{
    if (semantics->target_dtype != FP8_DTYPE_FP32)
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no dequantize to %s",
                        fp8_dtype_name(semantics->target_dtype));
    struct dequantize job = {
        .source = args[FP8_DEQUANTIZE_source].p,
        .target = args[FP8_DEQUANTIZE_target].p,
        .scales = args[FP8_DEQUANTIZE_scales].p,
        .source_ld = args[FP8_DEQUANTIZE_source_ld].i,
        .scales_ld = args[FP8_DEQUANTIZE_scales_ld].i,
        .target_ld = args[FP8_DEQUANTIZE_target_ld].i,
        .rows = args[FP8_DEQUANTIZE_rows].i,
        .cols = args[FP8_DEQUANTIZE_cols].i,
        .scaling = semantics->scaling,
        .transposed = args[FP8_DEQUANTIZE_is_transposed].i != 0,
    };
    FP8_TRY(fp8_host_decode_table(semantics->source_dtype, job.values));
    if (job.rows == 0 || job.cols == 0)
        return FP8_OK;
    job.rows_per_item = job.cols >= ROW_GRAIN ? 1 : ROW_GRAIN / job.cols;
    fp8_pool_run(pool, fp8_ceil_div(job.rows, job.rows_per_item), dequantize_item, &job);
    return FP8_OK;
}
