/*
 * host_simd.c - the variants of host_simd.h, and the choice among them.
 *
 * A fused multiply-add gives the same bits as a multiply and an add here, since products of two FP8
 * values are exact in float32; so variants with and without it agree. The encoders are compiled
 * without it: nothing there may be fused. gcc vectorises the conversion loops at -O3 only. Tiles
 * are sized so that all sums stay in registers.
 */
#include "runtime/host_simd.h"

#include <stddef.h>

#include "runtime/fp8_format.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SIMD_NAME(word) word##_avx512
#define SIMD_TEXT "avx512"
#define SIMD_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define SIMD_LANES 16
#define SIMD_ROWS 12
#define SIMD_VECTORS 2
#define SIMD_FMA(a, b, c)                                                                          \
    ((vector_avx512)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)(b), (__m512)(c)))
#include "runtime/host_simd_body.h"

#define SIMD_NAME(word) word##_avx2
#define SIMD_TEXT "avx2"
#define SIMD_TARGET __attribute__((target("avx2,fma")))
#define SIMD_LANES 8
#define SIMD_ROWS 6
#define SIMD_VECTORS 2
#define SIMD_FMA(a, b, c)                                                                          \
    ((vector_avx2)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)(b), (__m256)(c)))
#include "runtime/host_simd_body.h"
#endif

#define SIMD_NAME(word) word##_baseline
#define SIMD_TEXT "baseline"
#define SIMD_TARGET
#define SIMD_LANES 4
#define SIMD_ROWS 4
#define SIMD_VECTORS 2
#define SIMD_FMA(a, b, c) ((c) + (a) * (b))
#include "runtime/host_simd_body.h"

const struct fp8_host_simd *fp8_host_simd_variant(int32_t index, int32_t *past_end)
{
    if (past_end != NULL)
        *past_end = 0;
#if defined(__x86_64__)
    if (index == 0) {
        int usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        return usable ? &variant_avx512 : NULL;
    }
    if (index == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &variant_avx2
                                                                               : NULL;
    index -= 2;
#endif
    if (index == 0)
        return &variant_baseline;
    if (past_end != NULL)
        *past_end = 1;
    return NULL;
}

const struct fp8_host_simd *fp8_host_simd(void)
{
    for (int32_t index = 0;; index++) {
        const struct fp8_host_simd *variant = fp8_host_simd_variant(index, NULL);
        if (variant != NULL)
            return variant;
    }
}
