/*
 * host_gemm.c - the op gemm on the CPU: out = (a b^T) * scales + bias (+ out).
 *
 * In: two FP8 matrices, contraction along their rows, any leading dim; tails are never read. Out:
 * bf16, fp16 or float32 of any alignment and leading dim, rounded once from float64.
 *
 * An item computes one block of the output. Per 128 of depth it decodes its strips of both operands
 * into float32 panels, [k][tile], and multiplies tile by tile: products of two FP8 values are exact
 * in float32, up to 128 of them are added in float32, and these sums are added in float64. So the
 * error does not grow with the depth, the result does not depend on threads or instruction set, and
 * an element depends only on its own row of a and row of b.
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
    const uint8_t *data;
    int64_t ld, rows;
    float values[256];
};

struct gemm {
    const struct fp8_host_simd *simd;
    struct operand a, b;
    int64_t depth;
    double smaller, larger; /* the two scale_inv */
    const uint16_t *bias;   /* bf16, may be NULL */
    void *out;
    int64_t out_ld;
    fp8_dtype out_dtype;
    bool accumulate;
    int64_t block_cols; /* blocks in a row of blocks */
};

struct block {
    int64_t row, col, rows, cols;
    float a[BLOCK_ROWS * BLOCK_DEPTH];
    float b[BLOCK_COLS * BLOCK_DEPTH];
    double sums[BLOCK_ROWS * BLOCK_COLS];
};

/* Rows [first, first + rows) of the operand, [k, k + depth), to panels of `tile` rows: element (i,
 * k) at panel[i / tile][k][i % tile]. Rows beyond the operand are zero; their results are not
 * used. */
static void decode_panels(const struct operand *from, int64_t first, int64_t rows, int64_t k,
                          int64_t depth, int64_t tile, float *panel)
{
    for (int64_t at = 0; at < rows; at += tile, panel += tile * depth) {
        int64_t count = fp8_min_i64(tile, rows - at);
        const uint8_t *codes = from->data + (first + at) * from->ld + k;
        if (count < tile)
            memset(panel, 0, (size_t)(tile * depth) * sizeof *panel);
        for (int64_t i = 0; i < count; i++, codes += from->ld) {
            for (int64_t kk = 0; kk < depth; kk++)
                panel[kk * tile + i] = from->values[codes[kk]];
        }
    }
}

static void multiply_block(const struct gemm *job, struct block *block)
{
    int64_t tile_rows = job->simd->tile_rows, tile_cols = job->simd->tile_cols;
    memset(block->sums, 0, sizeof block->sums);
    for (int64_t k = 0; k < job->depth; k += BLOCK_DEPTH) {
        int64_t depth = fp8_min_i64(BLOCK_DEPTH, job->depth - k);
        decode_panels(&job->a, block->row, block->rows, k, depth, tile_rows, block->a);
        decode_panels(&job->b, block->col, block->cols, k, depth, tile_cols, block->b);
        for (int64_t j = 0; j < block->cols; j += tile_cols) {
            for (int64_t i = 0; i < block->rows; i += tile_rows)
                job->simd->multiply(block->a + i * depth, block->b + j * depth, depth,
                                    block->sums + i * BLOCK_COLS + j, BLOCK_COLS);
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
static void put_block(const struct gemm *job, const struct block *block)
{
    for (int64_t i = 0; i < block->rows; i++) {
        char *out = fp8_host_at(job->out, job->out_dtype, job->out_ld, block->row + i, block->col);
        for (int64_t j = 0; j < block->cols; j++) {
            double value = block->sums[i * BLOCK_COLS + j] * job->smaller * job->larger;
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

static double scale_inv_of(const void *scales)
{
    return (double)((const float *)scales)[FP8_SCALES_SCALE_INV];
}

fp8_status fp8_host_gemm(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args)
{
    struct gemm job = {
        .simd = fp8_host_simd(),
        .a = { .data = args[FP8_GEMM_a].p,
               .ld = args[FP8_GEMM_a_ld].i,
               .rows = args[FP8_GEMM_rows].i },
        .b = { .data = args[FP8_GEMM_b].p,
               .ld = args[FP8_GEMM_b_ld].i,
               .rows = args[FP8_GEMM_cols].i },
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
    FP8_TRY(fp8_host_decode_table(semantics->source_dtype, job.a.values));
    FP8_TRY(fp8_host_decode_table(semantics->second_dtype, job.b.values));
    if (job.depth == 0 && job.accumulate && job.bias == NULL)
        return FP8_OK; /* unchanged, to the sign of a zero */
    if (job.depth > 0) {
        double a = scale_inv_of(args[FP8_GEMM_a_scales].p),
               b = scale_inv_of(args[FP8_GEMM_b_scales].p);
        job.smaller = a < b ? a : b;
        job.larger = a < b ? b : a;
    }
    job.block_cols = fp8_ceil_div(job.b.rows, BLOCK_COLS);
    fp8_pool_run(pool, fp8_ceil_div(job.a.rows, BLOCK_ROWS) * job.block_cols, gemm_item, &job);
    return FP8_OK;
}
