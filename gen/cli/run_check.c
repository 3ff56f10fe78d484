/*
 * run_check.c - the verdicts of `fp8gen run`.
 *
 * In: a layer whose buffers are in host memory. Out: the numbers and, if one is out of bounds, the
 * sentence of a report row. Two errors are told apart: that of the kernel (against float64 on the
 * operands as quantised; small, bounded by accumulation and output dtype) and that of FP8 itself
 * (SQNR against float64 on the original tensors; a property of the formats). Bounds are those of the
 * project's accuracy promise and stand in one table. Too few samples make statistics, not verdicts: the
 * SQNR of fewer than 10,000 outputs is shown and not judged.
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

/* Relative Frobenius error of a GEMM on normal data, up to the given depth; `few` where less than a
 * thousand outputs make no average and the bound for any data holds. */
static const struct {
    bool split;
    fp8_dtype out;
    int64_t max_depth;
    double bound, few;
} error_bounds[] = {
    { true, FP8_DTYPE_FP32, INT64_MAX, 2e-4, 1e-3 },
    { true, FP8_DTYPE_BF16, INT64_MAX, 2e-3, 2.5e-3 },
    { true, FP8_DTYPE_FP16, INT64_MAX, 2e-3, 2.5e-3 },
    { false, FP8_DTYPE_FP32, 28672, 1e-2, 1e-2 },
    { false, FP8_DTYPE_BF16, 28672, 1e-2, 1e-2 },
    { false, FP8_DTYPE_FP16, 28672, 1e-2, 1e-2 },
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

/* ---- operands ------------------------------------------------------------------------------------------- */

static bool same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static enum run_buffer source_of(enum run_buffer operand)
{
    return operand == RUN_WEIGHT ? RUN_W : operand == RUN_GRAD ? RUN_DY : RUN_X;
}

int run_check_operand(const struct run_layer *run, enum run_buffer buffer, struct run_row *row)
{
    fp8_tensor source = run_host_tensor(run, source_of(buffer));
    fp8_operand operand = run_host_operand(run, buffer);
    fp8_operand_view view;
    fp8_status status = fp8_operand_parts(&operand, &view);
    if (status)
        return cli_fp8_failed(status, "layer '%s', %s", run->info.name, row->pass);
    struct ref_scales rule = ref_make_scales(&source, operand.dtype, run->recipe.power_of_two);
    float amax = view.scales[8], scale = view.scales[0], scale_inv = view.scales[4];
    if (!same_bits(amax, rule.amax))
        fail(row, "amax is %a, must be %a", (double)amax, (double)rule.amax);
    if (!same_bits(scale, rule.scale))
        fail(row, "scale is %a, must be %a", (double)scale, (double)rule.scale);
    if (!same_bits(scale_inv, rule.scale_inv))
        fail(row, "scale_inv is %a, must be %a", (double)scale_inv, (double)rule.scale_inv);
    int64_t wrong = ref_count_wrong_bytes(&source, &operand, rule.scale);
    if (wrong < 0)
        return no_memory();
    if (wrong > 0)
        fail(row, "%lld FP8 bytes differ from the rules", (long long)wrong);
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
        fail(row, "dbias: relative error %.1e, bound %.0e", row->dbias_error, dbias_bound);
    free(sums);
    return CLI_DONE;
}

/* ---- GEMMs ---------------------------------------------------------------------------------------------- */

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
    return (struct ref_source){ t.data, t.dtype, t.cols, by_column, 1, NULL };
}

static struct ref_source quantized(const struct run_layer *run, enum run_buffer buffer,
                                   bool transposed)
{
    fp8_operand operand = run_host_operand(run, buffer);
    fp8_operand_view view;
    if (fp8_operand_parts(&operand, &view) != FP8_OK)
        return (struct ref_source){ 0 };
    return (struct ref_source){ transposed ? view.transposed : view.row,
                                operand.dtype,
                                transposed ? view.transposed_ld : view.row_ld,
                                false,
                                (double)view.scales[4],
                                NULL };
}

static struct gemm describe(const struct run_layer *run, fp8_pass pass)
{
    int64_t m = run->m, n = run->info.out_features, k = run->info.in_features;
    struct gemm g = { .out = RUN_Y, .rows = m, .cols = n, .depth = k };
    if (pass == FP8_PASS_FPROP) {
        g.a = original(run, RUN_X, false);
        g.b = original(run, RUN_W, false);
        g.a_quantized = quantized(run, RUN_X_QUANTIZED, false);
        g.b_quantized = quantized(run, RUN_WEIGHT, false);
    } else if (pass == FP8_PASS_WGRAD) {
        g = (struct gemm){ .out = RUN_DW, .rows = n, .cols = k, .depth = m };
        g.a = original(run, RUN_DY, true);
        g.b = original(run, RUN_X, true);
        g.a_quantized = quantized(run, RUN_GRAD, true);
        g.b_quantized = quantized(run, RUN_SAVED, true);
    } else {
        g = (struct gemm){ .out = RUN_DX, .rows = m, .cols = k, .depth = n };
        g.a = original(run, RUN_DY, false);
        g.b = original(run, RUN_W, true);
        g.a_quantized = quantized(run, RUN_GRAD, false);
        g.b_quantized = quantized(run, RUN_WEIGHT, true);
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

static void judge(const struct run_layer *run, fp8_pass pass, const struct gemm *g,
                  struct run_row *row)
{
    bool split = run->recipe.split[pass];
    for (size_t i = 0; i < sizeof error_bounds / sizeof error_bounds[0]; i++) {
        if (error_bounds[i].split == split && error_bounds[i].out == run->tensors[g->out].dtype &&
            g->depth <= error_bounds[i].max_depth)
            row->error_bound =
                row->samples < FEW_OUTPUTS ? error_bounds[i].few : error_bounds[i].bound;
    }
    bool e5m2 = g->a_quantized.dtype == FP8_DTYPE_E5M2 || g->b_quantized.dtype == FP8_DTYPE_E5M2;
    if (row->samples >= JUDGED_OUTPUTS && g->depth > 0)
        row->sqnr_bound = e5m2 ? sqnr_bound_e5m2 : sqnr_bound_e4m3;
    if (row->error_bound >= 0 && !(row->error <= row->error_bound))
        fail(row, "relative error %.2e, bound %.0e", row->error, row->error_bound);
    if (isnan(row->error))
        fail(row, "the result is not a number");
    if (row->sqnr_bound >= 0 && !(row->sqnr >= row->sqnr_bound))
        fail(row, "SQNR %.2f dB, bound %.0f dB", row->sqnr, row->sqnr_bound);
}

/* The exact products of the samples, of operands or originals; bias added. */
static bool exact_values(const struct run_layer *run, const struct gemm *g, bool of_operands,
                         const struct ref_sample samples[2], double *exact, double *magnitude)
{
    struct ref_source a = of_operands ? g->a_quantized : g->a;
    struct ref_source b = of_operands ? g->b_quantized : g->b;
    a.sample = &samples[0];
    b.sample = &samples[1];
    if (!ref_products(&a, &b, g->depth, exact, magnitude))
        return false;
    if (g->out == RUN_Y && run->info.has_bias)
        add_bias(run, &samples[1], samples[0].count * samples[1].count, exact);
    return true;
}

int run_check_gemm(const struct run_layer *run, fp8_pass pass, const double *dw_before,
                   struct run_row *row)
{
    struct gemm g = describe(run, pass);
    struct ref_sample samples[2] = { { 0 }, { 0 } };
    int code = CLI_MACHINE;
    double *values = NULL;
    fp8_tensor out = run_host_tensor(run, g.out);
    int64_t nonfinite = ref_count_nonfinite(&out);
    if (nonfinite > 0)
        fail(row, "%lld elements of %lld are inf or NaN", (long long)nonfinite,
             (long long)(out.rows * out.cols));
    if (!make_samples(run, &g, &samples[0], &samples[1]))
        goto done;
    size_t count = (size_t)(samples[0].count * samples[1].count);
    values = calloc(3 * (count + 1), sizeof *values);
    if (!values)
        goto done;
    double *exact = values + count, *magnitude = exact + count;
    ref_gather(&out, &samples[0], &samples[1], values);
    for (size_t i = 0; dw_before && i < count; i++)
        values[i] -= dw_before[i];
    bool few = count < FEW_OUTPUTS;
    if (!exact_values(run, &g, true, samples, exact, few ? magnitude : NULL))
        goto done;
    row->error = ref_error(values, exact, magnitude, (int64_t)count);
    if (!exact_values(run, &g, false, samples, exact, NULL))
        goto done;
    double noise = ref_error(values, exact, magnitude, (int64_t)count);
    if (count > 0 && g.depth > 0)
        row->sqnr = noise > 0 ? -20 * log10(noise) : INFINITY;
    row->samples = (int64_t)count;
    judge(run, pass, &g, row);
    code = CLI_DONE;
done:
    ref_sample_destroy(&samples[0]);
    ref_sample_destroy(&samples[1]);
    free(values);
    return code ? no_memory() : CLI_DONE;
}
