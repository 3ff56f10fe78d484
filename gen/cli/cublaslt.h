/*
 * cublaslt.h - the baseline of the benchmarks: a GEMM by the best of all cuBLASLt algorithms.
 */
#ifndef FP8GEN_CLI_CUBLASLT_H
#define FP8GEN_CLI_CUBLASLT_H

#include "gen/cli/bench.h"

struct baseline; /* a cuBLASLt handle and its workspace */

int baseline_create(struct bench *bench, struct baseline **baseline);
void baseline_destroy(struct baseline *baseline);

/* A matrix of the GEMM in every buffer set: row-major as in fp8_tensor, with its scale_inv if FP8.
 * across: stored [depth, vectors] instead of [vectors, depth]. */
struct baseline_matrix {
    void *data[BENCH_SETS];
    const float *scale_inv[BENCH_SETS]; /* on the device */
    fp8_dtype dtype;
    int64_t ld;
    bool across;
};

/* out[rows, cols] = sum over depth of a[row, .] b[col, .] */
struct baseline_gemm_shape {
    int64_t rows, cols, depth;
    bool fast_accumulation; /* FP8 only */
    bool accumulate;        /* out += */
    struct baseline_matrix a, b, out;
};

struct baseline_gemm;

/* Asks for up to 128 algorithms and measures none. *gemm is NULL, and the code CLI_DONE, if
 * cuBLASLt has none for this shape. */
int baseline_gemm_open(struct baseline *baseline, const struct baseline_gemm_shape *shape,
                       struct baseline_gemm **gemm);
/* How many algorithms were offered, whether they run or not. */
int baseline_gemm_offered(const struct baseline_gemm *gemm);
/* Enqueues an algorithm; false if it does not run. */
bool baseline_gemm_enqueue(const struct baseline_gemm *gemm, int algorithm, int set);
/* The 64 bytes of cublasLtMatmulAlgo_t as hex digits. */
void baseline_gemm_hex(const struct baseline_gemm *gemm, int algorithm, char hex[129]);

/* The same, and measures each. */
int baseline_gemm_create(struct baseline *baseline, const struct baseline_gemm_shape *shape,
                         struct baseline_gemm **gemm);
void baseline_gemm_destroy(struct baseline_gemm *gemm);
/* The run function of a bench_item: enqueues the fastest algorithm. */
int baseline_gemm_run(void *gemm, int set);
/* How many algorithms were measured. */
int baseline_gemm_algorithms(const struct baseline_gemm *gemm);

#endif
