/*
 * gemm_lt.h - cuBLASLt: one matrix product as the library wants it.
 *
 * Row-major out[rows, cols] = a[rows, depth] b[cols, depth]^T is, column-major, D (cols x rows) = B^T A with
 * both operands K-major: the only layout that FP8 has on Hopper. Between gemm_lt.c, which speaks to the
 * library, and gemm_cublaslt.c, which chooses.
 */
#ifndef FP8_GEMM_LT_H
#define FP8_GEMM_LT_H

#include "runtime/internal.h"

#include <cublasLt.h>

/* A product that cuBLASLt can be asked for or run. cols and depth are padded as its rules want them. */
struct fp8_lt_problem {
    fp8_dtype a_dtype, b_dtype, out_dtype;
    bool fast;
    bool has_bias; /* bf16[cols] */
    bool accumulate;
    int64_t rows, cols, depth;
    int64_t a_ld, b_ld, out_ld;
    int32_t max_sms; /* 0 = all */
    const void *a, *b;
    const float *a_scales, *b_scales;
    const void *bias;
    void *out;
    void *workspace;
    size_t workspace_bytes;
    fp8_stream stream;
};

struct fp8_lt_choice {
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes;
};

/* Up to `most` algorithms, best first, for pointers of at least the alignments that every call has (out: 16
 * bytes); none is no error. */
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
