/*
 * bench_gemm.c - `fp8gen bench gemm`: generated GEMMs against the best of cuBLASLt and against
 * bf16.
 *
 * A row is one GEMM: the generated kernels, all FP8 algorithms of cuBLASLt with the same
 * accumulation on the same operands, and all its bf16 algorithms, in turns in one run
 * (gemm_contest.c). The value of a row is the fastest generated kernel that takes part; with it
 * stands what the plan's own choice reaches. Rows are printed as they finish, so that a run that is
 * cut keeps what it has.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/gemm.h"

#define PEAK 1979.0 /* TFLOP/s, dense FP8 of an H100 and H200 SXM */
#define DEFAULT_SECONDS 0.08
#define MAX_LAYERS (2 * BENCH_MAX_SHAPES)

static const struct bench_shape standard[] = {
    { 8192, 4096, 4096, "" },  { 8192, 6144, 4096, "" }, { 8192, 28672, 4096, "" },
    { 8192, 4096, 14336, "" }, { 8192, 8192, 8192, "" }, { 8192, 8192, 28672, "" },
    { 8192, 7168, 8192, "" },  { 4096, 7168, 2048, "" }, { 16384, 8192, 1280, "" },
    { 2048, 2048, 2048, "" },  { 128, 4096, 4096, "" },  { 8192, 2556, 4096, "" },
};

struct part {
    fp8_pass pass;
    bool split;
};

enum { TENSOR_FAST, TENSOR_SPLIT, WGRAD_SPLIT, WGRAD_FAST, ODD_N, CASES };
static const struct {
    const char *name;
    struct part parts[3];
    int count;
} cases[CASES] = {
    [TENSOR_FAST] = { "tensor_fast", { { FP8_PASS_FPROP, false }, { FP8_PASS_DGRAD, false } }, 2 },
    [TENSOR_SPLIT] = { "tensor_split", { { FP8_PASS_FPROP, true }, { FP8_PASS_DGRAD, true } }, 2 },
    [WGRAD_SPLIT] = { "wgrad_split", { { FP8_PASS_WGRAD, true } }, 1 },
    [WGRAD_FAST] = { "wgrad_fast", { { FP8_PASS_WGRAD, false } }, 1 },
    [ODD_N] = { "odd_n",
                { { FP8_PASS_FPROP, false }, { FP8_PASS_DGRAD, false }, { FP8_PASS_WGRAD, true } },
                3 },
};

/* Sums of a case for the means at the end. */
struct tally {
    double log_sum, least, plan_log_sum, plan_least;
    int count, plan_count;
};

/* The fastest bf16 algorithms of a pass, found once for a shape. */
struct bf16_best {
    struct baseline_gemm *gemm;
    int algorithms[2], count;
};

struct gemm_bench {
    struct bench bench;
    bool wanted[CASES];
    double seconds;
    struct gemm_layer layers[MAX_LAYERS];
    int layer_count;
    struct gemm_set set;
    struct baseline *baseline;
    struct gemm_data data, twin;
    fp8_layer **own[2],
        **other[2]; /* layers of the candidates, fast and split; other: of the twin */
    struct bf16_best bf16[FP8_PASS_COUNT];
    struct tally tallies[CASES];
};

/* ---- what is measured ------------------------------------------------------------------------ */

static int read_cases(struct gemm_bench *b)
{
    const struct cli_list *given = &b->bench.values->cases;
    const char *names[CASES];
    for (int i = 0; i < CASES; i++) {
        names[i] = cases[i].name;
        b->wanted[i] = given->count == 0;
    }
    for (int i = 0; i < given->count; i++) {
        int found = cli_find_name("case", "case", given->items[i], names, CASES);
        if (found < 0)
            return CLI_USAGE;
        b->wanted[found] = true;
    }
    return CLI_DONE;
}

static bool is_odd(const struct bench_shape *shape)
{
    return shape->n % 16 != 0;
}

/* The standard odd shape is for its own case; shapes that the user gave are measured in all
 * cases. */
static bool takes_part(const struct gemm_bench *b, int which, const struct bench_shape *shape)
{
    if (which == ODD_N)
        return b->wanted[which] && is_odd(shape);
    return b->wanted[which] && (b->bench.values->shapes.count > 0 || !is_odd(shape));
}

static int layer_of(struct gemm_bench *b, int64_t m, int64_t n, int64_t k)
{
    int i = 0;
    while (i < b->layer_count && (b->layers[i].n != n || b->layers[i].k != k))
        i++;
    struct gemm_layer *layer = &b->layers[i];
    if (i == b->layer_count) {
        *layer = (struct gemm_layer){ .n = n,
                                      .k = k,
                                      .y = FP8_DTYPE_BF16,
                                      .dx = FP8_DTYPE_BF16,
                                      .dw = FP8_DTYPE_FP32,
                                      .format = "hybrid" };
        snprintf(layer->name, sizeof layer->name, "shape_%d", i);
        b->layer_count++;
    }
    if (layer->max_m < m)
        layer->max_m = m;
    return i;
}

static int64_t twin_n(const struct bench_shape *shape)
{
    return (shape->n + 15) / 16 * 16;
}

static bool any_case(const struct gemm_bench *b, const struct bench_shape *shape)
{
    bool any = false;
    for (int i = 0; i < CASES; i++)
        any = any || takes_part(b, i, shape);
    return any;
}

static void add_layers(struct gemm_bench *b, struct gemm_room *room, struct gemm_room *twin)
{
    for (int i = 0; i < b->bench.shape_count; i++) {
        const struct bench_shape *s = &b->bench.shapes[i];
        if (!any_case(b, s))
            continue;
        gemm_room_for(room, &b->layers[layer_of(b, s->m, s->n, s->k)], s->m);
        if (takes_part(b, ODD_N, s))
            gemm_room_for(twin, &b->layers[layer_of(b, s->m, twin_n(s), s->k)], s->m);
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

static double tflops(const struct gemm_contender *c)
{
    const struct gemm_problem *p = c ? c->problem : NULL;
    return c ? 2.0 * (double)p->rows * (double)p->cols * (double)p->depth / c->seconds * 1e-12 : -1;
}

static void count_ratio(double ratio, double *log_sum, double *least, int *count)
{
    *log_sum += log(ratio);
    *least = *count == 0 || ratio < *least ? ratio : *least;
    ++*count;
}

struct row {
    int which;
    const struct bench_shape *shape;
    const struct gemm_problem *problem;
    const struct gemm_contender *ours, *plan, *lt, *bf16, *twin;
    const struct gemm_contest *contest;
    int lt_count, candidates;
};

static void set_real(json_t *row, const char *key, double value)
{
    json_object_set_new(row, key, value > 0 ? json_real(value) : json_null());
}

static void set_text(json_t *row, const char *key, const char *text)
{
    json_object_set_new(row, key, text ? json_string(text) : json_null());
}

/* TFLOP/s of the generated kernels that met in turns, by name: what a cost model is fitted to. */
static json_t *measured(const struct row *r)
{
    json_t *object = json_object();
    for (int i = 0; i < r->contest->count; i++) {
        const struct gemm_contender *c = &r->contest->list[i];
        if (c->group == GEMM_GENERATED && !c->out && c->stage > 1)
            set_real(object, c->name, tflops(c));
    }
    return object;
}

static void print_json(const struct row *r, const struct bench_result *result)
{
    const struct gemm_problem *p = r->problem;
    char formats[48];
    json_t *row = bench_result_json(result);
    if (row) {
        snprintf(formats, sizeof formats, "%s x %s -> %s", fp8_dtype_name(p->a),
                 fp8_dtype_name(p->b), fp8_dtype_name(p->out));
        set_text(row, "formats", formats);
        set_text(row, "accumulation", p->split ? "split" : "fast");
        json_object_set_new(row, "accumulate", json_boolean(p->accumulate));
        set_text(row, "kernel", r->ours->name);
        set_real(row, "microseconds", r->ours->seconds * 1e6);
        set_real(row, "error", r->ours->error);
        set_real(row, "peak_fraction", result->value / PEAK);
        json_object_set_new(row, "candidates", json_integer(r->candidates));
        set_text(row, "plan_kernel", r->plan ? r->plan->name : NULL);
        set_real(row, "plan_value", tflops(r->plan));
        json_object_set_new(row, "measured", measured(r));
        set_real(row, "cublaslt", tflops(r->lt));
        set_real(row, "bf16", tflops(r->bf16));
        set_real(row, "bf16_ratio", r->bf16 ? result->value / tflops(r->bf16) : -1);
    }
    bench_print_json(row);
}

static void figure(char text[16], double value, int digits)
{
    if (value > 0)
        snprintf(text, 16, "%.*f", digits, value);
    else
        snprintf(text, 16, "-");
}

static void print_line(struct gemm_bench *b, const struct row *r, double value, double base)
{
    char baseline[16], ratio[16], bf16[16], plan[16];
    if (b->bench.rows == 0)
        printf("%-12s %-5s %6s %6s %6s %9s %8s %6s %8s %6s %9s  %s\n", "case", "pass", "M", "N",
               "K", "generated", "baseline", "ratio", "bf16", "peak", "plan's", "kernel");
    figure(baseline, base, 1);
    figure(ratio, base > 0 ? value / base : -1, 3);
    figure(bf16, tflops(r->bf16), 1);
    figure(plan, tflops(r->plan), 1);
    printf("%-12s %-5s %6" PRId64 " %6" PRId64 " %6" PRId64 " %9.1f %8s %6s %8s %5.1f%% %9s  %s\n",
           cases[r->which].name, fp8_pass_name(r->problem->pass), r->shape->m, r->shape->n,
           r->shape->k, value, baseline, ratio, bf16, 100 * value / PEAK, plan, r->ours->name);
    fflush(stdout);
}

static void print_row(struct gemm_bench *b, const struct row *r)
{
    char name[80];
    struct tally *t = &b->tallies[r->which];
    double value = tflops(r->ours), base = tflops(r->twin ? r->twin : r->lt);
    if (r->twin)
        snprintf(name, sizeof name, "generated, N %" PRId64, twin_n(r->shape));
    else
        snprintf(name, sizeof name, "cuBLASLt FP8, best of %d algorithms", r->lt_count);
    struct bench_result result = { .bench = "gemm",
                                   .name = cases[r->which].name,
                                   .pass = fp8_pass_name(r->problem->pass),
                                   .shape = r->shape,
                                   .unit = "TFLOP/s",
                                   .value = value,
                                   .baseline = base,
                                   .baseline_name = base > 0 ? name : NULL,
                                   .launches = -1 };
    cli_progress_end();
    if (base > 0)
        count_ratio(value / base, &t->log_sum, &t->least, &t->count);
    if (base > 0 && r->plan)
        count_ratio(tflops(r->plan) / base, &t->plan_log_sum, &t->plan_least, &t->plan_count);
    if (b->bench.values->json)
        print_json(r, &result);
    else
        print_line(b, r, value, base);
    b->bench.rows++;
}

static void print_means(const struct gemm_bench *b)
{
    FILE *file = b->bench.values->json ? stderr : stdout;
    if (b->bench.rows == 0 || (b->bench.values->json && cli_verbosity() < 0))
        return;
    fprintf(file, "\n%-12s %5s %9s %8s %12s %8s\n", "case", "rows", "geo. mean", "least",
            "plan's mean", "least");
    for (int i = 0; i < CASES; i++) {
        const struct tally *t = &b->tallies[i];
        char plan[16] = "-", least[16] = "-";
        if (t->count == 0)
            continue;
        if (t->plan_count) {
            figure(plan, exp(t->plan_log_sum / t->plan_count), 3);
            figure(least, t->plan_least, 3);
        }
        fprintf(file, "%-12s %5d %9.3f %8.3f %12s %8s\n", cases[i].name, t->count,
                exp(t->log_sum / t->count), t->least, plan, least);
    }
}

/* ---- one row --------------------------------------------------------------------------------- */

static int add_bf16(struct gemm_bench *b, struct gemm_contest *contest,
                    const struct gemm_problem *problem)
{
    struct bf16_best *best = &b->bf16[problem->pass];
    struct baseline_gemm_shape shape = gemm_baseline_shape(problem, false);
    int code = CLI_DONE;
    if (!best->gemm)
        code = baseline_gemm_open(b->baseline, &shape, &best->gemm);
    if (!code && best->gemm && best->count == 0)
        return gemm_contest_add_baseline(contest, GEMM_BF16, problem, NULL, best->gemm, -1);
    for (int i = 0; !code && best->gemm && i < best->count; i++)
        code = gemm_contest_add_baseline(contest, GEMM_BF16, problem, NULL, best->gemm,
                                         best->algorithms[i]);
    return code;
}

static void keep_bf16(struct gemm_bench *b, const struct gemm_contest *contest, fp8_pass pass)
{
    struct bf16_best *best = &b->bf16[pass];
    best->count = 0;
    for (int i = 0; i < 2; i++) {
        const struct gemm_contender *c = gemm_contest_best(contest, GEMM_BF16, i);
        if (c)
            best->algorithms[best->count++] = c->algorithm;
    }
}

static void forget_bf16(struct gemm_bench *b)
{
    for (int i = 0; i < FP8_PASS_COUNT; i++) {
        baseline_gemm_destroy(b->bf16[i].gemm);
        b->bf16[i] = (struct bf16_best){ 0 };
    }
}

static int report(struct gemm_bench *b, int which, const struct bench_shape *shape,
                  const struct gemm_contest *contest, const struct gemm_problem *problem)
{
    struct row row = { .which = which,
                       .contest = contest,
                       .shape = shape,
                       .problem = problem,
                       .plan = gemm_contest_plan(contest, GEMM_GENERATED),
                       .lt = gemm_contest_best(contest, GEMM_CUBLASLT, 0),
                       .bf16 = gemm_contest_best(contest, GEMM_BF16, 0),
                       .twin = gemm_contest_best(contest, GEMM_TWIN, 0),
                       .lt_count = gemm_contest_members(contest, GEMM_CUBLASLT),
                       .candidates = gemm_contest_members(contest, GEMM_GENERATED) };
    const char *which_ones = b->bench.values->candidates;
    bool plan_only = which_ones && strcmp(which_ones, "plan") == 0;
    row.ours = plan_only ? row.plan : gemm_contest_best(contest, GEMM_GENERATED, 0);
    if (row.ours) {
        print_row(b, &row);
        return CLI_DONE;
    }
    cli_error("no generated kernel gives a right result for %s of %" PRId64 " x %" PRId64
              " x %" PRId64,
              fp8_pass_name(problem->pass), shape->m, shape->n, shape->k);
    return CLI_BUG;
}

static int measure_row(struct gemm_bench *b, int which, const struct bench_shape *shape,
                       const struct part *part)
{
    bool odd = which == ODD_N, wgrad = part->pass == FP8_PASS_WGRAD;
    struct gemm_problem own = gemm_problem_of(&b->data, part->pass, part->split, wgrad), other;
    struct gemm_contest contest = { .bench = &b->bench };
    struct gemm_check *check = NULL, *twin_check = NULL;
    struct baseline_gemm *lt = NULL;
    struct baseline_gemm_shape lt_shape;
    if (odd)
        other = gemm_problem_of(&b->twin, part->pass, part->split, wgrad);
    else
        other = own;
    int code = gemm_check_create(&own, &check);
    if (!code && odd)
        code = gemm_check_create(&other, &twin_check);
    if (!code)
        code = gemm_contest_add_set(&contest, GEMM_GENERATED, &own, check, &b->set,
                                    b->own[part->split]);
    if (!code && odd)
        code = gemm_contest_add_set(&contest, GEMM_TWIN, &other, twin_check, &b->set,
                                    b->other[part->split]);
    lt_shape = gemm_baseline_shape(&other, true);
    if (!code)
        code = baseline_gemm_open(b->baseline, &lt_shape, &lt);
    if (!code && lt)
        code = gemm_contest_add_baseline(&contest, GEMM_CUBLASLT, &other, odd ? twin_check : check,
                                         lt, -1);
    if (!code)
        code = add_bf16(b, &contest, &own);
    if (!code)
        code = gemm_contest_run(&contest, b->seconds);
    if (!code) {
        keep_bf16(b, &contest, part->pass);
        code = report(b, which, shape, &contest, &own);
    }
    gemm_contest_destroy(&contest);
    baseline_gemm_destroy(lt);
    gemm_check_destroy(check);
    gemm_check_destroy(twin_check);
    return code;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* Layers of all candidates for a shape, its operands quantised. */
static int open_layers(struct gemm_bench *b, struct gemm_data *data, fp8_layer **layers[2],
                       int layer, int64_t m)
{
    const fp8_layer *by = NULL;
    bool wanted[2] = { false, false };
    int code = CLI_DONE;
    for (int i = 0; i < b->set.count; i++)
        wanted[b->set.items[i].split] = true;
    for (int split = 0; !code && split < 2; split++) {
        if (wanted[split])
            code = gemm_set_layers(&b->set, layer, split, layers[split]);
    }
    for (int i = 0; i < b->set.count; i++)
        by = layers[0][i] ? layers[0][i] : layers[1][i] ? layers[1][i] : by;
    return code ? code : gemm_data_fill(data, &b->layers[layer], m, by);
}

static int measure_shape(struct gemm_bench *b, const struct bench_shape *s)
{
    int code = open_layers(b, &b->data, b->own, layer_of(b, s->m, s->n, s->k), s->m);
    if (!code && takes_part(b, ODD_N, s))
        code = open_layers(b, &b->twin, b->other, layer_of(b, s->m, twin_n(s), s->k), s->m);
    for (int which = 0; which < CASES; which++) {
        for (int i = 0; takes_part(b, which, s) && i < cases[which].count; i++) {
            if (!code && !cli_output_broken())
                code = measure_row(b, which, s, &cases[which].parts[i]);
        }
    }
    forget_bf16(b);
    for (int split = 0; split < 2; split++) {
        gemm_set_free_layers(&b->set, b->own[split]);
        gemm_set_free_layers(&b->set, b->other[split]);
    }
    return code;
}

static int make_lists(struct gemm_bench *b)
{
    bool failed = false;
    for (int i = 0; i < 2; i++) {
        b->own[i] = calloc((size_t)b->set.count + 1, sizeof *b->own[i]);
        b->other[i] = calloc((size_t)b->set.count + 1, sizeof *b->other[i]);
        failed = failed || !b->own[i] || !b->other[i];
    }
    if (failed)
        cli_error("out of memory");
    return failed ? CLI_MACHINE : CLI_DONE;
}

static int open_all(struct gemm_bench *b)
{
    struct gemm_room room = { 0 }, twin = { 0 };
    const bool wanted[2] = {
        b->wanted[TENSOR_FAST] || b->wanted[WGRAD_FAST] || b->wanted[ODD_N],
        b->wanted[TENSOR_SPLIT] || b->wanted[WGRAD_SPLIT] || b->wanted[ODD_N],
    };
    add_layers(b, &room, &twin);
    if (b->layer_count == 0) {
        cli_error("none of the shapes belongs to the wanted cases");
        cli_hint("odd_n takes shapes whose N is no multiple of 16");
        return CLI_USAGE;
    }
    b->set = (struct gemm_set){ &b->bench, b->layers, b->layer_count, NULL, 0 };
    int code = gemm_set_choose(&b->set, b->bench.values->candidates, true, wanted);
    if (!code)
        code = bench_open_gpu(&b->bench, "bench gemm");
    if (!code)
        code = gemm_set_build(&b->set);
    if (!code)
        code = make_lists(b);
    if (!code)
        code = baseline_create(&b->bench, &b->baseline);
    if (!code)
        code = gemm_data_create(&b->data, &b->bench, &room);
    if (!code && twin.x)
        code = gemm_data_create(&b->twin, &b->bench, &twin);
    if (!code)
        bench_print_header(&b->bench, "gemm");
    return code;
}

static int run(const void *values, int count, char **operands)
{
    struct gemm_bench *b = calloc(1, sizeof *b);
    (void)count;
    (void)operands;
    if (!b) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    b->bench.values = values;
    int code = bench_read_shapes(&b->bench, 3, standard, sizeof standard / sizeof standard[0]);
    if (!code)
        code = read_cases(b);
    if (!code)
        code = cli_read_seconds("seconds", b->bench.values->seconds, DEFAULT_SECONDS, &b->seconds);
    if (!code)
        code = open_all(b);
    for (int i = 0; !code && i < b->bench.shape_count && !cli_output_broken(); i++) {
        if (any_case(b, &b->bench.shapes[i]))
            code = measure_shape(b, &b->bench.shapes[i]);
    }
    cli_progress_end();
    print_means(b);
    gemm_data_destroy(&b->twin);
    gemm_data_destroy(&b->data);
    baseline_destroy(b->baseline);
    for (int i = 0; i < 2; i++) {
        free(b->own[i]);
        free(b->other[i]);
    }
    gemm_set_close(&b->set);
    code = bench_close(&b->bench, code);
    free(b);
    return code;
}

const struct cli_command cli_bench_gemm_command = {
    .name = "bench gemm",
    .operands = "",
    .summary = "generated GEMMs against the best of cuBLASLt, and bf16",
    .details = "Needs a CUDA device. A row is one GEMM: the fastest generated kernel against the "
               "fastest of all cuBLASLt algorithms with the same accumulation, on the same "
               "operands, and against the fastest bf16 one, all in turns in one run; every FP8 "
               "result is checked first. 'peak' is the share of 1979 TFLOP/s; 'plan's' is what the "
               "plan would choose among the generated kernels. Cases:\n"
               "  tensor_fast   fprop (E4M3 x E4M3), dgrad (E5M2 x E4M3), bf16 out, fast "
               "accumulation\n"
               "  tensor_split  the same with split accumulation, against cuBLASLt without fast "
               "accumulation\n"
               "  wgrad_split   E5M2 x E4M3 added into fp32, split accumulation\n"
               "  wgrad_fast    the same, fast accumulation\n"
               "  odd_n         N = 2556, against our own N = 2560\n"
               "Rows are printed as they finish; geometric means and the least ratio of each case "
               "come last.",
    .options = bench_options_gemm,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
