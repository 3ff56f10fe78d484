/*
 * host_simd_body.h - the loops of host_simd.h; included once for each instruction set.
 *
 * Before: SIMD_NAME(word), SIMD_TEXT, SIMD_TARGET (function attribute), SIMD_LANES (float32 in a
 * vector), SIMD_ROWS and SIMD_VECTORS (tile of the multiply), SIMD_FMA(a, b, c). All are undefined
 * at the end. Trip counts are constants, so that loops become vectors without tails.
 */

typedef float SIMD_NAME(vector) __attribute__((vector_size(SIMD_LANES * 4), aligned(4), may_alias));
typedef double SIMD_NAME(wide) __attribute__((vector_size(SIMD_LANES * 8), aligned(8), may_alias));

SIMD_TARGET static void SIMD_NAME(multiply)(const float *a, const float *b, int64_t depth,
                                            const double *row_factors, const double *col_factors,
                                            double *acc, int64_t ld)
{
    SIMD_NAME(vector) sum[SIMD_ROWS][SIMD_VECTORS] = { 0 };
    for (int64_t k = 0; k < depth; k++) {
        SIMD_NAME(vector) right[SIMD_VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < SIMD_VECTORS; v++)
            right[v] = *(const SIMD_NAME(vector) *)(b + v * SIMD_LANES);
#pragma GCC unroll 16
        for (int i = 0; i < SIMD_ROWS; i++) {
#pragma GCC unroll 16
            for (int v = 0; v < SIMD_VECTORS; v++)
                sum[i][v] = SIMD_FMA(a[i], right[v], sum[i][v]);
        }
        a += SIMD_ROWS;
        b += SIMD_VECTORS * SIMD_LANES;
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIMD_ROWS; i++) {
#pragma GCC unroll 16
        for (int v = 0; v < SIMD_VECTORS; v++) {
            SIMD_NAME(wide) *target = (SIMD_NAME(wide) *)(acc + i * ld + v * SIMD_LANES);
            SIMD_NAME(wide) part = __builtin_convertvector(sum[i][v], SIMD_NAME(wide));
            if (row_factors != NULL)
                part *= row_factors[i] * *(const SIMD_NAME(wide) *)(col_factors + v * SIMD_LANES);
            *target += part;
        }
    }
}

/* All of a piece as if it were finite, which vectorises well; again, one by one, if it was not. The
 * codes stay words until all are there: narrowed in the same loop, gcc would narrow every term of
 * theirs. */
#define SIMD_ENCODE(from, type, to_float, to)                                                      \
    SIMD_TARGET static void SIMD_NAME(encode_##from##_##to)(const void *source,                    \
                                                            const float *scales, uint8_t *codes)   \
    {                                                                                              \
        const type *restrict in = source;                                                          \
        uint8_t *restrict out = codes;                                                             \
        uint32_t words[FP8_HOST_PIECE], largest = 0;                                               \
        for (int i = 0; i < FP8_HOST_PIECE; i++) {                                                 \
            float x = to_float(in[i]);                                                             \
            uint32_t bits = fp8_bits_of_float(x), size = bits & 0x7FFFFFFFu;                       \
            largest = largest > size ? largest : size;                                             \
            words[i] = fp8_encode_finite(bits, x * scales[i], fp8_encoding_##to);                  \
        }                                                                                          \
        for (int i = 0; i < FP8_HOST_PIECE; i++)                                                   \
            out[i] = (uint8_t)words[i];                                                            \
        for (int i = 0; i < FP8_HOST_PIECE && !fp8_is_finite(largest); i++)                        \
            out[i] = fp8_encode_##to(to_float(in[i]), scales[i]);                                  \
    }
SIMD_ENCODE(bf16, uint16_t, fp8_bf16_to_float, e4m3)
SIMD_ENCODE(bf16, uint16_t, fp8_bf16_to_float, e5m2)
SIMD_ENCODE(fp32, float, , e4m3)
SIMD_ENCODE(fp32, float, , e5m2)
#undef SIMD_ENCODE

/* The maximum of the finite sizes, and the or of a flag: both reductions over unsigned words. */
#define SIMD_AMAX(from, word, infinity, shift)                                                     \
    SIMD_TARGET static uint32_t SIMD_NAME(amax_##from)(const void *source, int64_t pieces,         \
                                                       uint32_t *bad)                              \
    {                                                                                              \
        const word *in = source;                                                                   \
        word largest = 0, others = 0;                                                              \
        for (int64_t piece = 0; piece < pieces; piece++, in += FP8_HOST_PIECE) {                   \
            for (int i = 0; i < FP8_HOST_PIECE; i++) {                                             \
                word size = (word)(in[i] & (word)(((word)-1) >> 1));                               \
                word other = size >= infinity ? (word)-1 : 0;                                      \
                word finite = (word)(size & (word)~other);                                         \
                largest = largest > finite ? largest : finite;                                     \
                others |= other;                                                                   \
            }                                                                                      \
        }                                                                                          \
        if (others != 0)                                                                           \
            *bad = 1;                                                                              \
        return (uint32_t)largest << shift;                                                         \
    }
SIMD_AMAX(bf16, uint16_t, 0x7F80u, 16)
SIMD_AMAX(fp32, uint32_t, 0x7F800000u, 0)
#undef SIMD_AMAX

#define SIMD_COLUMN_AMAX(from, word, infinity, shift)                                              \
    SIMD_TARGET static void SIMD_NAME(column_amax_##from)(const void *source, uint32_t *largest,   \
                                                          uint32_t *bad)                           \
    {                                                                                              \
        const word *restrict in = source;                                                          \
        uint32_t *restrict out = largest;                                                          \
        uint32_t others = 0;                                                                       \
        for (int i = 0; i < FP8_HOST_PIECE; i++) {                                                 \
            uint32_t size = (uint32_t)(in[i] & (word)(((word)-1) >> 1));                           \
            uint32_t other = fp8_mask(size >= infinity);                                           \
            uint32_t finite = (size & ~other) << shift;                                            \
            out[i] = out[i] > finite ? out[i] : finite;                                            \
            others |= other;                                                                       \
        }                                                                                          \
        if (others != 0)                                                                           \
            *bad = 1;                                                                              \
    }
SIMD_COLUMN_AMAX(bf16, uint16_t, 0x7F80u, 16)
SIMD_COLUMN_AMAX(fp32, uint32_t, 0x7F800000u, 0)
#undef SIMD_COLUMN_AMAX

#define SIMD_ADD(from, type, to_float)                                                             \
    SIMD_TARGET static void SIMD_NAME(add_##from)(const void *source, double *sums)                \
    {                                                                                              \
        const type *restrict in = source;                                                          \
        double *restrict out = sums;                                                               \
        for (int i = 0; i < FP8_HOST_PIECE; i++)                                                   \
            out[i] += (double)to_float(in[i]);                                                     \
    }
SIMD_ADD(bf16, uint16_t, fp8_bf16_to_float)
SIMD_ADD(fp32, float, )
#undef SIMD_ADD

static const struct fp8_host_simd SIMD_NAME(variant) = {
    .name = SIMD_TEXT,
    .tile_rows = SIMD_ROWS,
    .tile_cols = SIMD_VECTORS * SIMD_LANES,
    .multiply = SIMD_NAME(multiply),
    .encode = { { SIMD_NAME(encode_bf16_e4m3), SIMD_NAME(encode_bf16_e5m2) },
                { SIMD_NAME(encode_fp32_e4m3), SIMD_NAME(encode_fp32_e5m2) } },
    .amax = { SIMD_NAME(amax_bf16), SIMD_NAME(amax_fp32) },
    .column_amax = { SIMD_NAME(column_amax_bf16), SIMD_NAME(column_amax_fp32) },
    .add = { SIMD_NAME(add_bf16), SIMD_NAME(add_fp32) },
};

#undef SIMD_NAME
#undef SIMD_TEXT
#undef SIMD_TARGET
#undef SIMD_LANES
#undef SIMD_ROWS
#undef SIMD_VECTORS
#undef SIMD_FMA
