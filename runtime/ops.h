/*
 * ops.h - the ops of bundle_format.h as C: enumerators for their arguments and evaluated values.
 *
 * A step of a plan is an op with arguments. At call time the runtime evaluates the arguments into
 * an array of fp8_value in the op's own order; the CUDA side copies them into a kernel's parameter
 * list by name, the host backend reads them by index. This header is the seam between the two and
 * knows neither. Not public.
 */
#ifndef FP8_OPS_H
#define FP8_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "runtime/bundle_format.h"
#include "runtime/fp8.h"

enum fp8_op {
#define X(NAME, name, ARGS) FP8_OP_##NAME,
    FP8_OPS(X)
#undef X
        FP8_OP_COUNT
};

/* FP8_AMAX_source, FP8_AMAX_source_ld, ..., FP8_AMAX_ARG_COUNT, and so on for every op. */
enum {
#define X(name, type) FP8_AMAX_##name,
    FP8_OP_ARGS_AMAX(X) FP8_AMAX_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_QUANTIZE_##name,
    FP8_OP_ARGS_QUANTIZE(X) FP8_QUANTIZE_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_FUSED_##name,
    FP8_OP_ARGS_FUSED(X) FP8_FUSED_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_CAST_##name,
    FP8_OP_ARGS_CAST(X) FP8_CAST_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_COLUMN_SUMS_##name,
    FP8_OP_ARGS_COLUMN_SUMS(X) FP8_COLUMN_SUMS_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_COLUMN_MAXIMA_##name,
    FP8_OP_ARGS_COLUMN_MAXIMA(X) FP8_COLUMN_MAXIMA_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_QUANTIZE_ROW_##name,
    FP8_OP_ARGS_QUANTIZE_ROW(X) FP8_QUANTIZE_ROW_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_LINE_AMAX_##name,
    FP8_OP_ARGS_LINE_AMAX(X) FP8_LINE_AMAX_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_LINE_SCALES_##name,
    FP8_OP_ARGS_LINE_SCALES(X) FP8_LINE_SCALES_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_QUANTIZE_LINES_##name,
    FP8_OP_ARGS_QUANTIZE_LINES(X) FP8_QUANTIZE_LINES_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_QUANTIZE_BLOCK_##name,
    FP8_OP_ARGS_QUANTIZE_BLOCK(X) FP8_QUANTIZE_BLOCK_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_TRANSPOSE_##name,
    FP8_OP_ARGS_TRANSPOSE(X) FP8_TRANSPOSE_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_ROLL_##name,
    FP8_OP_ARGS_ROLL(X) FP8_ROLL_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_STORE_##name,
    FP8_OP_ARGS_STORE(X) FP8_STORE_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_SUM_##name,
    FP8_OP_ARGS_SUM(X) FP8_SUM_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_DEQUANTIZE_##name,
    FP8_OP_ARGS_DEQUANTIZE(X) FP8_DEQUANTIZE_ARG_COUNT
#undef X
};
enum {
#define X(name, type) FP8_GEMM_##name,
    FP8_OP_ARGS_GEMM(X) FP8_GEMM_ARG_COUNT
#undef X
};

enum fp8_arg_type { FP8_ARG_POINTER, FP8_ARG_INT64, FP8_ARG_INT32 };

/* The number of an op's argument, -1 if it has none of that name; its name and type (ops.c). */
int fp8_op_arg(enum fp8_op op, const char *name);
int fp8_op_arg_count(enum fp8_op op);
const char *fp8_op_arg_name(enum fp8_op op, int index);
enum fp8_arg_type fp8_op_arg_type(enum fp8_op op, int index);
extern const char *const fp8_op_names[FP8_OP_COUNT];

typedef union fp8_value {
    void *p;
    int64_t i;
} fp8_value;

/* What an op computes, beyond its arguments: "semantics" of its kernel record, or of a gemm
 * step. */
typedef struct fp8_semantics {
    fp8_dtype source_dtype; /* gemm: dtype of a */
    fp8_dtype second_dtype; /* gemm: dtype of b */
    fp8_dtype target_dtype; /* quantising ops: the format; gemm: dtype of out */
    fp8_scaling scaling; /* dequantize; gemm: of a; quantize_block: BLOCK (1x128), TILE (128x128) */
    fp8_scaling second_scaling; /* gemm: of b */
    bool transposed;            /* gemm: a is stored [depth][rows] */
    bool second_transposed;     /* gemm: b is stored [depth][cols] */
    bool power_of_two;          /* quantising ops: scales rounded down to powers of two */
    int32_t margin;             /* cast: a scale made from an amax is taken of maximum / 2^margin */
    bool accumulate;            /* store, gemm: target += source */
} fp8_semantics;

#endif
