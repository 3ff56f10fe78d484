/*
 * run_check.c - the verdicts of `fp8gen run`.
 *
 * In: a layer whose buffers are in host memory. Out: the numbers and, if one is out of bounds, the
 * sentence of a report row. Two errors are told apart: that of the kernel (against float64 on the
 * operands as quantised; small, bounded by accumulation and output dtype) and that of FP8 itself
 * (SQNR against float64 on the original tensors; a property of the formats). Bounds are those of
 * the project's accuracy promise and stand in one table. They are averages, and too few samples
 * make none: there each output is judged by itself, by one rounding and a share of its terms'
 * sizes; and the SQNR of fewer than 10,000 outputs, or of outputs of a few quantised numbers, is
 * shown and not judged.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/reference.h"
#include "gen/cli/run.h"

#define SAMPLE_SIDE 104
#define SAMPLE_OUTPUTS 10400
#define JUDGED_OUTPUTS 10000
#define FEW_OUTPUTS 1000
#define FEW_TERMS                                                                                  \
    16 /* sums of fewer terms take few distinct values: their roundings do not average */

/* Relative Frobenius error of a GEMM on normal data, up to the given depth. `few`: the bound for
 * any data, where there is no average; it also bounds the error of each output as a share of its
 * terms' sizes, on top of one rounding. Where that rounding alone can be above `few` (`apart`), it
 * is taken off each output's error first: half an ulp of bf16 is up to 3.9e-3 of a value. */
static const struct {
    bool split;
    fp8_dtype out;
    int64_t max_depth;
    double bound, few;
    bool apart;
} error_bounds[] = {
    { true, FP8_DTYPE_FP32, INT64_MAX, 2e-4, 1e-3, false },
    { true, FP8_DTYPE_BF16, INT64_MAX, 2e-3, 1e-3, true },
    { true, FP8_DTYPE_FP16, INT64_MAX, 2e-3, 1e-3, true },
    { false, FP8_DTYPE_FP32, 28672, 1e-2, 1e-2, false },
    { false, FP8_DTYPE_BF16, 28672, 1e-2, 1e-2, false },
    { false, FP8_DTYPE_FP16, 28672, 1e-2, 1e-2, false },
};

static const double sqnr_bound_e4m3 = 28, sqnr_bound_e5m2 = 24;
static const double dbias_bound = 1e-5; /* fp32 sums of 128-row partials */

static void fail(struct run_row *row, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The first failure of a row is kept. */
static void fail(struct run_row *row, const char *format, ...)
{
    va_list arguments;
    if (row->failure[0])
        return;
    va_start(arguments, format);
    vsnprintf(row->failure, sizeof row->failure, format, arguments);
    va_end(arguments);
}

static int no_memory(void)
{
    cli_error("out of memory for the reference");
    return CLI_MACHINE;
}

/* ---- operands -------------------------------------------------------------------------------- */

static bool same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static enum run_buffer source_of(enum run_buffer operand)
{
    return operand == RUN_WEIGHT ? RUN_W : operand == RUN_GRAD ? RUN_DY : RUN_X;
}

/* The one scale of a tensor. Where it was known before, the place of the amax is zero. */
static void check_whole(const struct run_layer *run, const float *scales,
                        const struct ref_scales *rule, struct run_row *row)
{
    float want_amax = run->recipe.is_delayed ? 0 : rule->amax;
    float amax = scales[8], scale = scales[0], scale_inv = scales[4];
    if (!same_bits(amax, want_amax))
        fail(row, "amax is %a, must be %a", (double)amax, (double)want_amax);
    if (!same_bits(scale, rule->scale))
        fail(row, "scale is %a, must be %a", (double)scale, (double)rule->scale);
    if (!same_bits(scale_inv, rule->scale_inv))
        fail(row, "scale_inv is %a, must be %a", (double)scale_inv, (double)rule->scale_inv);
}

int run_check_operand(const struct run_layer *run, enum run_buffer buffer, struct run_row *row)
{
    fp8_tensor source = run_host_tensor(run, source_of(buffer));
    fp8_operand operand = run_host_operand(run, buffer);
    const struct ref_rule rule = { run->recipe.power_of_two, run->recipe.margin, 0 };
    fp8_operand_view view;
    struct ref_verdict verdict;
    fp8_status status = fp8_operand_parts(&operand, &view);
    if (status)
        return cli_fp8_failed(status, "layer '%s', %s", run->info.name, row->pass);
    if (!ref_check_operand(&source, &operand, &rule, &verdict))
        return no_memory();
    if (verdict.has_whole)
        check_whole(run, view.scales, &verdict.whole, row);
    if (verdict.wrong_scales > 0)
        fail(row, "%lld scales differ from the rules", (long long)verdict.wrong_scales);
    if (verdict.wrong_bytes > 0)
        fail(row, "%lld FP8 bytes differ from the rules", (long long)verdict.wrong_bytes);
    row->bit_equal = !row->failure[0];
    return CLI_DONE;
}

int run_check_saved(const struct run_layer *run, struct run_row *row)
{
    return run_check_operand(run, RUN_SAVED, row);
}

int run_check_dbias(const struct run_layer *run, struct run_row *row)
{
    fp8_tensor dy = run_host_tensor(run, RUN_DY), dbias = run_host_tensor(run, RUN_DBIAS);
    size_t n = (size_t)dy.cols;
    double *sums = malloc(sizeof *sums * 3 * (n + 1));
    if (!sums)
        return no_memory();
    double *magnitude = sums + n, *value = magnitude + n;
    ref_column_sums(&dy, sums, magnitude);
    for (size_t j = 0; j < n; j++)
        value[j] = ((const float *)dbias.data)[j];
    /* the sum of squares keeps columns that cancel from looking wrong */
    double difference = 0, norm = 0;
    for (size_t j = 0; j < n; j++) {
        difference += (value[j] - sums[j]) * (value[j] - sums[j]);
        norm += magnitude[j];
    }
    row->dbias_error = norm > 0 ? sqrt(difference / norm) : difference == 0 ? 0 : INFINITY;
    if (!(row->dbias_error <= dbias_bound))
        fail(row, "dbias: relative error %.1e, bound %.1e", row->dbias_error, dbias_bound);
    free(sums);
    return CLI_DONE;
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

/* One pass's out[rows, cols] = a b^T, as originals and as quantised. */
struct gemm {
    enum run_buffer out;
    int64_t rows, cols, depth;
    struct ref_source a, b;                     /* originals */
    struct ref_source a_quantized, b_quantized; /* operands */
};

static struct ref_source original(const struct run_layer *run, enum run_buffer buffer,
                                  bool by_column)
{
    fp8_tensor t = run_host_tensor(run, buffer);
    return (struct ref_source){
        .data = t.data, .dtype = t.dtype, .ld = t.cols, .by_column = by_column, .factor = 1
    };
}

static struct ref_source quantized(const struct run_layer *run, enum run_buffer buffer,
                                   bool transposed)
{
    fp8_operand operand = run_host_operand(run, buffer);
    fp8_operand_view view;
    if (fp8_operand_parts(&operand, &view) != FP8_OK)
        return (struct ref_source){ 0 };
    struct ref_source source = {
        .data = transposed ? view.transposed : view.row,
        .dtype = operand.dtype,
        .ld = transposed ? view.transposed_ld : view.row_ld,
        .factor = 1,
        .scales = transposed ? view.transposed_scales : view.row_scales,
        .scales_ld = transposed ? view.transposed_scales_ld : view.row_scales_ld,
        .scaling = transposed ? operand.transposed_scaling : operand.row_scaling,
    };
    if (source.scaling == FP8_SCALING_TENSOR)
        source.factor = (double)view.scales[4];
    return source;
}

/* What a pass multiplies: out[rows, cols] = a b^T, vectors along the contraction as rows or
 * columns. */
static const struct {
    enum run_buffer out, a, b, a_operand, b_operand;
    bool a_across, b_across;
} products[FP8_PASS_COUNT] = {
    [FP8_PASS_FPROP] = { RUN_Y, RUN_X, RUN_W, RUN_X_QUANTIZED, RUN_WEIGHT, false, false },
    [FP8_PASS_WGRAD] = { RUN_DW, RUN_DY, RUN_X, RUN_GRAD, RUN_SAVED, true, true },
    [FP8_PASS_DGRAD] = { RUN_DX, RUN_DY, RUN_W, RUN_GRAD, RUN_WEIGHT, false, true },
};

static struct gemm describe(const struct run_layer *run, fp8_pass pass)
{
    int64_t m = run->m, n = run->info.out_features, k = run->info.in_features;
    const int64_t extents[FP8_PASS_COUNT][3] = { [FP8_PASS_FPROP] = { m, n, k },
                                                 [FP8_PASS_WGRAD] = { n, k, m },
                                                 [FP8_PASS_DGRAD] = { m, k, n } };
    struct gemm g = { .out = products[pass].out,
                      .rows = extents[pass][0],
                      .cols = extents[pass][1],
                      .depth = extents[pass][2] };
    g.a = original(run, products[pass].a, products[pass].a_across);
    g.b = original(run, products[pass].b, products[pass].b_across);
    if (run->recipe.plain[pass]) {
        g.a_quantized = g.a;
        g.b_quantized = g.b;
    } else {
        g.a_quantized = quantized(run, products[pass].a_operand, products[pass].a_across);
        g.b_quantized = quantized(run, products[pass].b_operand, products[pass].b_across);
    }
    return g;
}

static bool make_samples(const struct run_layer *run, const struct gemm *g, struct ref_sample *rows,
                         struct ref_sample *cols)
{
    int64_t r = g->rows < SAMPLE_SIDE ? g->rows : SAMPLE_SIDE;
    int64_t c = r ? (SAMPLE_OUTPUTS + r - 1) / r : 0;
    if (c > g->cols && g->cols > 0) {
        c = g->cols;
        r = (SAMPLE_OUTPUTS + c - 1) / c;
    }
    cols->index = NULL;
    return ref_sample_create(rows, g->rows, r, run->seed + 1) &&
           ref_sample_create(cols, g->cols, c, run->seed + 2);
}

double *run_sample_dw(const struct run_layer *run)
{
    struct gemm g = describe(run, FP8_PASS_WGRAD);
    struct ref_sample rows = { 0 }, cols = { 0 };
    double *values = NULL;
    if (make_samples(run, &g, &rows, &cols)) {
        fp8_tensor dw = run_host_tensor(run, RUN_DW);
        values = calloc((size_t)(rows.count * cols.count + 1), sizeof *values);
        if (values)
            ref_gather(&dw, &rows, &cols, values);
    }
    ref_sample_destroy(&rows);
    ref_sample_destroy(&cols);
    return values;
}

static void add_bias(const struct run_layer *run, const struct ref_sample *cols, int64_t count,
                     double *exact)
{
    fp8_tensor bias = run_host_tensor(run, RUN_BIAS);
    struct ref_sample first = { (int64_t[]){ 0 }, 1 };
    double *values = calloc((size_t)(cols->count + 1), sizeof *values);
    if (values && cols->count)
        ref_gather(&bias, &first, cols, values);
    for (int64_t i = 0; values && i < count; i++)
        exact[i] += values[i % cols->count];
    free(values);
}

/* The sampled outputs of a pass, and what they are judged by; all arrays are [samples]. */
struct outcome {
    int64_t count;
    double *got;       /* what the pass added or wrote */
    double *before;    /* what it was added to, else zeros */
    double *exact;     /* in float64 on the operands */
    double *magnitude; /* sums of squared terms */
    double *sizes;     /* sums of the terms' sizes */
};

/* The exact products of the samples, of operands or originals, bias added; with `o` the magnitudes
 * and sizes of their terms. */
static bool exact_values(const struct run_layer *run, const struct gemm *g, bool of_operands,
                         const struct ref_sample samples[2], double *exact, struct outcome *o)
{
    struct ref_source a = of_operands ? g->a_quantized : g->a;
    struct ref_source b = of_operands ? g->b_quantized : g->b;
    a.sample = &samples[0];
    b.sample = &samples[1];
    if (!ref_products(&a, &b, g->depth, exact, o ? o->magnitude : NULL) ||
        (o && !ref_sizes(&a, &b, g->depth, o->sizes)))
        return false;
    if (g->out == RUN_Y && run->info.has_bias)
        add_bias(run, &samples[1], samples[0].count * samples[1].count, exact);
    return true;
}

static bool outcome_create(struct outcome *o, int64_t count)
{
    size_t n = (size_t)(count + 1);
    double *block = calloc(5 * n, sizeof *block);
    *o = (struct outcome){ count, block, NULL, NULL, NULL, NULL };
    if (!block)
        return false;
    o->before = block + n;
    o->exact = block + 2 * n;
    o->magnitude = block + 3 * n;
    o->sizes = block + 4 * n;
    return true;
}

static int bounds_of(bool split, fp8_dtype out, int64_t depth)
{
    for (int i = 0; i < (int)(sizeof error_bounds / sizeof error_bounds[0]); i++) {
        if (error_bounds[i].split == split && error_bounds[i].out == out &&
            depth <= error_bounds[i].max_depth)
            return i;
    }
    return -1;
}

/* Each output by itself: half an ulp where it is rounded, and a share of the terms. */
static void judge_each(const struct outcome *o, fp8_dtype out, double share, struct run_row *row)
{
    for (int64_t i = 0; i < o->count && !row->failure[0]; i++) {
        double want = o->before[i] + o->exact[i], slack = share * o->sizes[i];
        /* sums in fp32, of the product, of what is there and of the bias, round too */
        double bound = ref_half_ulp(fabs(want) + slack, out) + slack + fabs(want) * 0x1p-23;
        if (!(fabs(o->before[i] + o->got[i] - want) <= bound))
            fail(row, "output %lld of the sample is %.9g, must be %.9g within %.2e", (long long)i,
                 o->before[i] + o->got[i], want, bound);
    }
}

/* Relative Frobenius error of what exceeds one rounding. */
static double error_apart(const struct outcome *o, fp8_dtype out)
{
    double difference = 0, norm = 0, expected_norm = 0;
    for (int64_t i = 0; i < o->count; i++) {
        double over = fabs(o->got[i] - o->exact[i]);
        over -= ref_half_ulp(fabs(o->before[i] + o->exact[i]) * (1 + 0x1p-20), out);
        difference += over > 0 ? over * over : isnan(over) ? NAN : 0;
        norm += o->exact[i] * o->exact[i];
        expected_norm += o->magnitude[i];
    }
    norm = fmax(norm, expected_norm);
    return norm > 0 ? sqrt(difference / norm) : difference == 0 ? 0 : INFINITY;
}

static void judge_error(const struct run_layer *run, fp8_pass pass, const struct gemm *g,
                        const struct outcome *o, struct run_row *row)
{
    fp8_dtype out = run->tensors[g->out].dtype;
    int at = bounds_of(run->recipe.split[pass], out, g->depth);
    bool few = o->count < FEW_OUTPUTS, apart = at >= 0 && error_bounds[at].apart;
    row->no_bound = at < 0;
    row->each = at >= 0 && (few || (apart && g->depth < FEW_TERMS));
    if (at >= 0 && !(row->each && apart))
        row->error_bound = few ? error_bounds[at].few : error_bounds[at].bound;
    if (row->error_bound >= 0 && !(row->error <= row->error_bound))
        fail(row, "relative error %.2e, bound %.1e", row->error, row->error_bound);
    if (!row->each)
        return;
    if (apart) {
        double error = error_apart(o, out);
        if (!(error <= error_bounds[at].few))
            fail(row, "relative error %.2e beyond one rounding, bound %.1e", error,
                 error_bounds[at].few);
    }
    judge_each(o, out, error_bounds[at].few, row);
}

/* `factors`: how many quantised numbers of the smaller operand the sample holds. */
static void judge_sqnr(const struct gemm *g, int64_t factors, struct run_row *row)
{
    bool e5m2 = g->a_quantized.dtype == FP8_DTYPE_E5M2 || g->b_quantized.dtype == FP8_DTYPE_E5M2;
    bool is_fp8 = g->a_quantized.dtype != FP8_DTYPE_BF16; /* else there is no noise but rounding */
    if (is_fp8 && row->samples >= JUDGED_OUTPUTS && factors >= FEW_OUTPUTS)
        row->sqnr_bound = e5m2 ? sqnr_bound_e5m2 : sqnr_bound_e4m3;
    if (isnan(row->error))
        fail(row, "the result is not a number");
    if (row->sqnr_bound >= 0 && !(row->sqnr >= row->sqnr_bound))
        fail(row, "SQNR %.2f dB, bound %.0f dB", row->sqnr, row->sqnr_bound);
}

/* Relative to what is rounded: in 16 bits the sum with what was there, in fp32 the product
 * alone. */
static double plain_error(const struct outcome *o, fp8_dtype out)
{
    double norm = 0, sum_norm = 0;
    for (int64_t i = 0; i < o->count; i++) {
        double sum = o->before[i] + o->exact[i];
        norm += o->exact[i] * o->exact[i];
        sum_norm += sum * sum;
    }
    double error =
        ref_error(o->got, o->exact, o->count < FEW_OUTPUTS ? o->magnitude : NULL, o->count);
    return out != FP8_DTYPE_FP32 && sum_norm > norm && norm > 0 ? error * sqrt(norm / sum_norm)
                                                                : error;
}

int run_check_gemm(const struct run_layer *run, fp8_pass pass, const double *dw_before,
                   struct run_row *row)
{
    struct gemm g = describe(run, pass);
    struct ref_sample samples[2] = { { 0 }, { 0 } };
    struct outcome o = { 0 };
    int code = CLI_MACHINE;
    fp8_tensor out = run_host_tensor(run, g.out);
    int64_t nonfinite = ref_count_nonfinite(&out);
    if (nonfinite > 0)
        fail(row, "%lld elements of %lld are inf or NaN", (long long)nonfinite,
             (long long)(out.rows * out.cols));
    if (!make_samples(run, &g, &samples[0], &samples[1]) ||
        !outcome_create(&o, samples[0].count * samples[1].count))
        goto done;
    ref_gather(&out, &samples[0], &samples[1], o.got);
    for (int64_t i = 0; dw_before && i < o.count; i++) {
        o.before[i] = dw_before[i];
        o.got[i] -= dw_before[i];
    }
    bool sizes = o.count < FEW_OUTPUTS || g.depth < FEW_TERMS;
    if (!exact_values(run, &g, true, samples, o.exact, sizes ? &o : NULL))
        goto done;
    row->error = plain_error(&o, out.dtype);
    row->samples = o.count;
    judge_error(run, pass, &g, &o, row);
    if (!exact_values(run, &g, false, samples, o.exact, NULL))
        goto done;
    double noise = ref_error(o.got, o.exact, sizes ? o.magnitude : NULL, o.count);
    if (o.count > 0 && g.depth > 0)
        row->sqnr = noise > 0 ? -20 * log10(noise) : INFINITY;
    int64_t side = samples[0].count < samples[1].count ? samples[0].count : samples[1].count;
    judge_sqnr(&g, side * g.depth, row);
    code = CLI_DONE;
done:
    ref_sample_destroy(&samples[0]);
    ref_sample_destroy(&samples[1]);
    free(o.got);
    return code ? no_memory() : CLI_DONE;
}
