/*
 * host_gemm.c - the op gemm on the CPU: out = (a b^T) * scales + bias (+ out).
 *
 * In: two matrices, FP8 with the scales of their layout or bf16, contraction along their rows
 * (along the columns of a bf16 one, if it is stored transposed), any leading dim; tails are never
 * read. Out: bf16, fp16 or float32 of any alignment and leading dim, rounded once from float64.
 *
 * An item computes one block of the output. Per 128 of depth it decodes its strips of both operands
 * into float32 panels, [k][tile], and multiplies tile by tile: products of two values of FP8 or
 * bf16 are exact in float32 (bf16: within its range), up to 128 of them are added in float32, and
 * these sums, times the scales of their blocks, are added in float64. So the error does not grow
 * with the depth, the result does not depend on threads or instruction set, and an element depends
 * only on its own row of a and row of b.
 */
#include "runtime/host.h"

#include <stddef.h>
#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_format.h"
#include "runtime/host_simd.h"

/* Multiples of every variant's tile. The item's stack holds the panels and the sums: 208 KiB. */
enum { BLOCK_ROWS = 96, BLOCK_COLS = 128, BLOCK_DEPTH = FP8_HOST_PIECE };

struct operand {
    const void *data;
    int64_t ld, rows;
    fp8_dtype dtype;
    bool transposed; /* element (row, k) lies at [k][row] */
    fp8_scaling scaling;
    const float *scales;
    int64_t scales_ld;
    float values[256];
};

struct gemm {
    const struct fp8_host_simd *simd;
    struct operand a, b;
    int64_t depth;
    bool by_depth;        /* some scale changes along the depth */
    const uint16_t *bias; /* bf16, may be NULL */
    void *out;
    int64_t out_ld;
    fp8_dtype out_dtype;
    bool accumulate;
    int64_t block_cols; /* blocks in a row of blocks */
};

struct block {
    int64_t row, col, rows, cols;
    double a_factors[BLOCK_ROWS], b_factors[BLOCK_COLS];
    float a[BLOCK_ROWS * BLOCK_DEPTH];
    float b[BLOCK_COLS * BLOCK_DEPTH];
    double sums[BLOCK_ROWS * BLOCK_COLS];
};

/* ---- operands ---- */

static float element_at(const struct operand *from, int64_t row, int64_t k)
{
    const uint16_t *halves = from->data;
    return fp8_bf16_to_float(halves[from->transposed ? k * from->ld + row : row * from->ld + k]);
}

/* Rows [first, first + rows) of the operand, [k, k + depth), to panels of `tile` rows: element (i,
 * k) at panel[i / tile][k][i % tile]. Rows beyond the operand are zero; their results are not
 * used. */
static void decode_panels(const struct operand *from, int64_t first, int64_t rows, int64_t k,
                          int64_t depth, int64_t tile, float *panel)
{
    for (int64_t at = 0; at < rows; at += tile, panel += tile * depth) {
        int64_t count = fp8_min_i64(tile, rows - at);
        if (count < tile)
            memset(panel, 0, (size_t)(tile * depth) * sizeof *panel);
        if (from->dtype == FP8_DTYPE_BF16) {
            for (int64_t kk = 0; kk < depth; kk++) {
                for (int64_t i = 0; i < count; i++)
                    panel[kk * tile + i] = element_at(from, first + at + i, k + kk);
            }
            continue;
        }
        const uint8_t *codes = (const uint8_t *)from->data + (first + at) * from->ld + k;
        for (int64_t i = 0; i < count; i++, codes += from->ld) {
            for (int64_t kk = 0; kk < depth; kk++)
                panel[kk * tile + i] = from->values[codes[kk]];
        }
    }
}

static double factor_of(const struct operand *from, int64_t row, int64_t k)
{
    switch (from->scaling) {
    case FP8_SCALING_TENSOR:
        return (double)from->scales[FP8_SCALES_SCALE_INV];
    case FP8_SCALING_ROW:
        return (double)from->scales[row];
    case FP8_SCALING_BLOCK:
        return (double)from->scales[k / BLOCK_DEPTH * from->scales_ld + row];
    case FP8_SCALING_TILE:
        return (double)from->scales[row / BLOCK_DEPTH * from->scales_ld + k / BLOCK_DEPTH];
    case FP8_SCALING_NONE:
        break;
    }
    return 1.0;
}

static void get_factors(const struct operand *from, int64_t first, int64_t rows, int64_t k,
                        int64_t room, double *factors)
{
    for (int64_t i = 0; i < room; i++)
        factors[i] = i < rows ? factor_of(from, first + i, k) : 0.0;
}

/* ---- blocks ---- */

static void multiply_block(const struct gemm *job, struct block *block)
{
    int64_t tile_rows = job->simd->tile_rows, tile_cols = job->simd->tile_cols;
    memset(block->sums, 0, sizeof block->sums);
    for (int64_t k = 0; k < job->depth; k += BLOCK_DEPTH) {
        int64_t depth = fp8_min_i64(BLOCK_DEPTH, job->depth - k);
        decode_panels(&job->a, block->row, block->rows, k, depth, tile_rows, block->a);
        decode_panels(&job->b, block->col, block->cols, k, depth, tile_cols, block->b);
        if (job->by_depth || k == 0) {
            get_factors(&job->a, block->row, block->rows, k, BLOCK_ROWS, block->a_factors);
            get_factors(&job->b, block->col, block->cols, k, BLOCK_COLS, block->b_factors);
        }
        for (int64_t j = 0; j < block->cols; j += tile_cols) {
            for (int64_t i = 0; i < block->rows; i += tile_rows)
                job->simd->multiply(block->a + i * depth, block->b + j * depth, depth,
                                    job->by_depth ? block->a_factors + i : NULL,
                                    block->b_factors + j, block->sums + i * BLOCK_COLS + j,
                                    BLOCK_COLS);
        }
    }
}

/* Rounds once, with what was there if that is added to. */
static inline void put(fp8_dtype dtype, bool accumulate, void *out, int64_t at, double value)
{
    if (dtype == FP8_DTYPE_FP32) {
        float *target = (float *)out + at;
        *target = (float)(accumulate ? (double)*target + value : value);
    } else if (dtype == FP8_DTYPE_BF16) {
        uint16_t *target = (uint16_t *)out + at;
        *target =
            fp8_double_to_bf16(accumulate ? (double)fp8_bf16_to_float(*target) + value : value);
    } else {
        uint16_t *target = (uint16_t *)out + at;
        *target =
            fp8_double_to_fp16(accumulate ? (double)fp8_fp16_to_float(*target) + value : value);
    }
}

/* In float64 nothing here over- or underflows, but the order is the rule's all the same. */
static double scaled(const struct gemm *job, const struct block *block, int64_t i, int64_t j)
{
    double sum = block->sums[i * BLOCK_COLS + j];
    if (job->by_depth || job->depth == 0)
        return sum;
    double a = block->a_factors[i], b = block->b_factors[j];
    return a < b ? sum * a * b : sum * b * a;
}

static void put_block(const struct gemm *job, const struct block *block)
{
    for (int64_t i = 0; i < block->rows; i++) {
        char *out = fp8_host_at(job->out, job->out_dtype, job->out_ld, block->row + i, block->col);
        for (int64_t j = 0; j < block->cols; j++) {
            double value = scaled(job, block, i, j);
            if (job->bias != NULL)
                value += (double)fp8_bf16_to_float(job->bias[block->col + j]);
            put(job->out_dtype, job->accumulate, out, j, value);
        }
    }
}

static void gemm_item(void *user, int64_t index)
{
    const struct gemm *job = user;
    struct block block;
    block.row = index / job->block_cols * BLOCK_ROWS;
    block.col = index % job->block_cols * BLOCK_COLS;
    block.rows = fp8_min_i64(BLOCK_ROWS, job->a.rows - block.row);
    block.cols = fp8_min_i64(BLOCK_COLS, job->b.rows - block.col);
    multiply_block(job, &block);
    put_block(job, &block);
}

/* FP8 with scales and rows along the depth, or bf16 without scales. */
static fp8_status prepare(struct operand *operand, const char *name)
{
    bool bf16 = operand->dtype == FP8_DTYPE_BF16;
    if (bf16 != (operand->scaling == FP8_SCALING_NONE) || (operand->transposed && !bf16))
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no gemm with %s in %s, %s, scaling %d",
                        name, fp8_dtype_name(operand->dtype),
                        operand->transposed ? "transposed" : "by rows", (int)operand->scaling);
    return bf16 ? FP8_OK : fp8_host_decode_table(operand->dtype, operand->values);
}

static bool changes_along_depth(const struct operand *operand)
{
    return operand->scaling == FP8_SCALING_BLOCK || operand->scaling == FP8_SCALING_TILE;
}

fp8_status fp8_host_gemm(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args)
{
    struct gemm job = {
        .simd = fp8_host_simd(),
        .a = { .data = args[FP8_GEMM_a].p,
               .ld = args[FP8_GEMM_a_ld].i,
               .rows = args[FP8_GEMM_rows].i,
               .dtype = semantics->source_dtype,
               .transposed = semantics->transposed,
               .scaling = semantics->scaling,
               .scales = args[FP8_GEMM_a_scales].p,
               .scales_ld = args[FP8_GEMM_a_scales_ld].i },
        .b = { .data = args[FP8_GEMM_b].p,
               .ld = args[FP8_GEMM_b_ld].i,
               .rows = args[FP8_GEMM_cols].i,
               .dtype = semantics->second_dtype,
               .transposed = semantics->second_transposed,
               .scaling = semantics->second_scaling,
               .scales = args[FP8_GEMM_b_scales].p,
               .scales_ld = args[FP8_GEMM_b_scales_ld].i },
        .depth = args[FP8_GEMM_depth].i,
        .bias = args[FP8_GEMM_bias].p,
        .out = args[FP8_GEMM_out].p,
        .out_ld = args[FP8_GEMM_out_ld].i,
        .out_dtype = semantics->target_dtype,
        .accumulate = args[FP8_GEMM_accumulate].i != 0,
    };
    if (job.out_dtype != FP8_DTYPE_BF16 && job.out_dtype != FP8_DTYPE_FP16 &&
        job.out_dtype != FP8_DTYPE_FP32)
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no gemm with %s output",
                        fp8_dtype_name(job.out_dtype));
    FP8_TRY(prepare(&job.a, "a"));
    FP8_TRY(prepare(&job.b, "b"));
    if (job.depth == 0 && job.accumulate && job.bias == NULL)
        return FP8_OK; /* unchanged, to the sign of a zero */
    job.by_depth = changes_along_depth(&job.a) || changes_along_depth(&job.b);
    job.block_cols = fp8_ceil_div(job.b.rows, BLOCK_COLS);
    fp8_pool_run(pool, fp8_ceil_div(job.a.rows, BLOCK_ROWS) * job.block_cols, gemm_item, &job);
    return FP8_OK;
}
