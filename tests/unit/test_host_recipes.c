/*
 * test_host_recipes.c - what the tables of test_host_tables.c leave open about the quantising ops:
 * `when`, outputs that are not wanted, column sums, the state of delayed scaling, transposes, and
 * every scaling dequantised.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>

#include "runtime/fp8_format.h"
#include "runtime/host.h"
#include "tests/unit/matrix.h"

enum { PARTIALS = 16 };

static struct fp8_pool *pool;

static struct matrix row_copy_of(const struct matrix *m)
{
    return make(FP8_DTYPE_E4M3, round_up(m->rows, 16), round_up(m->cols, 128),
                round_up(m->cols, 128), 0);
}

static struct matrix transposed_copy_of(const struct matrix *m)
{
    return make(FP8_DTYPE_E4M3, round_up(m->cols, 16), round_up(m->rows, 128),
                round_up(m->rows, 128), 0);
}

static struct matrix floats(int64_t rows, int64_t cols)
{
    return make(FP8_DTYPE_FP32, rows, cols, cols, 0);
}

static bool is_untouched(const struct matrix *m)
{
    for (size_t i = 0; i < m->bytes; i++) {
        if (m->data[i] != 0xFF)
            return false;
    }
    return true;
}

/* ---- all quantising ops at once, each with all its outputs ---- */

enum { ROW, TRANSPOSED, ROW_SCALES, TRANSPOSED_SCALES, SUMS, BANDS, DBIAS, OUTPUTS };

struct call {
    enum fp8_op op;
    fp8_semantics how;
    fp8_value args[FP8_OP_MAX_ARGS];
    int source, row, transposed, when; /* places of arguments, -1: none */
    int outputs[OUTPUTS];              /* places of pointers */
    int found_inf;
};

static const struct call calls[] = {
    { FP8_OP_AMAX,
      { 0 },
      { { 0 } },
      FP8_AMAX_source,
      -1,
      -1,
      FP8_AMAX_when,
      { -1, -1, -1, -1, FP8_AMAX_dbias_partials, FP8_AMAX_partials, -1 },
      FP8_AMAX_found_inf },
    { FP8_OP_QUANTIZE,
      { 0 },
      { { 0 } },
      FP8_QUANTIZE_source,
      FP8_QUANTIZE_row,
      FP8_QUANTIZE_transposed,
      FP8_QUANTIZE_when,
      { FP8_QUANTIZE_row, FP8_QUANTIZE_transposed, FP8_QUANTIZE_scales, -1, -1, -1,
        FP8_QUANTIZE_dbias },
      -1 },
    { FP8_OP_FUSED,
      { 0 },
      { { 0 } },
      FP8_FUSED_source,
      FP8_FUSED_row,
      FP8_FUSED_transposed,
      FP8_FUSED_when,
      { FP8_FUSED_row, FP8_FUSED_transposed, FP8_FUSED_scales, -1, FP8_FUSED_dbias_partials,
        FP8_FUSED_partials, FP8_FUSED_dbias },
      FP8_FUSED_found_inf },
    { FP8_OP_CAST,
      { 0 },
      { { 0 } },
      FP8_CAST_source,
      FP8_CAST_row,
      FP8_CAST_transposed,
      FP8_CAST_when,
      { FP8_CAST_row, FP8_CAST_transposed, FP8_CAST_scales, -1, FP8_CAST_dbias_partials,
        FP8_CAST_amax, -1 },
      FP8_CAST_found_inf },
    { FP8_OP_QUANTIZE_ROW,
      { 0 },
      { { 0 } },
      FP8_QUANTIZE_ROW_source,
      FP8_QUANTIZE_ROW_row,
      -1,
      FP8_QUANTIZE_ROW_when,
      { FP8_QUANTIZE_ROW_row, -1, FP8_QUANTIZE_ROW_row_scales, -1, -1, -1, -1 },
      FP8_QUANTIZE_ROW_found_inf },
    { FP8_OP_LINE_AMAX,
      { 0 },
      { { 0 } },
      FP8_LINE_AMAX_source,
      -1,
      -1,
      FP8_LINE_AMAX_when,
      { -1, -1, FP8_LINE_AMAX_row_partials, -1, FP8_LINE_AMAX_dbias_partials,
        FP8_LINE_AMAX_column_partials, -1 },
      FP8_LINE_AMAX_found_inf },
    { FP8_OP_LINE_SCALES,
      { 0 },
      { { 0 } },
      FP8_LINE_SCALES_row_partials, /* set below: it reads no source */
      -1,
      -1,
      FP8_LINE_SCALES_when,
      { FP8_LINE_SCALES_row_maxima, FP8_LINE_SCALES_column_maxima, FP8_LINE_SCALES_row_scales,
        FP8_LINE_SCALES_transposed_scales, -1, -1, FP8_LINE_SCALES_dbias },
      -1 },
    { FP8_OP_QUANTIZE_LINES,
      { 0 },
      { { 0 } },
      FP8_QUANTIZE_LINES_source,
      FP8_QUANTIZE_LINES_row,
      FP8_QUANTIZE_LINES_transposed,
      FP8_QUANTIZE_LINES_when,
      { FP8_QUANTIZE_LINES_row, FP8_QUANTIZE_LINES_transposed, -1, -1, -1, -1, -1 },
      -1 },
    { FP8_OP_QUANTIZE_BLOCK,
      { .scaling = FP8_SCALING_BLOCK },
      { { 0 } },
      FP8_QUANTIZE_BLOCK_source,
      FP8_QUANTIZE_BLOCK_row,
      FP8_QUANTIZE_BLOCK_transposed,
      FP8_QUANTIZE_BLOCK_when,
      { FP8_QUANTIZE_BLOCK_row, FP8_QUANTIZE_BLOCK_transposed, FP8_QUANTIZE_BLOCK_row_scales,
        FP8_QUANTIZE_BLOCK_transposed_scales, FP8_QUANTIZE_BLOCK_dbias_partials, -1, -1 },
      FP8_QUANTIZE_BLOCK_found_inf },
    { FP8_OP_QUANTIZE_BLOCK,
      { .scaling = FP8_SCALING_TILE },
      { { 0 } },
      FP8_QUANTIZE_BLOCK_source,
      FP8_QUANTIZE_BLOCK_row,
      FP8_QUANTIZE_BLOCK_transposed,
      FP8_QUANTIZE_BLOCK_when,
      { FP8_QUANTIZE_BLOCK_row, FP8_QUANTIZE_BLOCK_transposed, FP8_QUANTIZE_BLOCK_row_scales,
        FP8_QUANTIZE_BLOCK_transposed_scales, FP8_QUANTIZE_BLOCK_dbias_partials, -1, -1 },
      FP8_QUANTIZE_BLOCK_found_inf },
};
enum { CALLS = sizeof calls / sizeof calls[0] };

/* Outputs larger than any layout needs; what an op reads beside the source is in `given`. */
struct buffers {
    struct matrix out[OUTPUTS];
    float given[16];
    uint32_t partials[PARTIALS], found_inf;
    struct matrix bands;
};

static void make_buffers(struct buffers *b, const struct matrix *m)
{
    int64_t width = round_up(m->cols, 128) + round_up(m->rows, 128);
    b->out[ROW] = row_copy_of(m);
    b->out[TRANSPOSED] = transposed_copy_of(m);
    for (int i = ROW_SCALES; i < OUTPUTS; i++)
        b->out[i] = floats(8, width);
    for (int i = 0; i < 16; i++)
        b->given[i] = 2.0f;
    memset(b->partials, 0, sizeof b->partials);
    b->found_inf = 7;
    b->bands = floats((m->rows + 31) / 32, m->cols);
    memset(b->bands.data, 0, b->bands.bytes);
}

static void drop_buffers(struct buffers *b)
{
    for (int i = 0; i < OUTPUTS; i++)
        drop(&b->out[i]);
    drop(&b->bands);
}

/* What line_scales reads: zeros. */
static void give_partials(struct call *c, const struct matrix *m, const struct buffers *b)
{
    c->args[FP8_LINE_SCALES_row_partials].p = b->bands.data;
    c->args[FP8_LINE_SCALES_row_partials_ld].i = m->rows;
    c->args[FP8_LINE_SCALES_column_partials].p = b->bands.data;
    c->args[FP8_LINE_SCALES_column_partials_ld].i = m->cols;
    c->args[FP8_LINE_SCALES_dbias_partials].p = b->bands.data;
    c->args[FP8_LINE_SCALES_dbias_ld].i = m->cols;
}

/* wanted: bits of OUTPUTS that are not NULL. */
static fp8_status run_call(const struct call *call, const struct matrix *m, struct buffers *b,
                           unsigned wanted, const uint32_t *when)
{
    struct call c = *call;
    c.how.source_dtype = m->dtype;
    c.how.target_dtype = FP8_DTYPE_E4M3;
    put_source(c.args + c.source, m);
    if (c.row >= 0)
        put_copy(c.args + c.row, &b->out[ROW]);
    if (c.transposed >= 0)
        put_copy(c.args + c.transposed, &b->out[TRANSPOSED]);
    for (int i = 0; i < OUTPUTS; i++) {
        if (c.outputs[i] >= 0)
            c.args[c.outputs[i]].p = wanted >> i & 1u ? b->out[i].data : NULL;
    }
    if (c.found_inf >= 0)
        c.args[c.found_inf].p = &b->found_inf;
    c.args[c.when].p = (void *)(uintptr_t)when;
    int64_t width = b->out[SUMS].ld;
    if (c.op == FP8_OP_AMAX)
        c.args[FP8_AMAX_n_partials].i = PARTIALS, c.args[FP8_AMAX_dbias_ld].i = width;
    if (c.op == FP8_OP_QUANTIZE)
        c.args[FP8_QUANTIZE_partials].p = b->partials, c.args[FP8_QUANTIZE_n_partials].i = PARTIALS,
        c.args[FP8_QUANTIZE_dbias_partials].p = b->bands.data,
        c.args[FP8_QUANTIZE_dbias_ld].i = b->bands.ld;
    if (c.op == FP8_OP_FUSED)
        c.args[FP8_FUSED_n_partials].i = PARTIALS, c.args[FP8_FUSED_dbias_ld].i = width;
    if (c.op == FP8_OP_CAST)
        c.args[FP8_CAST_known].p = b->given, c.args[FP8_CAST_dbias_ld].i = width;
    if (c.op == FP8_OP_LINE_AMAX)
        c.args[FP8_LINE_AMAX_row_partials_ld].i = width,
        c.args[FP8_LINE_AMAX_column_partials_ld].i = width,
        c.args[FP8_LINE_AMAX_dbias_ld].i = width;
    if (c.op == FP8_OP_LINE_SCALES)
        give_partials(&c, m, b);
    if (c.op == FP8_OP_QUANTIZE_LINES)
        c.args[FP8_QUANTIZE_LINES_row_maxima].p = b->bands.data,
        c.args[FP8_QUANTIZE_LINES_column_maxima].p = b->bands.data;
    if (c.op == FP8_OP_QUANTIZE_BLOCK)
        c.args[FP8_QUANTIZE_BLOCK_row_scales_ld].i = round_up(m->rows, 8),
        c.args[FP8_QUANTIZE_BLOCK_transposed_scales_ld].i = round_up(m->cols, 8),
        c.args[FP8_QUANTIZE_BLOCK_dbias_ld].i = width;
    return fp8_host_run(pool, c.op, &c.how, c.args);
}

/* A word that is 0 stops the op before it touches anything; any other does not. */
static void when_decides_at_run_time(void **state)
{
    (void)state;
    static const uint32_t no = 0, yes = 256;
    for (int i = 0; i < CALLS; i++) {
        random_state = 100 + (uint64_t)i;
        struct matrix m = make_random(FP8_DTYPE_BF16, 70, 150);
        put(&m, 3, 3, NAN);
        for (int on = 0; on < 2; on++) {
            struct buffers b;
            make_buffers(&b, &m);
            assert_int_equal(run_call(&calls[i], &m, &b, ~0u, on ? &yes : &no), FP8_OK);
            for (int o = 0; o < OUTPUTS; o++) {
                if (calls[i].outputs[o] >= 0)
                    assert_int_equal(is_untouched(&b.out[o]), !on);
            }
            if (calls[i].found_inf >= 0)
                assert_int_equal(b.found_inf, on ? 1 : 7);
            drop_buffers(&b);
        }
        drop(&m);
    }
}

/* An output that is NULL changes none of the others. */
static void outputs_do_not_depend_on_each_other(void **state)
{
    (void)state;
    for (int i = 0; i < CALLS; i++) {
        random_state = 200 + (uint64_t)i;
        struct matrix m = make_random(i % 2 ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32, 131, 259);
        struct buffers all;
        make_buffers(&all, &m);
        assert_int_equal(run_call(&calls[i], &m, &all, ~0u, NULL), FP8_OK);
        bool has_scales = calls[i].op == FP8_OP_QUANTIZE || calls[i].op == FP8_OP_FUSED ||
                          calls[i].op == FP8_OP_CAST;
        for (unsigned wanted = 0; wanted < 1u << OUTPUTS; wanted += 3) {
            unsigned with = wanted | (has_scales ? 1u << ROW_SCALES : 0u);
            if (calls[i].op == FP8_OP_AMAX || calls[i].op == FP8_OP_FUSED)
                with |= 1u << BANDS; /* the partials of amax are always there */
            if (calls[i].op == FP8_OP_FUSED && with >> DBIAS & 1u)
                with |= 1u << SUMS;
            struct buffers b;
            make_buffers(&b, &m);
            assert_int_equal(run_call(&calls[i], &m, &b, with, NULL), FP8_OK);
            for (int o = 0; o < OUTPUTS; o++) {
                if (calls[i].outputs[o] >= 0 && with >> o & 1u)
                    assert_memory_equal(b.out[o].data, all.out[o].data, all.out[o].bytes);
                else
                    assert_true(is_untouched(&b.out[o]));
            }
            drop_buffers(&b);
        }
        drop_buffers(&all);
        drop(&m);
    }
}

/* ---- column sums ---- */

/* Partials by 128 rows, then added in order, in float32. */
static void column_sums_of_every_op(void **state)
{
    (void)state;
    for (int i = 0; i < CALLS; i++) {
        if (calls[i].outputs[SUMS] < 0)
            continue;
        random_state = 300 + (uint64_t)i;
        struct matrix m = make_random(FP8_DTYPE_BF16, 133, 140), dbias = floats(1, 140);
        struct buffers b;
        make_buffers(&b, &m);
        assert_int_equal(run_call(&calls[i], &m, &b, ~0u, NULL), FP8_OK);
        const int64_t height = 128;
        int64_t lines = (m.rows + height - 1) / height;
        for (int64_t j = 0; j < m.cols; j++) {
            for (int64_t line = 0; line < lines; line++) {
                double sum = 0, size = 0;
                for (int64_t r = line * height; r < m.rows && r < (line + 1) * height; r++) {
                    sum += (double)get(&m, r, j);
                    size += fabs((double)get(&m, r, j));
                }
                assert_true(fabs((double)get(&b.out[SUMS], line, j) - sum) <= 1e-6 * size);
            }
        }
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            fp8_value args[FP8_COLUMN_SUMS_ARG_COUNT] = {
                [FP8_COLUMN_SUMS_partials].p = b.out[SUMS].data,
                [FP8_COLUMN_SUMS_partials_ld].i = b.out[SUMS].ld,
                [FP8_COLUMN_SUMS_partial_rows].i = lines,
                [FP8_COLUMN_SUMS_cols].i = m.cols,
                [FP8_COLUMN_SUMS_dbias].p = dbias.data,
                [FP8_COLUMN_SUMS_accumulate].i = accumulate,
            };
            fp8_semantics none = { 0 };
            float old[140];
            memcpy(old, dbias.data, sizeof old);
            assert_int_equal(fp8_host_run(pool, FP8_OP_COLUMN_SUMS, &none, args), FP8_OK);
            for (int64_t j = 0; j < m.cols; j++) {
                float sum = 0;
                for (int64_t line = 0; line < lines; line++)
                    sum += get(&b.out[SUMS], line, j);
                assert_true(get(&dbias, 0, j) == (accumulate ? old[j] + sum : sum));
            }
        }
        drop_buffers(&b);
        drop(&dbias);
        drop(&m);
    }
}

/* ---- delayed ---- */

static float cast_with(const struct matrix *m, float known, bool known_is_amax,
                       const uint32_t *fresh, float *running, float scales[16])
{
    uint32_t partials[2] = { fp8_bits_of_float(3.0f), fp8_bits_of_float(5.0f) };
    fp8_semantics how = { .source_dtype = m->dtype, .target_dtype = FP8_DTYPE_E5M2 };
    fp8_value args[FP8_CAST_ARG_COUNT] = { { 0 } };
    put_source(args + FP8_CAST_source, m);
    args[FP8_CAST_known].p = &known;
    args[FP8_CAST_known_is_amax].i = known_is_amax;
    args[FP8_CAST_fresh].p = (void *)(uintptr_t)fresh;
    args[FP8_CAST_partials].p = partials;
    args[FP8_CAST_n_partials].i = 2;
    args[FP8_CAST_scales].p = scales;
    args[FP8_CAST_amax].p = running;
    memset(scales, 0xFF, 16 * sizeof *scales);
    assert_int_equal(fp8_host_run(pool, FP8_OP_CAST, &how, args), FP8_OK);
    for (int i = 0; i < 16; i++)
        assert_true(i == 0 || i == 4 || i == 8 || scales[i] == 0.0f);
    assert_true(scales[4] == 1.0f / scales[0]);
    return scales[0];
}

static void cast_takes_its_scale_from_what_is_known(void **state)
{
    (void)state;
    static const uint32_t no = 0, yes = 1;
    float scales[16];
    struct matrix m = make_random(FP8_DTYPE_BF16, 3, 5);
    assert_true(cast_with(&m, 0.75f, false, NULL, NULL, scales) == 0.75f && scales[8] == 0.0f);
    assert_true(cast_with(&m, 0.75f, true, NULL, NULL, scales) == 57344.0f / 0.75f);
    assert_true(scales[8] == 0.75f);
    assert_true(cast_with(&m, INFINITY, true, NULL, NULL, scales) == 57344.0f / FLT_MAX);
    assert_true(scales[8] == FLT_MAX);
    assert_true(cast_with(&m, NAN, true, NULL, NULL, scales) == 1.0f && scales[8] == 0.0f);
    assert_true(cast_with(&m, 0.75f, false, &no, NULL, scales) == 0.75f);
    assert_true(cast_with(&m, 0.75f, false, &yes, NULL, scales) == 57344.0f / 5.0f);
    assert_true(scales[8] == 5.0f);
    drop(&m);
}

/* The maximum over micro-batches, whatever their order; not run is less than an amax of 0. */
static void cast_keeps_the_running_maximum(void **state)
{
    (void)state;
    static const float orders[2][4] = { { 100, 1, 1, 1 }, { 1, 1, 1, 100 } };
    float scales[16];
    for (int order = 0; order < 2; order++) {
        float running = -1.0f;
        for (int i = 0; i < 4; i++) {
            struct matrix m = make(FP8_DTYPE_FP32, 2, 3, 3, 0);
            memset(m.data, 0, m.bytes);
            put(&m, 1, 1, -orders[order][i]);
            put(&m, 0, 2, INFINITY);
            cast_with(&m, 1.0f, false, NULL, &running, scales);
            drop(&m);
        }
        assert_true(running == 100.0f);
    }
    struct matrix zeros = make(FP8_DTYPE_FP32, 2, 3, 3, 0);
    memset(zeros.data, 0, zeros.bytes);
    float running = -1.0f;
    cast_with(&zeros, 1.0f, false, NULL, &running, scales);
    assert_true(running == 0.0f && !signbit(running));
    drop(&zeros);
}

enum { TENSORS = 5, LONGEST = 8 };

struct states {
    float scale[TENSORS], running[TENSORS], history[LONGEST][TENSORS], maxima[TENSORS];
    int32_t counts[TENSORS];
    uint32_t fresh[TENSORS];
};

static void roll(struct states *s, int64_t length, bool most_recent, bool power_of_two)
{
    fp8_semantics none = { 0 };
    fp8_value args[FP8_ROLL_ARG_COUNT] = {
        [FP8_ROLL_scale].p = s->scale,          [FP8_ROLL_running].p = s->running,
        [FP8_ROLL_history].p = s->history,      [FP8_ROLL_counts].p = s->counts,
        [FP8_ROLL_fresh].p = s->fresh,          [FP8_ROLL_maxima].p = s->maxima,
        [FP8_ROLL_tensors].i = TENSORS,         [FP8_ROLL_length].i = length,
        [FP8_ROLL_most_recent].i = most_recent, [FP8_ROLL_power_of_two].i = power_of_two,
    };
    assert_int_equal(fp8_host_run(pool, FP8_OP_ROLL, &none, args), FP8_OK);
}

/* Against the whole past of every tensor, of which roll keeps `length` entries. The history starts
 * as NaN: what was never written is never read. */
static void roll_takes_only_tensors_that_ran(void **state)
{
    (void)state;
    enum { STEPS = 40 };
    for (int round = 0; round < 40; round++) {
        random_state = 400 + (uint64_t)round;
        int64_t length = 1 + random_below(LONGEST);
        bool most_recent = round % 2, power_of_two = round / 2 % 2;
        float past[TENSORS][STEPS], want[TENSORS];
        int count[TENSORS] = { 0 };
        struct states s = { .counts = { 0 } };
        memset(s.history, 0xFF, sizeof s.history);
        for (int t = 0; t < TENSORS; t++) {
            s.scale[t] = want[t] = 1.0f;
            s.maxima[t] = t % 2 ? 57344.0f : 448.0f / 4;
            s.fresh[t] = 1;
            s.running[t] = -1.0f;
        }
        for (int step = 0; step < STEPS; step++) {
            bool ran[TENSORS];
            for (int t = 0; t < TENSORS; t++) {
                ran[t] = random_below(4) != 0;
                if (!ran[t])
                    continue;
                float amax = random_below(5) == 0 ? 0.0f : fabsf(random_value());
                past[t][count[t]++] = s.running[t] = random_below(9) == 0 ? 1e-38f : amax;
                float largest = amax = s.running[t];
                for (int i = count[t] - 1; i >= 0 && i >= count[t] - length; i--)
                    largest = fmaxf(largest, past[t][i]);
                if (!most_recent)
                    amax = largest;
                if (amax > 0)
                    want[t] = fminf(s.maxima[t] / amax, FLT_MAX);
                if (amax > 0 && power_of_two)
                    want[t] = ldexpf(0.5f, ilogbf(want[t]) + 1);
            }
            roll(&s, length, most_recent, power_of_two);
            for (int t = 0; t < TENSORS; t++) {
                assert_true(s.scale[t] == want[t]);
                assert_true(s.running[t] == -1.0f);
                assert_int_equal(s.counts[t], count[t] < 2 * length
                                                  ? count[t]
                                                  : length + count[t] % length); /* never grows */
                assert_int_equal(s.fresh[t], count[t] == 0);
            }
        }
    }
}

/* ---- transpose and dequantize ---- */

static void transpose_is_the_other_copy(void **state)
{
    (void)state;
    for (int round = 0; round < 40; round++) {
        random_state = 500 + (uint64_t)round;
        int64_t down, along;
        struct matrix m = make_random(FP8_DTYPE_BF16, 1 + random_below(300), 1 + random_below(300));
        struct matrix row = row_copy_of(&m), wanted = transposed_copy_of(&m);
        struct matrix turned = transposed_copy_of(&m);
        down = (m.rows + 127) / 128;
        along = (m.cols + 127) / 128;
        struct matrix scales = floats(down, round_up(along, 4));
        struct matrix wanted_scales = floats(along, round_up(down, 4));
        struct matrix turned_scales = floats(along, round_up(down, 4));
        fp8_semantics how = { .source_dtype = FP8_DTYPE_BF16,
                              .target_dtype = FP8_DTYPE_E4M3,
                              .scaling = FP8_SCALING_TILE };
        fp8_value args[FP8_QUANTIZE_BLOCK_ARG_COUNT] = { { 0 } };
        put_source(args + FP8_QUANTIZE_BLOCK_source, &m);
        put_copy(args + FP8_QUANTIZE_BLOCK_row, &row);
        put_copy(args + FP8_QUANTIZE_BLOCK_transposed, &wanted);
        args[FP8_QUANTIZE_BLOCK_row_scales].p = scales.data;
        args[FP8_QUANTIZE_BLOCK_row_scales_ld].i = scales.ld;
        args[FP8_QUANTIZE_BLOCK_transposed_scales].p = wanted_scales.data;
        args[FP8_QUANTIZE_BLOCK_transposed_scales_ld].i = wanted_scales.ld;
        assert_int_equal(fp8_host_run(pool, FP8_OP_QUANTIZE_BLOCK, &how, args), FP8_OK);
        fp8_value turn[FP8_TRANSPOSE_ARG_COUNT] = { { 0 } };
        put_source(turn + FP8_TRANSPOSE_source, &row);
        turn[FP8_TRANSPOSE_rows].i = m.rows;
        turn[FP8_TRANSPOSE_cols].i = m.cols;
        put_copy(turn + FP8_TRANSPOSE_transposed, &turned);
        if (round % 3 != 0) {
            turn[FP8_TRANSPOSE_scales].p = scales.data;
            turn[FP8_TRANSPOSE_scales_ld].i = scales.ld;
            turn[FP8_TRANSPOSE_transposed_scales].p = turned_scales.data;
            turn[FP8_TRANSPOSE_transposed_scales_ld].i = turned_scales.ld;
        }
        assert_int_equal(fp8_host_run(pool, FP8_OP_TRANSPOSE, &how, turn), FP8_OK);
        assert_memory_equal(turned.data, wanted.data, wanted.bytes);
        if (round % 3 != 0)
            assert_memory_equal(turned_scales.data, wanted_scales.data, wanted_scales.bytes);
        else
            assert_true(is_untouched(&turned_scales));
        struct matrix *const all[] = { &m,      &row,           &wanted,       &turned,
                                       &scales, &wanted_scales, &turned_scales };
        for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
            drop(all[i]);
    }
}

static float scale_at(const struct matrix *scales, fp8_scaling scaling, int64_t row, int64_t k)
{
    switch (scaling) {
    case FP8_SCALING_ROW:
        return get(scales, 0, row);
    case FP8_SCALING_BLOCK:
        return get(scales, k / 128, row);
    case FP8_SCALING_TILE:
        return get(scales, row / 128, k / 128);
    default:
        return get(scales, 0, 4);
    }
}

static void dequantize_knows_every_scaling(void **state)
{
    (void)state;
    for (int round = 0; round < 64; round++) {
        random_state = 600 + (uint64_t)round;
        fp8_scaling scaling = (fp8_scaling)(round % 4);
        bool turned = round / 4 % 2;
        int64_t rows = 1 + random_below(300), cols = 1 + random_below(300);
        struct matrix target = make(FP8_DTYPE_FP32, rows, cols, cols + round % 3, round % 5);
        int64_t lines = turned ? cols : rows, along = turned ? rows : cols;
        struct matrix codes = make(FP8_DTYPE_E4M3, lines, along, along + 3, 1);
        struct matrix scales = floats(4, 320);
        for (int64_t i = 0; i < 4 * 320; i++)
            ((float *)scales.data)[i] = random_value();
        for (int64_t i = 0; i < lines; i++) {
            for (int64_t k = 0; k < along; k++)
                codes.data[i * codes.ld + k] = (uint8_t)random_below(256);
        }
        fp8_semantics how = { .source_dtype = round / 8 % 2 ? FP8_DTYPE_E4M3 : FP8_DTYPE_E5M2,
                              .target_dtype = FP8_DTYPE_FP32,
                              .scaling = scaling };
        fp8_value args[FP8_DEQUANTIZE_ARG_COUNT] = {
            [FP8_DEQUANTIZE_source].p = codes.data,
            [FP8_DEQUANTIZE_source_ld].i = codes.ld,
            [FP8_DEQUANTIZE_scales].p = scales.data,
            [FP8_DEQUANTIZE_scales_ld].i = scales.ld,
            [FP8_DEQUANTIZE_target].p = target.data,
            [FP8_DEQUANTIZE_target_ld].i = target.ld,
            [FP8_DEQUANTIZE_rows].i = rows,
            [FP8_DEQUANTIZE_cols].i = cols,
            [FP8_DEQUANTIZE_is_transposed].i = turned,
        };
        assert_int_equal(fp8_host_run(pool, FP8_OP_DEQUANTIZE, &how, args), FP8_OK);
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < cols; j++) {
                int64_t row = turned ? j : i, k = turned ? i : j;
                uint8_t code = codes.data[row * codes.ld + k];
                float value = how.source_dtype == FP8_DTYPE_E4M3 ? fp8_decode_e4m3(code)
                                                                 : fp8_decode_e5m2(code);
                float want = value * scale_at(&scales, scaling, row, k);
                float got = get(&target, i, j);
                assert_true(isnan(want) ? isnan(got) : got == want);
            }
        }
        drop(&target);
        drop(&codes);
        drop(&scales);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(when_decides_at_run_time),
        cmocka_unit_test(outputs_do_not_depend_on_each_other),
        cmocka_unit_test(column_sums_of_every_op),
        cmocka_unit_test(cast_takes_its_scale_from_what_is_known),
        cmocka_unit_test(cast_keeps_the_running_maximum),
        cmocka_unit_test(roll_takes_only_tensors_that_ran),
        cmocka_unit_test(transpose_is_the_other_copy),
        cmocka_unit_test(dequantize_knows_every_scaling),
    };
    if (fp8_pool_create(3, &pool) != FP8_OK)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fp8_pool_destroy(pool);
    return failed;
}
