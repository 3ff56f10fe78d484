/*
 * host.c - entry of the host backend, and its small op store.
 *
 * The floating-point environment is set here once for all ops: casts and scales need round to
 * nearest and subnormals, which a caller may have switched off. store exists for completeness of
 * the op table (the kernels of that name are compared with it): the host's own GEMM writes the
 * caller's tensor directly.
 */
#include "runtime/host.h"

#include <fenv.h>
#include <stddef.h>

#include "runtime/check.h"
#include "runtime/fp8_format.h"

enum { ROW_GRAIN = 65536 }; /* elements of one item */

fp8_status fp8_host_decode_table(fp8_dtype format, float values[256])
{
    if (format != FP8_DTYPE_E4M3 && format != FP8_DTYPE_E5M2)
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: %s is not an FP8 format",
                        fp8_dtype_name(format));
    for (int code = 0; code < 256; code++) {
        values[code] = format == FP8_DTYPE_E4M3 ? fp8_decode_e4m3((uint8_t)code)
                                                : fp8_decode_e5m2((uint8_t)code);
    }
    return FP8_OK;
}

/* ---- store ---- */

struct store {
    const void *source;
    const float *a_scales, *b_scales; /* of rows and columns, or NULL */
    int64_t a_step, b_step;
    const uint16_t *bias; /* bf16, or NULL */
    void *target;
    int64_t source_ld, target_ld, rows, cols, rows_per_item;
    fp8_semantics how;
};

/* The smaller of the two scales first. */
static float store_scaled(const struct store *job, int64_t i, int64_t j, float value)
{
    if (job->a_scales == NULL)
        return value;
    float a = job->a_scales[i * job->a_step], b = job->b_scales[j * job->b_step];
    return a < b ? value * a * b : value * b * a;
}

static void store_item(void *user, int64_t index)
{
    const struct store *job = user;
    fp8_dtype from = job->how.source_dtype, to = job->how.target_dtype;
    int64_t first = index * job->rows_per_item;
    int64_t last = fp8_min_i64(first + job->rows_per_item, job->rows);
    for (int64_t i = first; i < last; i++) {
        for (int64_t j = 0; j < job->cols; j++) {
            float value = fp8_host_load(fp8_host_at(job->source, from, job->source_ld, i, j), from);
            value = store_scaled(job, i, j, value);
            if (job->bias != NULL)
                value += fp8_bf16_to_float(job->bias[j]);
            void *target = fp8_host_at(job->target, to, job->target_ld, i, j);
            if (job->how.accumulate)
                value = fp8_host_load(target, to) + value;
            fp8_host_store(target, to, value);
        }
    }
}

static bool is_float(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_BF16 || dtype == FP8_DTYPE_FP16 || dtype == FP8_DTYPE_FP32;
}

static int64_t rows_of_grain(int64_t cols)
{
    return cols >= ROW_GRAIN ? 1 : ROW_GRAIN / (cols > 0 ? cols : 1);
}

static fp8_status run_store(struct fp8_pool *pool, const fp8_semantics *how, const fp8_value *args)
{
    if (!is_float(how->source_dtype) || !is_float(how->target_dtype))
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no store from %s to %s",
                        fp8_dtype_name(how->source_dtype), fp8_dtype_name(how->target_dtype));
    struct store job = {
        .source = args[FP8_STORE_source].p,
        .target = args[FP8_STORE_target].p,
        .source_ld = args[FP8_STORE_source_ld].i,
        .a_scales = args[FP8_STORE_a_scales].p,
        .a_step = args[FP8_STORE_a_scales_step].i,
        .b_scales = args[FP8_STORE_b_scales].p,
        .b_step = args[FP8_STORE_b_scales_step].i,
        .bias = args[FP8_STORE_bias].p,
        .target_ld = args[FP8_STORE_target_ld].i,
        .rows = args[FP8_STORE_rows].i,
        .cols = args[FP8_STORE_cols].i,
        .how = *how,
    };
    job.rows_per_item = rows_of_grain(job.cols);
    fp8_pool_run(pool, fp8_ceil_div(job.rows, job.rows_per_item), store_item, &job);
    return FP8_OK;
}

/* ---- sum ---- */

struct sum {
    const void *source;
    void *target;
    int64_t part_stride, source_ld, parts, target_ld, cols;
    bool average, accumulate;
    fp8_dtype from, to;
};

static void sum_item(void *user, int64_t row)
{
    const struct sum *job = user;
    const float share = job->average ? 1.0f / (float)job->parts : 1.0f;
    const int64_t element = (int64_t)fp8_dtype_bytes(job->from);
    for (int64_t j = 0; j < job->cols; j++) {
        const char *at = fp8_host_at(job->source, job->from, job->source_ld, row, j);
        void *target = fp8_host_at(job->target, job->to, job->target_ld, row, j);
        float value = fp8_host_load(at, job->from);
        for (int64_t part = 1; part < job->parts; part++)
            value += fp8_host_load(at + part * job->part_stride * element, job->from);
        value *= share;
        if (job->from == FP8_DTYPE_BF16)
            value = fp8_bf16_to_float(fp8_float_to_bf16(value));
        else if (job->from == FP8_DTYPE_FP16)
            value = fp8_fp16_to_float(fp8_float_to_fp16(value));
        fp8_host_store(target, job->to,
                       job->accumulate ? fp8_host_load(target, job->to) + value : value);
    }
}

static fp8_status run_sum(struct fp8_pool *pool, const fp8_semantics *how, const fp8_value *args)
{
    if (!is_float(how->source_dtype) || !is_float(how->target_dtype))
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no sum of %s in %s",
                        fp8_dtype_name(how->source_dtype), fp8_dtype_name(how->target_dtype));
    struct sum job = {
        .source = args[FP8_SUM_source].p,
        .target = args[FP8_SUM_target].p,
        .part_stride = args[FP8_SUM_part_stride].i,
        .source_ld = args[FP8_SUM_source_ld].i,
        .parts = args[FP8_SUM_parts].i,
        .target_ld = args[FP8_SUM_target_ld].i,
        .cols = args[FP8_SUM_cols].i,
        .average = args[FP8_SUM_average].i != 0,
        .accumulate = args[FP8_SUM_accumulate].i != 0,
        .from = how->source_dtype,
        .to = how->target_dtype,
    };
    fp8_pool_run(pool, args[FP8_SUM_rows].i, sum_item, &job);
    return FP8_OK;
}

/* ---- all ops ---- */

/* The argument `when` of an op, -1 if it has none. */
static int when_of(enum fp8_op op)
{
    switch (op) {
    case FP8_OP_AMAX:
        return FP8_AMAX_when;
    case FP8_OP_QUANTIZE:
        return FP8_QUANTIZE_when;
    case FP8_OP_FUSED:
        return FP8_FUSED_when;
    case FP8_OP_CAST:
        return FP8_CAST_when;
    case FP8_OP_QUANTIZE_ROW:
        return FP8_QUANTIZE_ROW_when;
    case FP8_OP_LINE_AMAX:
        return FP8_LINE_AMAX_when;
    case FP8_OP_LINE_SCALES:
        return FP8_LINE_SCALES_when;
    case FP8_OP_QUANTIZE_LINES:
        return FP8_QUANTIZE_LINES_when;
    case FP8_OP_QUANTIZE_BLOCK:
        return FP8_QUANTIZE_BLOCK_when;
    case FP8_OP_TRANSPOSE:
        return FP8_TRANSPOSE_when;
    default:
        return -1;
    }
}

static bool is_off(enum fp8_op op, const fp8_value *args)
{
    int when = when_of(op);
    return when >= 0 && args[when].p != NULL && *(const uint32_t *)args[when].p == 0;
}

static fp8_status run_op(struct fp8_pool *pool, enum fp8_op op, const fp8_semantics *semantics,
                         const fp8_value *args)
{
    if (is_off(op, args))
        return FP8_OK;
    switch (op) {
    case FP8_OP_AMAX:
        return fp8_host_amax(pool, semantics, args);
    case FP8_OP_QUANTIZE:
        return fp8_host_quantize(pool, semantics, args);
    case FP8_OP_FUSED:
        return fp8_host_fused(pool, semantics, args);
    case FP8_OP_CAST:
        return fp8_host_cast(pool, semantics, args);
    case FP8_OP_COLUMN_SUMS:
        return fp8_host_column_sums(pool, args);
    case FP8_OP_COLUMN_MAXIMA:
        return fp8_host_column_maxima(args);
    case FP8_OP_QUANTIZE_ROW:
        return fp8_host_quantize_row(pool, semantics, args);
    case FP8_OP_LINE_AMAX:
        return fp8_host_line_amax(pool, semantics, args);
    case FP8_OP_LINE_SCALES:
        return fp8_host_line_scales(pool, semantics, args);
    case FP8_OP_QUANTIZE_LINES:
        return fp8_host_quantize_lines(pool, semantics, args);
    case FP8_OP_QUANTIZE_BLOCK:
        return fp8_host_quantize_block(pool, semantics, args);
    case FP8_OP_TRANSPOSE:
        return fp8_host_transpose(pool, args);
    case FP8_OP_ROLL:
        return fp8_host_roll(args);
    case FP8_OP_STORE:
        return run_store(pool, semantics, args);
    case FP8_OP_SUM:
        return run_sum(pool, semantics, args);
    case FP8_OP_DEQUANTIZE:
        return fp8_host_dequantize(pool, semantics, args);
    case FP8_OP_GEMM:
        return fp8_host_gemm(pool, semantics, args);
    default:
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no op '%s'",
                        (unsigned)op < FP8_OP_COUNT ? fp8_op_names[op] : "?");
    }
}

fp8_status fp8_host_run(struct fp8_pool *pool, enum fp8_op op, const fp8_semantics *semantics,
                        const fp8_value *args)
{
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    fp8_status status = run_op(pool, op, semantics, args);
    fesetenv(&callers);
    return status;
}
