/*
 * test_host.c - the memory-bound ops of the host backend, one by one, against plain loops.
 *
 * Buffers are exact, with guard bytes on both sides, at every element offset and with a leading dim
 * of their own; outputs and pads start as 0xFF. The backend is also compared with itself under a
 * caller that flushes subnormals and rounds upward.
 */
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdio.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "runtime/fp8_format.h"
#include "runtime/host.h"
#include "tests/unit/matrix.h"

enum { PARTIALS = 1024 };

static struct fp8_pool *pool;

/* ---- amax and quantize ---- */

struct quantized {
    uint32_t partials[PARTIALS];
    uint32_t found_inf;
    float scales[16];
    struct matrix row, transposed, sums;
};

static fp8_status amax_of(const struct matrix *m, struct quantized *q, bool dbias)
{
    fp8_semantics how = { .source_dtype = m->dtype };
    fp8_value args[FP8_AMAX_ARG_COUNT] = { { 0 } };
    memset(q->partials, 0xFF, sizeof q->partials);
    args[FP8_AMAX_source].p = m->data;
    args[FP8_AMAX_source_ld].i = m->ld;
    args[FP8_AMAX_rows].i = m->rows;
    args[FP8_AMAX_cols].i = m->cols;
    args[FP8_AMAX_partials].p = q->partials;
    args[FP8_AMAX_n_partials].i = PARTIALS;
    args[FP8_AMAX_found_inf].p = &q->found_inf;
    args[FP8_AMAX_dbias_partials].p = dbias ? q->sums.data : NULL;
    args[FP8_AMAX_dbias_ld].i = q->sums.ld;
    return fp8_host_run(pool, FP8_OP_AMAX, &how, args);
}

static float largest_of(const struct quantized *q)
{
    uint32_t largest = 0;
    for (int i = 0; i < PARTIALS; i++)
        largest = largest > q->partials[i] ? largest : q->partials[i];
    return fp8_float_of_bits(largest);
}

static void amax_finds_the_largest_finite(void **state)
{
    (void)state;
    static const fp8_dtype dtypes[] = { FP8_DTYPE_BF16, FP8_DTYPE_FP32 };
    for (int round = 0; round < 300; round++) {
        random_state = (uint64_t)round;
        int64_t rows = random_below(40), cols = 1 + random_below(round % 10 == 0 ? 9000 : 300);
        struct matrix m = make_random(dtypes[round % 2], rows, cols);
        static struct quantized q;
        q.found_inf = 7;
        bool bad = rows > 0 && round % 3 == 0;
        if (bad)
            put(&m, random_below(rows), random_below(cols), round % 2 ? NAN : -INFINITY);
        float want = 0;
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < cols; j++) {
                if (isfinite(get(&m, i, j)))
                    want = fmaxf(want, fabsf(get(&m, i, j)));
            }
        }
        assert_int_equal(amax_of(&m, &q, false), FP8_OK);
        assert_true(largest_of(&q) == want);
        assert_int_equal(q.found_inf, bad ? 1 : 7);
        drop(&m);
    }
}

/* `pad` more rows and columns than the rules ask for are zeros too. */
static fp8_status quantize(const struct matrix *m, struct quantized *q, const fp8_semantics *how,
                           unsigned copies, int64_t pad)
{
    q->row = make(FP8_DTYPE_E4M3, round_up(m->rows, 16) + pad, round_up(m->cols, 128) + pad,
                  round_up(m->cols, 128) + pad, 0);
    q->transposed = make(FP8_DTYPE_E4M3, round_up(m->cols, 16) + pad, round_up(m->rows, 128) + pad,
                         round_up(m->rows, 128) + pad, 0);
    fp8_value args[FP8_QUANTIZE_ARG_COUNT] = { { 0 } };
    args[FP8_QUANTIZE_source].p = m->data;
    args[FP8_QUANTIZE_source_ld].i = m->ld;
    args[FP8_QUANTIZE_rows].i = m->rows;
    args[FP8_QUANTIZE_cols].i = m->cols;
    args[FP8_QUANTIZE_partials].p = q->partials;
    args[FP8_QUANTIZE_n_partials].i = PARTIALS;
    args[FP8_QUANTIZE_scales].p = q->scales;
    args[FP8_QUANTIZE_row].p = copies & FP8_COPY_ROW ? q->row.data : NULL;
    args[FP8_QUANTIZE_row_ld].i = q->row.ld;
    args[FP8_QUANTIZE_row_rows].i = q->row.rows;
    args[FP8_QUANTIZE_transposed].p = copies & FP8_COPY_TRANSPOSED ? q->transposed.data : NULL;
    args[FP8_QUANTIZE_transposed_ld].i = q->transposed.ld;
    args[FP8_QUANTIZE_transposed_rows].i = q->transposed.rows;
    return fp8_host_run(pool, FP8_OP_QUANTIZE, how, args);
}

static void check_copies(const struct matrix *m, const struct quantized *q,
                         const fp8_semantics *how, unsigned copies)
{
    bool e4m3 = how->target_dtype == FP8_DTYPE_E4M3;
    float amax = largest_of(q);
    float scale = fp8_scale_of_amax(amax, e4m3 ? 448.0f : 57344.0f, how->power_of_two);
    assert_true(q->scales[0] == scale && q->scales[4] == 1.0f / scale && q->scales[8] == amax);
    for (int i = 0; i < 16; i++)
        assert_true(i == 0 || i == 4 || i == 8 || q->scales[i] == 0.0f);
    for (int64_t i = 0; i < q->row.rows; i++) {
        for (int64_t j = 0; j < q->row.cols; j++) {
            uint8_t want = 0;
            if (i < m->rows && j < m->cols)
                want = e4m3 ? fp8_encode_e4m3(get(m, i, j), scale)
                            : fp8_encode_e5m2(get(m, i, j), scale);
            if (copies & FP8_COPY_ROW)
                assert_int_equal(q->row.data[i * q->row.ld + j], want);
            if (copies & FP8_COPY_TRANSPOSED && j < q->transposed.rows && i < q->transposed.cols)
                assert_int_equal(q->transposed.data[j * q->transposed.ld + i], want);
        }
    }
    for (int64_t j = 0; j < q->transposed.rows && copies & FP8_COPY_TRANSPOSED; j++) {
        for (int64_t i = m->rows; i < q->transposed.cols && i < round_up(m->rows, 128); i++)
            assert_int_equal(q->transposed.data[j * q->transposed.ld + i], 0);
    }
}

static void quantize_writes_both_copies_and_pads(void **state)
{
    (void)state;
    static const unsigned copies[] = { FP8_COPY_BOTH, FP8_COPY_ROW, FP8_COPY_TRANSPOSED };
    for (int round = 0; round < 200; round++) {
        random_state = 1000 + (uint64_t)round;
        fp8_semantics how = {
            .source_dtype = round % 2 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32,
            .target_dtype = round % 4 < 2 ? FP8_DTYPE_E4M3 : FP8_DTYPE_E5M2,
            .power_of_two = round % 3 == 0,
        };
        struct matrix m = make_random(how.source_dtype, random_below(300), 1 + random_below(300));
        if (m.rows > 0 && round % 5 == 0) {
            put(&m, random_below(m.rows), random_below(m.cols), NAN);
            put(&m, random_below(m.rows), random_below(m.cols), -INFINITY);
        }
        static struct quantized q;
        assert_int_equal(amax_of(&m, &q, false), FP8_OK);
        assert_int_equal(quantize(&m, &q, &how, copies[round % 3], round % 7 == 0 ? 16 : 0),
                         FP8_OK);
        check_copies(&m, &q, &how, copies[round % 3]);
        drop(&q.row);
        drop(&q.transposed);
        drop(&m);
    }
}

/* dbias is the column sum of the unquantised source, added or written. */
static void dbias_is_the_column_sum(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        random_state = 2000 + (uint64_t)round;
        fp8_dtype dtype = round % 2 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32;
        struct matrix m = make_random(dtype, random_below(600), 1 + random_below(300));
        struct matrix dbias = make(FP8_DTYPE_FP32, 1, m.cols, m.cols, random_below(5));
        static struct quantized q;
        q.sums = make(FP8_DTYPE_FP32, (m.rows + 127) / 128, m.cols, round_up(m.cols, 128), 0);
        bool accumulate = round % 3 == 0;
        for (int64_t j = 0; accumulate && j < m.cols; j++)
            put(&dbias, 0, j, 3.0f);
        assert_int_equal(amax_of(&m, &q, true), FP8_OK);

        fp8_semantics how = { .source_dtype = dtype, .target_dtype = FP8_DTYPE_E5M2 };
        fp8_value args[FP8_QUANTIZE_ARG_COUNT] = { { 0 } };
        args[FP8_QUANTIZE_source].p = m.data;
        args[FP8_QUANTIZE_source_ld].i = m.ld;
        args[FP8_QUANTIZE_rows].i = m.rows;
        args[FP8_QUANTIZE_cols].i = m.cols;
        args[FP8_QUANTIZE_partials].p = q.partials;
        args[FP8_QUANTIZE_n_partials].i = PARTIALS;
        args[FP8_QUANTIZE_scales].p = q.scales;
        args[FP8_QUANTIZE_dbias].p = dbias.data;
        args[FP8_QUANTIZE_dbias_partials].p = q.sums.data;
        args[FP8_QUANTIZE_dbias_ld].i = q.sums.ld;
        args[FP8_QUANTIZE_accumulate].i = accumulate;
        assert_int_equal(fp8_host_run(pool, FP8_OP_QUANTIZE, &how, args), FP8_OK);
        for (int64_t j = 0; j < m.cols; j++) {
            double sum = accumulate ? 3.0 : 0.0, size = 3.0;
            for (int64_t i = 0; i < m.rows; i++) {
                sum += (double)get(&m, i, j);
                size += fabs((double)get(&m, i, j));
            }
            assert_true(fabs((double)get(&dbias, 0, j) - sum) <= 1e-6 * size);
        }
        drop(&q.sums);
        drop(&dbias);
        drop(&m);
    }
}

/* ---- store and dequantize ---- */

static void store_converts_and_adds(void **state)
{
    (void)state;
    static const fp8_dtype dtypes[] = { FP8_DTYPE_BF16, FP8_DTYPE_FP32, FP8_DTYPE_FP16 };
    for (int round = 0; round < 80; round++) {
        random_state = 3000 + (uint64_t)round;
        fp8_semantics how = { .source_dtype = dtypes[round % 3],
                              .target_dtype = dtypes[round / 3 % 3],
                              .accumulate = round / 9 % 2 == 1 };
        struct matrix source =
            make_random(how.source_dtype, random_below(50), 1 + random_below(200));
        struct matrix target = make(how.target_dtype, source.rows, source.cols,
                                    source.cols + round % 4, random_below(9));
        struct matrix bias = make_random(FP8_DTYPE_BF16, 1, source.cols);
        struct matrix scales[2] = { make_random(FP8_DTYPE_FP32, 1, source.rows + 1),
                                    make_random(FP8_DTYPE_FP32, 1, source.cols) };
        bool has_bias = round % 4 == 1, is_scaled = round % 3 == 2;
        int64_t steps[2] = { round % 5 != 0, round % 7 != 0 };
        for (int64_t i = 0; how.accumulate && i < target.rows; i++) {
            for (int64_t j = 0; j < target.cols; j++)
                put(&target, i, j, (float)(i - j) / 8);
        }
        fp8_value args[FP8_STORE_ARG_COUNT] = {
            [FP8_STORE_source].p = source.data,
            [FP8_STORE_source_ld].i = source.ld,
            [FP8_STORE_target].p = target.data,
            [FP8_STORE_target_ld].i = target.ld,
            [FP8_STORE_rows].i = source.rows,
            [FP8_STORE_cols].i = source.cols,
            [FP8_STORE_bias].p = has_bias ? bias.data : NULL,
            [FP8_STORE_a_scales].p = is_scaled ? scales[0].data : NULL,
            [FP8_STORE_a_scales_step].i = steps[0],
            [FP8_STORE_b_scales].p = is_scaled ? scales[1].data : NULL,
            [FP8_STORE_b_scales_step].i = steps[1],
        };
        assert_int_equal(fp8_host_run(pool, FP8_OP_STORE, &how, args), FP8_OK);
        struct matrix one = make(how.target_dtype, 1, 1, 1, 0);
        for (int64_t i = 0; i < target.rows; i++) {
            for (int64_t j = 0; j < target.cols; j++) {
                float old = 0;
                if (how.accumulate) {
                    put(&one, 0, 0, (float)(i - j) / 8);
                    old = get(&one, 0, 0);
                }
                float value = get(&source, i, j);
                float a = get(&scales[0], 0, i * steps[0]), b = get(&scales[1], 0, j * steps[1]);
                if (is_scaled)
                    value = value * fminf(a, b) * fmaxf(a, b);
                if (has_bias)
                    value += get(&bias, 0, j);
                put(&one, 0, 0, old + value);
                assert_true(get(&target, i, j) == get(&one, 0, 0));
            }
        }
        drop(&one);
        drop(&bias);
        drop(&scales[0]);
        drop(&scales[1]);
        drop(&source);
        drop(&target);
    }
}

/* The product of the scales, and that of the sum and the larger one, are beyond float32. */
static void store_takes_the_smaller_scale_first(void **state)
{
    (void)state;
    const fp8_semantics how = { .source_dtype = FP8_DTYPE_FP32, .target_dtype = FP8_DTYPE_FP32 };
    float source[2] = { 1e5f, 1e-6f }, target[2];
    float rows[1] = { 0x1p120f }, cols[2] = { 0x1p-30f, 0x1p15f };
    const fp8_value args[FP8_STORE_ARG_COUNT] = {
        [FP8_STORE_source].p = source, [FP8_STORE_source_ld].i = 2,
        [FP8_STORE_a_scales].p = rows, [FP8_STORE_a_scales_step].i = 1,
        [FP8_STORE_b_scales].p = cols, [FP8_STORE_b_scales_step].i = 1,
        [FP8_STORE_target].p = target, [FP8_STORE_target_ld].i = 2,
        [FP8_STORE_rows].i = 1,        [FP8_STORE_cols].i = 2,
    };
    assert_int_equal(fp8_host_run(pool, FP8_OP_STORE, &how, args), FP8_OK);
    assert_true(target[0] == 1e5f * 0x1p90f);
    assert_true(target[1] == 1e-6f * 0x1p15f * 0x1p120f && isfinite(target[1]));
}

static void dequantize_takes_either_copy(void **state)
{
    (void)state;
    for (int round = 0; round < 40; round++) {
        random_state = 4000 + (uint64_t)round;
        bool e4m3 = round % 2 == 0;
        fp8_semantics how = { .source_dtype = FP8_DTYPE_FP32,
                              .target_dtype = e4m3 ? FP8_DTYPE_E4M3 : FP8_DTYPE_E5M2 };
        struct matrix m = make_random(FP8_DTYPE_FP32, random_below(70), 1 + random_below(200));
        static struct quantized q;
        amax_of(&m, &q, false);
        quantize(&m, &q, &how, FP8_COPY_BOTH, 0);
        for (int transposed = 0; transposed < 2; transposed++) {
            struct matrix target =
                make(FP8_DTYPE_FP32, m.rows, m.cols, m.cols + round % 3, round % 4);
            fp8_semantics back = { .source_dtype = how.target_dtype,
                                   .target_dtype = FP8_DTYPE_FP32 };
            fp8_value args[FP8_DEQUANTIZE_ARG_COUNT] = {
                [FP8_DEQUANTIZE_source].p = transposed ? q.transposed.data : q.row.data,
                [FP8_DEQUANTIZE_source_ld].i = transposed ? q.transposed.ld : q.row.ld,
                [FP8_DEQUANTIZE_scales].p = q.scales,
                [FP8_DEQUANTIZE_target].p = target.data,
                [FP8_DEQUANTIZE_target_ld].i = target.ld,
                [FP8_DEQUANTIZE_rows].i = m.rows,
                [FP8_DEQUANTIZE_cols].i = m.cols,
                [FP8_DEQUANTIZE_is_transposed].i = transposed,
            };
            assert_int_equal(fp8_host_run(pool, FP8_OP_DEQUANTIZE, &back, args), FP8_OK);
            for (int64_t i = 0; i < m.rows; i++) {
                for (int64_t j = 0; j < m.cols; j++) {
                    uint8_t code = q.row.data[i * q.row.ld + j];
                    float value = e4m3 ? fp8_decode_e4m3(code) : fp8_decode_e5m2(code);
                    assert_true(get(&target, i, j) == value * q.scales[4]);
                }
            }
            drop(&target);
        }
        drop(&q.row);
        drop(&q.transposed);
        drop(&m);
    }
}

/* ---- modes and refusals ---- */

/* A caller may run with subnormals flushed or another rounding; results do not change, nor does its
 * mode. */
static void callers_mode_does_not_matter(void **state)
{
    (void)state;
    random_state = 7000;
    struct matrix m = make(FP8_DTYPE_FP32, 130, 70, 70, 0);
    for (int64_t i = 0; i < m.rows; i++) {
        for (int64_t j = 0; j < m.cols; j++)
            put(&m, i, j, random_value() * 1e-38f);
    }
    fp8_semantics how = { .source_dtype = FP8_DTYPE_FP32, .target_dtype = FP8_DTYPE_E4M3 };
    static struct quantized plain, odd;
    assert_int_equal(amax_of(&m, &plain, false), FP8_OK);
    assert_int_equal(quantize(&m, &plain, &how, FP8_COPY_BOTH, 0), FP8_OK);
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040u);
#endif
    fp8_status first = amax_of(&m, &odd, false);
    fp8_status second = quantize(&m, &odd, &how, FP8_COPY_BOTH, 0);
#if defined(__x86_64__)
    unsigned after = _mm_getcsr();
    _mm_setcsr(mode);
    assert_int_equal(after & 0xFFC0u, (mode | 0x8040u) & 0xFFC0u);
#endif
    assert_int_equal(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
    assert_int_equal(first, FP8_OK);
    assert_int_equal(second, FP8_OK);
    assert_memory_equal(plain.scales, odd.scales, sizeof odd.scales);
    assert_memory_equal(plain.row.data, odd.row.data, odd.row.bytes);
    assert_memory_equal(plain.transposed.data, odd.transposed.data, odd.transposed.bytes);
    assert_true(plain.scales[4] > 0 &&
                plain.scales[4] < FLT_MIN); /* the case is what it claims to be */
    drop(&plain.row);
    drop(&plain.transposed);
    drop(&odd.row);
    drop(&odd.transposed);
    drop(&m);
}

static void refuses_dtypes_it_does_not_take(void **state)
{
    (void)state;
    fp8_value args[FP8_OP_MAX_ARGS] = { { 0 } };
    fp8_semantics none = { 0 }, int8 = { .source_dtype = FP8_DTYPE_UINT8,
                                         .second_dtype = FP8_DTYPE_UINT8,
                                         .target_dtype = FP8_DTYPE_UINT8 };
    for (int op = 0; op < FP8_OP_COUNT; op++) {
        if (op == FP8_OP_COLUMN_SUMS || op == FP8_OP_COLUMN_MAXIMA || op == FP8_OP_TRANSPOSE ||
            op == FP8_OP_ROLL)
            continue; /* these have no dtypes */
        assert_int_equal(fp8_host_run(pool, (enum fp8_op)op, &none, args), FP8_ERR_UNSUPPORTED);
        assert_int_equal(fp8_host_run(pool, (enum fp8_op)op, &int8, args), FP8_ERR_UNSUPPORTED);
        assert_true(strlen(fp8_last_error()) > 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(amax_finds_the_largest_finite),
        cmocka_unit_test(quantize_writes_both_copies_and_pads),
        cmocka_unit_test(dbias_is_the_column_sum),
        cmocka_unit_test(store_converts_and_adds),
        cmocka_unit_test(store_takes_the_smaller_scale_first),
        cmocka_unit_test(dequantize_takes_either_copy),
        cmocka_unit_test(callers_mode_does_not_matter),
        cmocka_unit_test(refuses_dtypes_it_does_not_take),
    };
    if (fp8_pool_create(3, &pool) != FP8_OK)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fp8_pool_destroy(pool);
    return failed;
}
