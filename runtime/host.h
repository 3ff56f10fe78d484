/*
 * host.h - the reference backend: the ops of a plan on the CPU.
 *
 * In: an op, its semantics, its evaluated arguments with pointers into host memory. Out: what
 * bundle_format.h says of that op, done when the call returns. It is the oracle for the kernels:
 * casts, scales and amaxes agree with them bit for bit, GEMM sums are more exact. It takes any
 * alignment and leading dim, so it never needs the stage, the store op or the gemm workspace.
 * Allocates nothing; uses up to 256 KiB of stack. Works in the default floating-point environment
 * and puts the caller's back, so a caller that flushes subnormals gets the same bits as one that
 * does not. Knows no layers, manifests or devices.
 */
#ifndef FP8_HOST_H
#define FP8_HOST_H

#include <stdint.h>

#include "runtime/fp8_format.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

/* args: one value per argument of the op, in its order. pool may be NULL.
 * FP8_ERR_UNSUPPORTED: the semantics name dtypes that the op does not take. */
fp8_status fp8_host_run(struct fp8_pool *pool, enum fp8_op op, const fp8_semantics *semantics,
                        const fp8_value *args);

/* ---- its parts, one per op; host_amax.c, host_quantize*.c, host_dequantize.c, host_gemm.c ---- */

fp8_status fp8_host_amax(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args);
fp8_status fp8_host_quantize(struct fp8_pool *pool, const fp8_semantics *semantics,
                             const fp8_value *args);
fp8_status fp8_host_fused(struct fp8_pool *pool, const fp8_semantics *semantics,
                          const fp8_value *args);
fp8_status fp8_host_cast(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args);
fp8_status fp8_host_column_sums(struct fp8_pool *pool, const fp8_value *args);
fp8_status fp8_host_column_maxima(const fp8_value *args);
fp8_status fp8_host_quantize_row(struct fp8_pool *pool, const fp8_semantics *semantics,
                                 const fp8_value *args);
fp8_status fp8_host_line_amax(struct fp8_pool *pool, const fp8_semantics *semantics,
                              const fp8_value *args);
fp8_status fp8_host_line_scales(struct fp8_pool *pool, const fp8_semantics *semantics,
                                const fp8_value *args);
fp8_status fp8_host_quantize_lines(struct fp8_pool *pool, const fp8_semantics *semantics,
                                   const fp8_value *args);
fp8_status fp8_host_quantize_block(struct fp8_pool *pool, const fp8_semantics *semantics,
                                   const fp8_value *args);
fp8_status fp8_host_transpose(struct fp8_pool *pool, const fp8_value *args);
fp8_status fp8_host_roll(const fp8_value *args);
fp8_status fp8_host_dequantize(struct fp8_pool *pool, const fp8_semantics *semantics,
                               const fp8_value *args);
fp8_status fp8_host_gemm(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args);

/* values[code] = the decoded code. FP8_ERR_UNSUPPORTED unless e4m3 or e5m2. */
fp8_status fp8_host_decode_table(fp8_dtype format, float values[256]);

/* Address of element (row, col). */
static inline void *fp8_host_at(const void *base, fp8_dtype dtype, int64_t ld, int64_t row,
                                int64_t col)
{
    bool half = dtype == FP8_DTYPE_BF16 || dtype == FP8_DTYPE_FP16;
    return (char *)base + (size_t)(row * ld + col) * (dtype == FP8_DTYPE_FP32 ? 4 : half ? 2 : 1);
}

/* A number of bf16, fp16 or fp32. */
static inline float fp8_host_load(const void *address, fp8_dtype dtype)
{
    if (dtype == FP8_DTYPE_FP32)
        return *(const float *)address;
    uint16_t half = *(const uint16_t *)address;
    return dtype == FP8_DTYPE_BF16 ? fp8_bf16_to_float(half) : fp8_fp16_to_float(half);
}

static inline void fp8_host_store(void *address, fp8_dtype dtype, float value)
{
    if (dtype == FP8_DTYPE_FP32)
        *(float *)address = value;
    else
        *(uint16_t *)address =
            dtype == FP8_DTYPE_BF16 ? fp8_float_to_bf16(value) : fp8_float_to_fp16(value);
}

#endif
