/*
 * test_host_tables.c - the host backend's quantising ops against tests/oracle/op_tables.h (numpy
 * and ml_dtypes): codes, scales and padding of whole matrices, every granularity, both copies.
 *
 * Every output starts as 0xFF or 0x7E, lies between guard bytes and is compared whole.
 */
#include <stdio.h>

#include "runtime/fp8_format.h"
#include "runtime/host.h"
#include "tests/oracle/op_tables.h"
#include "tests/unit/crc.h"
#include "tests/unit/matrix.h"

static struct fp8_pool *pool;

/* ---- the matrices of make_op_tables.py ---- */

static uint32_t bits_at(const struct op_case *c, int64_t row, int64_t col)
{
    uint32_t h = (uint32_t)(row * c->cols + col + 1) * 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    uint32_t i = (uint32_t)row, j = (uint32_t)col, keep = h & 0x807FFFFFu;
    if (c->kind == OP_KIND_WILD)
        return h;
    if (c->kind == OP_KIND_TINY)
        return keep | (h >> 23) % 14 << 23;
    if (c->kind == OP_KIND_ALL)
        return (i * (uint32_t)c->cols + j) << 16;
    uint32_t bits = keep | (118u + (h >> 23 & 7u) + i % 5 - j % 3) << 23;
    if (c->kind == OP_KIND_LEVEL)
        return bits;
    if ((i % 3 == 0 && i < 60) || j % 5 == 0)
        bits &= 0x80000000u;
    if (i % 7 == 3 && i == j)
        bits = 0x7F800000u | i % 2 << 31;
    if (i % 11 == 4 && i + 1 == j)
        bits = 0xFFC00000u;
    return bits;
}

static struct matrix source_of(const struct op_case *c)
{
    int64_t cols = c->cols, shift = c->rows % 3;
    fp8_dtype dtype = c->bf16 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32;
    struct matrix m = make(dtype, c->rows, cols, cols + shift, shift);
    for (int64_t i = 0; i < c->rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            uint32_t bits = bits_at(c, i, j);
            if (c->bf16)
                ((uint16_t *)m.data)[i * m.ld + j] = (uint16_t)(bits >> 16);
            else
                ((uint32_t *)m.data)[i * m.ld + j] = bits;
        }
    }
    return m;
}

/* ---- outputs ---- */

struct outputs {
    struct matrix row, transposed, row_scales, transposed_scales, bands;
    uint32_t found_inf;
};

static struct matrix poisoned(fp8_dtype dtype, int64_t rows, int64_t cols, int poison)
{
    struct matrix m = make(dtype, rows, cols, cols, 0);
    memset(m.data, poison, m.bytes);
    return m;
}

static struct outputs make_outputs(const struct op_case *c, fp8_scaling scaling, int poison)
{
    int64_t rows = c->rows, cols = c->cols, down = (rows + 127) / 128, along = (cols + 127) / 128;
    struct outputs o = {
        .row = poisoned(FP8_DTYPE_E4M3, round_up(rows, 16), round_up(cols, 128), poison),
        .transposed = poisoned(FP8_DTYPE_E4M3, round_up(cols, 16), round_up(rows, 128), poison),
        .bands = poisoned(FP8_DTYPE_FP32, down, cols, poison),
    };
    int64_t lines[2] = { 1, 1 }, lds[2] = { 16, 16 };
    if (scaling == FP8_SCALING_ROW) {
        lds[0] = round_up(rows, 16);
        lds[1] = round_up(cols, 16);
    } else if (scaling == FP8_SCALING_BLOCK) {
        lines[0] = along;
        lines[1] = down;
        lds[0] = round_up(rows, 8);
        lds[1] = round_up(cols, 8);
    } else if (scaling == FP8_SCALING_TILE) {
        lines[0] = down;
        lines[1] = along;
        lds[0] = round_up(along, 4);
        lds[1] = round_up(down, 4);
    }
    o.row_scales = poisoned(FP8_DTYPE_FP32, lines[0], lds[0], poison);
    o.transposed_scales = poisoned(FP8_DTYPE_FP32, lines[1], lds[1], poison);
    return o;
}

static void drop_outputs(struct outputs *o)
{
    drop(&o->row);
    drop(&o->transposed);
    drop(&o->row_scales);
    drop(&o->transposed_scales);
    drop(&o->bands);
}

static void expect_sum(const struct op_case *c, const char *what, const struct matrix *m,
                       uint32_t want)
{
    uint32_t got = crc32_of(m->data, m->bytes);
    if (got != want)
        fail_msg("kind %d, %lld x %lld, %s%s from %s: %s has CRC 0x%08X, numpy's has 0x%08X",
                 (int)c->kind, (long long)c->rows, (long long)c->cols, c->e4m3 ? "e4m3" : "e5m2",
                 c->power_of_two ? ", power of two" : "", c->bf16 ? "bf16" : "fp32", what, got,
                 want);
}

static void expect_all(const struct op_case *c, const char *name, const struct outputs *o,
                       const uint32_t *sums)
{
    char what[64];
    const struct matrix *const parts[4] = { &o->row, &o->row_scales, &o->transposed,
                                            &o->transposed_scales };
    static const char *const names[4] = { "row copy", "row scales", "transposed copy",
                                          "transposed scales" };
    for (int i = 0; i < 4; i++) {
        snprintf(what, sizeof what, "%s, %s", name, names[i]);
        expect_sum(c, what, parts[i], sums[i]);
    }
    assert_int_equal(o->found_inf, c->found_inf);
}

/* ---- ops ---- */

static fp8_semantics semantics_of(const struct op_case *c, fp8_scaling scaling)
{
    return (fp8_semantics){
        .source_dtype = c->bf16 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32,
        .target_dtype = c->e4m3 ? FP8_DTYPE_E4M3 : FP8_DTYPE_E5M2,
        .power_of_two = c->power_of_two,
        .scaling = scaling,
    };
}

static void tensor(const struct op_case *c, const struct matrix *m, int poison)
{
    enum { PARTIALS = 64 };
    fp8_semantics how = semantics_of(c, FP8_SCALING_TENSOR);
    struct outputs o = make_outputs(c, FP8_SCALING_TENSOR, poison);
    float partials[PARTIALS], running = -1.0f;
    fp8_value args[FP8_FUSED_ARG_COUNT] = { { 0 } };
    put_source(args + FP8_FUSED_source, m);
    args[FP8_FUSED_partials].p = partials;
    args[FP8_FUSED_n_partials].i = PARTIALS;
    args[FP8_FUSED_scales].p = o.row_scales.data;
    put_copy(args + FP8_FUSED_row, &o.row);
    put_copy(args + FP8_FUSED_transposed, &o.transposed);
    args[FP8_FUSED_found_inf].p = &o.found_inf;
    assert_int_equal(fp8_host_run(pool, FP8_OP_FUSED, &how, args), FP8_OK);
    memcpy(o.transposed_scales.data, o.row_scales.data, o.row_scales.bytes);
    expect_all(c, "fused", &o, c->sums);

    /* the amax known beforehand: the same bytes */
    float amax = ((float *)o.row_scales.data)[FP8_SCALES_AMAX];
    fp8_value cast[FP8_CAST_ARG_COUNT] = { { 0 } };
    drop_outputs(&o);
    o = make_outputs(c, FP8_SCALING_TENSOR, poison);
    put_source(cast + FP8_CAST_source, m);
    cast[FP8_CAST_known].p = &amax;
    cast[FP8_CAST_known_is_amax].i = 1;
    cast[FP8_CAST_scales].p = o.row_scales.data;
    put_copy(cast + FP8_CAST_row, &o.row);
    put_copy(cast + FP8_CAST_transposed, &o.transposed);
    cast[FP8_CAST_amax].p = &running;
    cast[FP8_CAST_found_inf].p = &o.found_inf;
    assert_int_equal(fp8_host_run(pool, FP8_OP_CAST, &how, cast), FP8_OK);
    memcpy(o.transposed_scales.data, o.row_scales.data, o.row_scales.bytes);
    expect_all(c, "cast", &o, c->sums);
    assert_true(fp8_bits_of_float(running) == fp8_bits_of_float(amax));
    drop_outputs(&o);
}

/* The row copy alone, from one read: the same bytes. */
static void row_alone(const struct op_case *c, const struct matrix *m, int poison)
{
    fp8_semantics how = semantics_of(c, FP8_SCALING_ROW);
    struct outputs o = make_outputs(c, FP8_SCALING_ROW, poison);
    fp8_value args[FP8_QUANTIZE_ROW_ARG_COUNT] = { { 0 } };
    put_source(args + FP8_QUANTIZE_ROW_source, m);
    put_copy(args + FP8_QUANTIZE_ROW_row, &o.row);
    args[FP8_QUANTIZE_ROW_row_scales].p = o.row_scales.data;
    args[FP8_QUANTIZE_ROW_found_inf].p = &o.found_inf;
    assert_int_equal(fp8_host_run(pool, FP8_OP_QUANTIZE_ROW, &how, args), FP8_OK);
    expect_sum(c, "row alone, row copy", &o.row, c->sums[4]);
    expect_sum(c, "row alone, row scales", &o.row_scales, c->sums[5]);
    assert_int_equal(o.found_inf, c->found_inf);
    drop_outputs(&o);
}

static void lines(const struct op_case *c, const struct matrix *m, int poison)
{
    fp8_semantics how = semantics_of(c, FP8_SCALING_ROW);
    struct outputs o = make_outputs(c, FP8_SCALING_ROW, poison);
    struct matrix partials = poisoned(FP8_DTYPE_FP32, (c->cols + 127) / 128, c->rows, poison),
                  row_maxima = poisoned(FP8_DTYPE_FP32, 1, c->rows, poison),
                  column_maxima = poisoned(FP8_DTYPE_FP32, 1, c->cols, poison);
    fp8_value args[FP8_LINE_AMAX_ARG_COUNT] = { { 0 } };
    put_source(args + FP8_LINE_AMAX_source, m);
    args[FP8_LINE_AMAX_row_partials].p = partials.data;
    args[FP8_LINE_AMAX_row_partials_ld].i = partials.ld;
    args[FP8_LINE_AMAX_column_partials].p = o.bands.data;
    args[FP8_LINE_AMAX_column_partials_ld].i = o.bands.ld;
    args[FP8_LINE_AMAX_found_inf].p = &o.found_inf;
    assert_int_equal(fp8_host_run(pool, FP8_OP_LINE_AMAX, &how, args), FP8_OK);
    fp8_value scales[FP8_LINE_SCALES_ARG_COUNT] = {
        [FP8_LINE_SCALES_row_partials].p = partials.data,
        [FP8_LINE_SCALES_row_partials_ld].i = partials.ld,
        [FP8_LINE_SCALES_rows].i = c->rows,
        [FP8_LINE_SCALES_cols].i = c->cols,
        [FP8_LINE_SCALES_column_partials].p = o.bands.data,
        [FP8_LINE_SCALES_column_partials_ld].i = o.bands.ld,
        [FP8_LINE_SCALES_row_maxima].p = row_maxima.data,
        [FP8_LINE_SCALES_column_maxima].p = column_maxima.data,
        [FP8_LINE_SCALES_row_scales].p = o.row_scales.data,
        [FP8_LINE_SCALES_transposed_scales].p = o.transposed_scales.data,
    };
    assert_int_equal(fp8_host_run(pool, FP8_OP_LINE_SCALES, &how, scales), FP8_OK);
    fp8_value cast[FP8_QUANTIZE_LINES_ARG_COUNT] = { { 0 } };
    put_source(cast + FP8_QUANTIZE_LINES_source, m);
    cast[FP8_QUANTIZE_LINES_row_maxima].p = row_maxima.data;
    cast[FP8_QUANTIZE_LINES_column_maxima].p = column_maxima.data;
    put_copy(cast + FP8_QUANTIZE_LINES_row, &o.row);
    put_copy(cast + FP8_QUANTIZE_LINES_transposed, &o.transposed);
    assert_int_equal(fp8_host_run(pool, FP8_OP_QUANTIZE_LINES, &how, cast), FP8_OK);
    expect_all(c, "rowwise", &o, c->sums + 4);
    expect_sum(c, "column maxima", &o.bands, c->sums[16]);
    drop(&partials), drop(&row_maxima), drop(&column_maxima);
    drop_outputs(&o);
}

static void block(const struct op_case *c, const struct matrix *m, fp8_scaling scaling, int poison)
{
    fp8_semantics how = semantics_of(c, scaling);
    struct outputs o = make_outputs(c, scaling, poison);
    fp8_value args[FP8_QUANTIZE_BLOCK_ARG_COUNT] = { { 0 } };
    put_source(args + FP8_QUANTIZE_BLOCK_source, m);
    put_copy(args + FP8_QUANTIZE_BLOCK_row, &o.row);
    args[FP8_QUANTIZE_BLOCK_row_scales].p = o.row_scales.data;
    args[FP8_QUANTIZE_BLOCK_row_scales_ld].i = o.row_scales.ld;
    put_copy(args + FP8_QUANTIZE_BLOCK_transposed, &o.transposed);
    args[FP8_QUANTIZE_BLOCK_transposed_scales].p = o.transposed_scales.data;
    args[FP8_QUANTIZE_BLOCK_transposed_scales_ld].i = o.transposed_scales.ld;
    args[FP8_QUANTIZE_BLOCK_found_inf].p = &o.found_inf;
    assert_int_equal(fp8_host_run(pool, FP8_OP_QUANTIZE_BLOCK, &how, args), FP8_OK);
    bool tile = scaling == FP8_SCALING_TILE;
    expect_all(c, tile ? "128x128" : "1x128", &o, c->sums + (tile ? 12 : 8));
    drop_outputs(&o);
}

static void every_granularity_as_numpy_has_it(void **state)
{
    (void)state;
    for (int n = 0; n < OP_CASES; n++) {
        const struct op_case *c = &op_cases[n];
        struct matrix m = source_of(c);
        int poison = n % 2 ? 0xFF : 0x7E;
        tensor(c, &m, poison);
        row_alone(c, &m, poison);
        lines(c, &m, poison);
        block(c, &m, FP8_SCALING_BLOCK, poison);
        block(c, &m, FP8_SCALING_TILE, poison);
        drop(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_granularity_as_numpy_has_it),
    };
    if (fp8_pool_create(3, &pool) != FP8_OK)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fp8_pool_destroy(pool);
    return failed;
}
