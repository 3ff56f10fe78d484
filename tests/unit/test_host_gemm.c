/*
 * test_host_gemm.c - the GEMM of the host backend against plain float64 loops, and the
 * instruction-set variants of all inner loops against each other, bit for bit.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>

#include "runtime/fp8_format.h"
#include "runtime/host.h"
#include "runtime/host_simd.h"
#include "tests/unit/matrix.h"

static struct fp8_pool *pool;

/* An operand: codes with the scales of its layout, or bf16, perhaps stored transposed. */
struct side {
    struct matrix m;
    int64_t rows;
    float *scales;
    int64_t scales_ld, scale_count;
};

struct product {
    int64_t rows, cols, depth;
    struct side a, b;
    struct matrix bias, out;
    fp8_semantics how;
    bool accumulate, with_bias;
};

static void make_scales(struct side *side, fp8_scaling scaling, int64_t rows, int64_t depth,
                        float size)
{
    int64_t blocks = (depth + 127) / 128, lines = 1;
    side->scales_ld = scaling == FP8_SCALING_ROW     ? round_up(rows, 16)
                      : scaling == FP8_SCALING_BLOCK ? round_up(rows, 8)
                      : scaling == FP8_SCALING_TILE  ? round_up(blocks, 4)
                                                     : 16;
    if (scaling == FP8_SCALING_BLOCK)
        lines = blocks;
    if (scaling == FP8_SCALING_TILE)
        lines = (rows + 127) / 128;
    side->scale_count = lines * side->scales_ld;
    side->scales = malloc(((size_t)side->scale_count + 1) * sizeof *side->scales);
    assert_non_null(side->scales);
    for (int64_t i = 0; i < side->scale_count; i++)
        side->scales[i] = scaling == FP8_SCALING_TENSOR && i != FP8_SCALES_SCALE_INV
                              ? NAN
                              : size * (1 + (float)random_below(1000) / 300);
}

static struct side make_side(fp8_dtype dtype, fp8_scaling scaling, bool transposed, int64_t rows,
                             int64_t depth, float size)
{
    struct side side = { .rows = rows };
    int64_t lines = transposed ? depth : rows, along = transposed ? rows : depth;
    if (dtype == FP8_DTYPE_BF16) {
        side.m = make_random(FP8_DTYPE_BF16, lines, along);
        return side;
    }
    uint8_t highest = dtype == FP8_DTYPE_E4M3 ? 0x7E : 0x7B;
    side.m = make(FP8_DTYPE_E4M3, rows, depth, depth + random_below(20), random_below(3));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < depth; k++)
            side.m.data[i * side.m.ld + k] =
                (uint8_t)(random_below(highest + 1) | (random_below(2) << 7));
    }
    make_scales(&side, scaling, rows, depth, size);
    return side;
}

static fp8_status run_product(struct product *p)
{
    fp8_value args[FP8_GEMM_ARG_COUNT] = {
        [FP8_GEMM_a].p = p->a.m.data,
        [FP8_GEMM_a_ld].i = p->a.m.ld,
        [FP8_GEMM_b].p = p->b.m.data,
        [FP8_GEMM_b_ld].i = p->b.m.ld,
        [FP8_GEMM_a_scales].p = p->a.scales,
        [FP8_GEMM_a_scales_ld].i = p->a.scales_ld,
        [FP8_GEMM_b_scales].p = p->b.scales,
        [FP8_GEMM_b_scales_ld].i = p->b.scales_ld,
        [FP8_GEMM_bias].p = p->with_bias ? p->bias.data : NULL,
        [FP8_GEMM_out].p = p->out.data,
        [FP8_GEMM_out_ld].i = p->out.ld,
        [FP8_GEMM_rows].i = p->rows,
        [FP8_GEMM_cols].i = p->cols,
        [FP8_GEMM_depth].i = p->depth,
        [FP8_GEMM_accumulate].i = p->accumulate,
    };
    return fp8_host_run(pool, FP8_OP_GEMM, &p->how, args);
}

/* The operand's element (row, k), dequantised. */
static double value_of(const struct side *side, fp8_dtype dtype, fp8_scaling scaling,
                       bool transposed, int64_t row, int64_t k)
{
    if (dtype == FP8_DTYPE_BF16)
        return (double)(transposed ? get(&side->m, k, row) : get(&side->m, row, k));
    uint8_t code = side->m.data[row * side->m.ld + k];
    float value = dtype == FP8_DTYPE_E4M3 ? fp8_decode_e4m3(code) : fp8_decode_e5m2(code);
    int64_t at = scaling == FP8_SCALING_ROW     ? row
                 : scaling == FP8_SCALING_BLOCK ? k / 128 * side->scales_ld + row
                 : scaling == FP8_SCALING_TILE  ? row / 128 * side->scales_ld + k / 128
                                                : 4;
    return (double)value * (double)side->scales[at];
}

static void check_element(const struct product *p, const struct matrix *old, int64_t i, int64_t j)
{
    double sum = 0, size = 0;
    for (int64_t k = 0; k < p->depth; k++) {
        double term =
            value_of(&p->a, p->how.source_dtype, p->how.scaling, p->how.transposed, i, k) *
            value_of(&p->b, p->how.second_dtype, p->how.second_scaling, p->how.second_transposed, j,
                     k);
        sum += term;
        size += fabs(term);
    }
    double want = sum;
    if (p->with_bias)
        want += (double)get(&p->bias, 0, j);
    if (p->accumulate)
        want += (double)get(old, i, j);
    double step = p->how.target_dtype == FP8_DTYPE_FP32 ? 0x1p-24 : 0x1p-8;
    double bound = 0x1p-19 * size + step * fabs(want) * 1.01;
    double got = (double)get(&p->out, i, j);
    if (!(fabs(got - want) <= bound))
        fail_msg("gemm %lld x %lld x %lld, scaling %d and %d [%lld,%lld]: %g, not %g",
                 (long long)p->rows, (long long)p->cols, (long long)p->depth, (int)p->how.scaling,
                 (int)p->how.second_scaling, (long long)i, (long long)j, got, want);
}

static void check_product(const struct product *p, const struct matrix *old)
{
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t j = 0; j < p->cols; j++)
            check_element(p, old, i, j);
    }
}

/* Scalings in turn: those that recipes have, and bf16 stored in all four ways. */
static void choose_operands(fp8_semantics *how, int round)
{
    static const fp8_scaling scalings[][2] = {
        { FP8_SCALING_TENSOR, FP8_SCALING_TENSOR }, { FP8_SCALING_ROW, FP8_SCALING_ROW },
        { FP8_SCALING_BLOCK, FP8_SCALING_TILE },    { FP8_SCALING_BLOCK, FP8_SCALING_BLOCK },
        { FP8_SCALING_ROW, FP8_SCALING_TENSOR },    { FP8_SCALING_NONE, FP8_SCALING_NONE },
    };
    how->scaling = scalings[round % 6][0];
    how->second_scaling = scalings[round % 6][1];
    how->source_dtype = round % 5 == 1 ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    how->second_dtype = round % 5 == 2 ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    if (how->scaling != FP8_SCALING_NONE)
        return;
    how->source_dtype = how->second_dtype = FP8_DTYPE_BF16;
    how->transposed = round / 6 % 2;
    how->second_transposed = round / 12 % 2;
}

static struct product make_product(int64_t rows, int64_t cols, int64_t depth, int round)
{
    struct product p = { .rows = rows, .cols = cols, .depth = depth };
    choose_operands(&p.how, round);
    p.how.target_dtype = round / 2 % 2 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32;
    p.accumulate = round / 3 % 2 == 1;
    p.with_bias = round / 4 % 2 == 1;
    p.a = make_side(p.how.source_dtype, p.how.scaling, p.how.transposed, rows, depth, 0.0123f);
    p.b = make_side(p.how.second_dtype, p.how.second_scaling, p.how.second_transposed, cols, depth,
                    1.7e-3f);
    p.bias = make_random(FP8_DTYPE_BF16, 1, cols);
    p.out = make(p.how.target_dtype, rows, cols, cols + random_below(4), random_below(9));
    return p;
}

static void drop_product(struct product *p)
{
    drop(&p->a.m);
    drop(&p->b.m);
    drop(&p->bias);
    drop(&p->out);
    free(p->a.scales);
    free(p->b.scales);
}

static void gemm_matches_float64(void **state)
{
    (void)state;
    static const int64_t listed[][3] = { { 1, 1, 1 },     { 96, 128, 128 }, { 97, 129, 129 },
                                         { 12, 16, 256 }, { 6, 32, 127 },   { 0, 5, 5 },
                                         { 5, 7, 0 },     { 1, 300, 40 },   { 300, 1, 40 },
                                         { 3, 3, 1000 } };
    for (int round = 0; round < 120; round++) {
        random_state = 5000 + (uint64_t)round;
        bool given = (size_t)round < sizeof listed / sizeof listed[0];
        int64_t rows = given ? listed[round][0] : 1 + random_below(150);
        int64_t cols = given ? listed[round][1] : 1 + random_below(200);
        int64_t depth = given ? listed[round][2] : random_below(400);
        struct product p = make_product(rows, cols, depth, round);
        struct matrix old = make(p.how.target_dtype, rows, cols, cols, 0);
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < cols; j++) {
                put(&old, i, j, (float)(i % 7) - 3.0f);
                if (p.accumulate)
                    put(&p.out, i, j, (float)(i % 7) - 3.0f);
            }
        }
        assert_int_equal(run_product(&p), FP8_OK);
        check_product(&p, &old);
        drop(&old);
        drop_product(&p);
    }
}

/* The product of the factors vanishes in float32, and the larger one first would overflow. */
static void gemm_scales_neither_vanish_nor_overflow(void **state)
{
    (void)state;
    struct product p = make_product(4, 4, 64, 0);
    for (int i = 0; i < 4; i++) {
        memset(p.a.m.data + i * p.a.m.ld, 0x7E, 64);
        memset(p.b.m.data + i * p.b.m.ld, 0x7E, 64);
    }
    static const float pairs[][2] = {
        { 1e-20f, 1e-20f }, { 1e-45f, 3e38f }, { 3e38f, 1e-45f }, { 1e-38f, 1e-3f }
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        p.a.scales[4] = pairs[i][0];
        p.b.scales[4] = pairs[i][1];
        assert_int_equal(run_product(&p), FP8_OK);
        float want = (float)(448.0 * 448 * 64 * (double)pairs[i][0] * (double)pairs[i][1]);
        assert_true(want > 0 && isfinite(want));
        assert_true(fabsf(get(&p.out, 3, 3) / want - 1) < 1e-6f);
    }
    drop_product(&p);
}

/* One bad element spoils its row and nothing else; unchanged means unchanged. */
static void gemm_keeps_bad_values_local(void **state)
{
    (void)state;
    struct product p = make_product(40, 50, 300, 0);
    p.a.m.data[7 * p.a.m.ld + 299] = 0x7F;
    p.b.m.data[9 * p.b.m.ld + 128] = 0xFF;
    assert_int_equal(run_product(&p), FP8_OK);
    for (int64_t i = 0; i < 40; i++) {
        for (int64_t j = 0; j < 50; j++)
            assert_int_equal(isnan(get(&p.out, i, j)) != 0, i == 7 || j == 9);
    }
    put(&p.out, 0, 0, -0.0f);
    put(&p.out, 0, 1, NAN);
    p.depth = 0;
    p.accumulate = true;
    float before = get(&p.out, 3, 3);
    assert_int_equal(run_product(&p), FP8_OK);
    assert_true(signbit(get(&p.out, 0, 0)) && isnan(get(&p.out, 0, 1)) &&
                get(&p.out, 3, 3) == before);
    p.accumulate = false;
    assert_int_equal(run_product(&p), FP8_OK);
    assert_true(get(&p.out, 0, 1) == 0.0f);
    drop_product(&p);
}

/* ---- variants ---- */

static void variants_agree_bit_for_bit(void **state)
{
    (void)state;
    enum { ROWS = 48, COLS = 64 };
    static uint8_t a[ROWS][128], b[COLS][128];
    static float source[128 * 4];
    random_state = 6000;
    for (int i = 0; i < 128 * 4; i++)
        source[i] = i % 50 == 0 ? INFINITY : fp8_float_of_bits(random_bits() << 1);
    for (int k = 0; k < 128; k++) {
        for (int i = 0; i < ROWS; i++)
            a[i][k] = (uint8_t)random_below(0x7F);
        for (int j = 0; j < COLS; j++)
            b[j][k] = (uint8_t)(random_below(0x7F) | random_below(2) << 7);
    }
    double first_sums[ROWS][COLS];
    uint8_t first_codes[2][2][128];
    uint32_t first_amax[2];
    double first_add[2][128], factors[COLS + 5];
    uint32_t first_columns[2][128];
    float scales[128];
    for (int i = 0; i < 128; i++)
        scales[i] = 0.37f * (float)(1 + i % 5);
    for (int i = 0; i < COLS + 5; i++)
        factors[i] = 1.0 / (3 + i);
    bool have = false;
    for (int32_t index = 0, end = 0;; index++) {
        const struct fp8_host_simd *simd = fp8_host_simd_variant(index, &end);
        if (end)
            break;
        if (simd == NULL)
            continue;
        static float pa[128 * ROWS], pb[128 * COLS];
        double sums[ROWS][COLS] = { { 0 } };
        for (int depth = 127; depth <= 128; depth++) {
            for (int64_t i = 0; i < ROWS; i += simd->tile_rows) {
                for (int64_t j = 0; j < COLS; j += simd->tile_cols) {
                    for (int k = 0; k < depth; k++) {
                        for (int64_t r = 0; r < simd->tile_rows; r++)
                            pa[k * simd->tile_rows + r] = fp8_decode_e4m3(a[i + r][k]);
                        for (int64_t c = 0; c < simd->tile_cols; c++)
                            pb[k * simd->tile_cols + c] = fp8_decode_e4m3(b[j + c][k]);
                    }
                    simd->multiply(pa, pb, depth, depth == 127 ? NULL : factors + i,
                                   factors + 5 + j, &sums[i][j], COLS);
                }
            }
        }
        uint8_t codes[2][2][128];
        uint32_t amax[2];
        double add[2][128] = { { 0 } };
        uint32_t columns[2][128] = { { 0 } };
        for (int from = 0; from < 2; from++) {
            for (int to = 0; to < 2; to++)
                simd->encode[from][to](source, scales, codes[from][to]);
            uint32_t bad = 0;
            amax[from] = simd->amax[from](source, 2, &bad);
            assert_int_equal(bad, 1);
            simd->add[from](source + 1, add[from]);
            bad = 0;
            for (int i = 0; i < 3; i++)
                simd->column_amax[from](source + 128 * i, columns[from], &bad);
            assert_int_equal(bad, 1);
        }
        if (!have) {
            memcpy(first_sums, sums, sizeof sums);
            memcpy(first_codes, codes, sizeof codes);
            memcpy(first_amax, amax, sizeof amax);
            memcpy(first_add, add, sizeof add);
            memcpy(first_columns, columns, sizeof columns);
            have = true;
        }
        assert_memory_equal(first_sums, sums, sizeof sums);
        assert_memory_equal(first_codes, codes, sizeof codes);
        assert_memory_equal(first_amax, amax, sizeof amax);
        assert_memory_equal(first_add, add, sizeof add);
        assert_memory_equal(first_columns, columns, sizeof columns);
    }
    assert_true(have);
}

/* What no recipe has is refused, not computed as something else. */
static void gemm_refuses_what_it_does_not_have(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        struct product p = make_product(4, 4, 64, which == 0 ? 5 : 0);
        if (which == 0)
            p.how.scaling = FP8_SCALING_TENSOR; /* bf16 with scales */
        if (which == 1)
            p.how.second_scaling = FP8_SCALING_NONE; /* FP8 without */
        if (which == 2)
            p.how.transposed = true; /* FP8 across the depth */
        assert_int_equal(run_product(&p), FP8_ERR_UNSUPPORTED);
        drop_product(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gemm_matches_float64),
        cmocka_unit_test(gemm_scales_neither_vanish_nor_overflow),
        cmocka_unit_test(gemm_keeps_bad_values_local),
        cmocka_unit_test(gemm_refuses_what_it_does_not_have),
        cmocka_unit_test(variants_agree_bit_for_bit),
    };
    if (fp8_pool_create(3, &pool) != FP8_OK)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fp8_pool_destroy(pool);
    return failed;
}
