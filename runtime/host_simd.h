/*
 * host_simd.h - the inner loops of the host backend, once for each instruction set.
 *
 * In: small contiguous pieces of fixed width. Out: the same bits whichever variant runs: every
 * output element is computed by the same operations in the same order, vectors lie across outputs.
 * Knows no tensors and no tails; callers pad a short piece.
 */
#ifndef FP8_HOST_SIMD_H
#define FP8_HOST_SIMD_H

#include <stdint.h>

/* Elements of one piece, and depth of one block of the GEMM. */
enum { FP8_HOST_PIECE = 128 };

enum { FP8_HOST_FROM_BF16, FP8_HOST_FROM_FP32, FP8_HOST_FROM_COUNT };
enum { FP8_HOST_TO_E4M3, FP8_HOST_TO_E5M2, FP8_HOST_TO_COUNT };

struct fp8_host_simd {
    const char *name;
    int64_t tile_rows, tile_cols; /* of `multiply` */

    /* acc[i * ld + j] += sum over k < depth of a[k * tile_rows + i] * b[k * tile_cols + j]: the sum
     * in float32 in ascending k (products of two FP8 or bf16 values are exact), then, times
     * row_factors[i] * col_factors[j] unless row_factors is NULL, added in float64. depth is at
     * most FP8_HOST_PIECE. */
    void (*multiply)(const float *a, const float *b, int64_t depth, const double *row_factors,
                     const double *col_factors, double *acc, int64_t ld);

    /* codes[i] = cast(source[i] * scales[i]), i < PIECE. */
    void (*encode[FP8_HOST_FROM_COUNT][FP8_HOST_TO_COUNT])(const void *source, const float *scales,
                                                           uint8_t *codes);
    /* Over `pieces` pieces: the largest |x| below infinity as float32 bits; *bad |= any other. */
    uint32_t (*amax[FP8_HOST_FROM_COUNT])(const void *source, int64_t pieces, uint32_t *bad);
    /* The same for each column by itself: largest[i] becomes the larger of it and |source[i]|. */
    void (*column_amax[FP8_HOST_FROM_COUNT])(const void *source, uint32_t *largest, uint32_t *bad);
    /* sums[0 .. PIECE) += source. */
    void (*add[FP8_HOST_FROM_COUNT])(const void *source, double *sums);
};

/* The best one for this CPU. */
const struct fp8_host_simd *fp8_host_simd(void);
/* All that this build has, best first; NULL past the end or where this CPU lacks the instructions.
 * *past_end (may be NULL) tells which. */
const struct fp8_host_simd *fp8_host_simd_variant(int32_t index, int32_t *past_end);

#endif
