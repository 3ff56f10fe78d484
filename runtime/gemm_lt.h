/*
 * gemm_lt.h - cuBLASLt: one matrix product as the library wants it.
 *
 * Row-major out[rows, cols] = a[rows, depth] b[cols, depth]^T is, column-major, D (cols x rows) =
 * B^T A with both operands K-major: the only layout that FP8 has on Hopper. A bf16 operand may also
 * be stored transposed, [depth, rows]. Between gemm_lt.c, which speaks to the library,
 * gemm_lt_problem.c, which knows its rules, and gemm_cublaslt.c, which chooses.
 */
#ifndef FP8_GEMM_LT_H
#define FP8_GEMM_LT_H

#include "runtime/internal.h"

#include <cublasLt.h>

struct fp8_lt_operand {
    fp8_dtype dtype;
    bool transposed;     /* stored [depth, rows] */
    fp8_scaling scaling; /* of both: tensor or none; or block of a, block or tile of b */
    int64_t ld;
    const void *data;
    const float *scales; /* scale_inv as the library reads it: one (NULL: 1), or blocks */
};

/* A product that cuBLASLt can be asked for or run. Extents are padded as its rules want them. */
struct fp8_lt_problem {
    struct fp8_lt_operand a, b;
    fp8_dtype out_dtype;
    bool fast;
    bool has_bias; /* bf16[cols] */
    bool accumulate;
    bool unaligned; /* operands and out are aligned to their elements, not to 16 bytes; bf16 */
    int64_t rows, cols, depth;
    int64_t out_ld;
    int32_t max_sms; /* 0 = all */
    const void *bias;
    void *out;
    void *workspace;
    size_t workspace_bytes;
    fp8_stream stream;
};

struct fp8_lt_choice {
    cublasLtMatmulAlgo_t algo;
};

/* Up to `most` algorithms, best first, for pointers of at least the alignments that every call has;
 * none is no error. */
int fp8_lt_ask(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
               struct fp8_lt_choice *choices, int most);
/* Whether this library takes these 64 bytes as an algorithm for the problem; then *choice is it. */
bool fp8_lt_check(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
                  const uint64_t algo[8], struct fp8_lt_choice *choice);
/* Enqueues; *reason is cuBLASLt's word for a refusal. */
bool fp8_lt_try(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
                const struct fp8_lt_choice *choice, const char **reason);
/* "cublaslt algo 66, tile 20, stages 34, cluster 3" */
void fp8_lt_name(const struct fp8_lt *lt, const struct fp8_lt_choice *choice, char *text,
                 size_t size);

#endif
