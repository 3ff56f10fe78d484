/*
 * test_host.c - the ops of the host backend, one by one, against plain loops.
 *
 * Buffers are exact, with guard bytes on both sides, at every element offset and with a leading dim of
 * their own; outputs and pads start as 0xFF. The instruction-set variants are compared with each other bit
 * for bit, and the whole backend with itself under a caller that flushes subnormals.
 */
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "runtime/fp8_format.h"
#include "runtime/host.h"
#include "runtime/host_simd.h"

enum { GUARD = 256, PARTIALS = 1024 };

static struct fp8_pool *pool;
static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

static int64_t random_below(int64_t limit)
{
    return (int64_t)(random_bits() % (uint32_t)limit);
}

/* Zero-mean, of mixed sizes. */
static float random_value(void)
{
    float unit = (float)random_bits() / 1073741824.0f - 1.0f;
    return ldexpf(unit, (int)random_below(9) - 4);
}

/* ---- exact matrices between guards ---- */

struct matrix {
    fp8_dtype dtype;
    int64_t rows, cols, ld;
    unsigned char *block, *data;
    size_t bytes; /* from data to the end of the last row */
};

static struct matrix make(fp8_dtype dtype, int64_t rows, int64_t cols, int64_t ld, int64_t offset)
{
    size_t element = fp8_dtype_bytes(dtype);
    struct matrix m = { .dtype = dtype, .rows = rows, .cols = cols, .ld = ld };
    m.bytes = rows == 0 ? 0 : (size_t)((rows - 1) * ld + cols) * element;
    size_t total = m.bytes + 2 * GUARD + (size_t)offset * element;
    m.block = malloc(total);
    assert_non_null(m.block);
    memset(m.block, 0xFF, total);
    m.data = m.block + GUARD + (size_t)offset * element;
    return m;
}

/* Guards and the gaps between rows are whole. */
static void check_guards(const struct matrix *m)
{
    size_t element = fp8_dtype_bytes(m->dtype);
    for (const unsigned char *p = m->block; p < m->data; p++)
        assert_int_equal(*p, 0xFF);
    for (int i = 0; i < GUARD; i++)
        assert_int_equal(m->data[m->bytes + (size_t)i], 0xFF);
    for (int64_t i = 0; i + 1 < m->rows; i++) {
        const unsigned char *gap = m->data + (size_t)(i * m->ld + m->cols) * element;
        for (size_t j = 0; j < (size_t)(m->ld - m->cols) * element; j++)
            assert_int_equal(gap[j], 0xFF);
    }
}

static void drop(struct matrix *m)
{
    check_guards(m);
    free(m->block);
}

static float get(const struct matrix *m, int64_t i, int64_t j)
{
    size_t at = (size_t)(i * m->ld + j);
    if (m->dtype == FP8_DTYPE_FP32)
        return ((const float *)m->data)[at];
    return fp8_bf16_to_float(((const uint16_t *)m->data)[at]);
}

static void put(struct matrix *m, int64_t i, int64_t j, float value)
{
    size_t at = (size_t)(i * m->ld + j);
    if (m->dtype == FP8_DTYPE_FP32)
        ((float *)m->data)[at] = value;
    else
        ((uint16_t *)m->data)[at] = fp8_float_to_bf16(value);
}

static struct matrix make_random(fp8_dtype dtype, int64_t rows, int64_t cols)
{
    struct matrix m =
        make(dtype, rows, cols, cols + random_below(3) * random_below(20), random_below(9));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++)
            put(&m, i, j, random_value());
    }
    return m;
}

static int64_t round_up(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

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
        for (int64_t i = m->rows; i < q->transposed.cols; i++)
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
    static const fp8_dtype dtypes[] = { FP8_DTYPE_BF16, FP8_DTYPE_FP32 };
    for (int round = 0; round < 80; round++) {
        random_state = 3000 + (uint64_t)round;
        fp8_semantics how = { .source_dtype = dtypes[round % 2],
                              .target_dtype = dtypes[round / 2 % 2],
                              .accumulate = round / 4 % 2 == 1 };
        struct matrix source =
            make_random(how.source_dtype, random_below(50), 1 + random_below(200));
        struct matrix target = make(how.target_dtype, source.rows, source.cols,
                                    source.cols + round % 4, random_below(9));
        for (int64_t i = 0; how.accumulate && i < target.rows; i++) {
            for (int64_t j = 0; j < target.cols; j++)
                put(&target, i, j, (float)(i - j) / 8);
        }
        fp8_value args[FP8_STORE_ARG_COUNT] = {
            [FP8_STORE_source].p = source.data, [FP8_STORE_source_ld].i = source.ld,
            [FP8_STORE_target].p = target.data, [FP8_STORE_target_ld].i = target.ld,
            [FP8_STORE_rows].i = source.rows,   [FP8_STORE_cols].i = source.cols,
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
                put(&one, 0, 0, old + get(&source, i, j));
                assert_true(get(&target, i, j) == get(&one, 0, 0));
            }
        }
        drop(&one);
        drop(&source);
        drop(&target);
    }
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

/* ---- gemm ---- */

struct product {
    int64_t rows, cols, depth;
    struct matrix a, b, bias, out;
    float a_scales[16], b_scales[16];
    fp8_semantics how;
    bool accumulate, with_bias;
};

static struct matrix make_codes(int64_t rows, int64_t depth, uint8_t highest)
{
    struct matrix m = make(FP8_DTYPE_E4M3, rows, depth, depth + random_below(20), random_below(3));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < depth; k++)
            m.data[i * m.ld + k] = (uint8_t)(random_below(highest + 1) | (random_below(2) << 7));
    }
    return m;
}

static fp8_status run_product(struct product *p)
{
    fp8_value args[FP8_GEMM_ARG_COUNT] = {
        [FP8_GEMM_a].p = p->a.data,
        [FP8_GEMM_a_ld].i = p->a.ld,
        [FP8_GEMM_b].p = p->b.data,
        [FP8_GEMM_b_ld].i = p->b.ld,
        [FP8_GEMM_a_scales].p = p->a_scales,
        [FP8_GEMM_b_scales].p = p->b_scales,
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

static double decoded(fp8_dtype format, uint8_t code)
{
    return (double)(format == FP8_DTYPE_E4M3 ? fp8_decode_e4m3(code) : fp8_decode_e5m2(code));
}

static void check_product(const struct product *p, const struct matrix *old)
{
    double factor = (double)p->a_scales[4] * (double)p->b_scales[4];
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t j = 0; j < p->cols; j++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < p->depth; k++) {
                double term = decoded(p->how.source_dtype, p->a.data[i * p->a.ld + k]) *
                              decoded(p->how.second_dtype, p->b.data[j * p->b.ld + k]);
                sum += term;
                size += fabs(term);
            }
            double want = sum * factor;
            if (p->with_bias)
                want += (double)get(&p->bias, 0, j);
            if (p->accumulate)
                want += (double)get(old, i, j);
            double step = p->how.target_dtype == FP8_DTYPE_FP32 ? 0x1p-24 : 0x1p-8;
            double bound = 0x1p-19 * size * factor + step * fabs(want) * 1.01;
            double got = (double)get(&p->out, i, j);
            if (!(fabs(got - want) <= bound))
                fail_msg("gemm %lld x %lld x %lld [%lld,%lld]: %g, not %g", (long long)p->rows,
                         (long long)p->cols, (long long)p->depth, (long long)i, (long long)j, got,
                         want);
        }
    }
}

static struct product make_product(int64_t rows, int64_t cols, int64_t depth, int round)
{
    struct product p = { .rows = rows, .cols = cols, .depth = depth };
    p.how.source_dtype = round % 3 == 1 ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    p.how.second_dtype = round % 3 == 2 ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    p.how.target_dtype = round % 2 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32;
    p.accumulate = round / 2 % 2 == 1;
    p.with_bias = round / 4 % 2 == 1;
    p.a = make_codes(rows, depth, p.how.source_dtype == FP8_DTYPE_E4M3 ? 0x7E : 0x7B);
    p.b = make_codes(cols, depth, p.how.second_dtype == FP8_DTYPE_E4M3 ? 0x7E : 0x7B);
    p.bias = make_random(FP8_DTYPE_BF16, 1, cols);
    p.out = make(p.how.target_dtype, rows, cols, cols + random_below(4), random_below(9));
    p.a_scales[4] = 0.0123f;
    p.b_scales[4] = 1.7e-3f;
    return p;
}

static void drop_product(struct product *p)
{
    drop(&p->a);
    drop(&p->b);
    drop(&p->bias);
    drop(&p->out);
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
    memset(p.a.data, 0x7E, p.a.bytes);
    memset(p.b.data, 0x7E, p.b.bytes);
    static const float pairs[][2] = {
        { 1e-20f, 1e-20f }, { 1e-45f, 3e38f }, { 3e38f, 1e-45f }, { 1e-38f, 1e-3f }
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        p.a_scales[4] = pairs[i][0];
        p.b_scales[4] = pairs[i][1];
        assert_int_equal(run_product(&p), FP8_OK);
        float want = (float)(448.0 * 448 * 64 * (double)pairs[i][0] * (double)pairs[i][1]);
        assert_true(want > 0 && isfinite(want));
        assert_true(fabsf(get(&p.out, 3, 3) / want - 1) < 1e-6f);
    }
    free(p.a.block);
    free(p.b.block);
    drop(&p.bias);
    drop(&p.out);
}

/* One bad element spoils its row and nothing else; unchanged means unchanged. */
static void gemm_keeps_bad_values_local(void **state)
{
    (void)state;
    struct product p = make_product(40, 50, 300, 0);
    p.a.data[7 * p.a.ld + 299] = 0x7F;
    p.b.data[9 * p.b.ld + 128] = 0xFF;
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

/* ---- variants and modes ---- */

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
    double first_add[2][128];
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
                    simd->multiply(pa, pb, depth, &sums[i][j], COLS);
                }
            }
        }
        uint8_t codes[2][2][128];
        uint32_t amax[2];
        double add[2][128] = { { 0 } };
        for (int from = 0; from < 2; from++) {
            for (int to = 0; to < 2; to++)
                simd->encode[from][to](source, 0.37f, codes[from][to]);
            uint32_t bad = 0;
            amax[from] = simd->amax[from](source, 2, &bad);
            assert_int_equal(bad, 1);
            simd->add[from](source + 1, add[from]);
        }
        if (!have) {
            memcpy(first_sums, sums, sizeof sums);
            memcpy(first_codes, codes, sizeof codes);
            memcpy(first_amax, amax, sizeof amax);
            memcpy(first_add, add, sizeof add);
            have = true;
        }
        assert_memory_equal(first_sums, sums, sizeof sums);
        assert_memory_equal(first_codes, codes, sizeof codes);
        assert_memory_equal(first_amax, amax, sizeof amax);
        assert_memory_equal(first_add, add, sizeof add);
    }
    assert_true(have);
}

/* A caller may run with subnormals flushed or another rounding; results do not change, nor does its mode. */
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
    fp8_semantics none = { 0 },
                  int8 = { FP8_DTYPE_UINT8, FP8_DTYPE_UINT8, FP8_DTYPE_UINT8, false, false };
    for (int op = 0; op < FP8_OP_COUNT; op++) {
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
        cmocka_unit_test(dequantize_takes_either_copy),
        cmocka_unit_test(gemm_matches_float64),
        cmocka_unit_test(gemm_scales_neither_vanish_nor_overflow),
        cmocka_unit_test(gemm_keeps_bad_values_local),
        cmocka_unit_test(variants_agree_bit_for_bit),
        cmocka_unit_test(callers_mode_does_not_matter),
        cmocka_unit_test(refuses_dtypes_it_does_not_take),
    };
    if (fp8_pool_create(3, &pool) != FP8_OK)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fp8_pool_destroy(pool);
    return failed;
}
