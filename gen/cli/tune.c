/*
 * tune.c - `fp8gen tune SPEC -o FILE`: measures which kernel each GEMM of a spec should take.
 *
 * In: a spec. Out: a tuning file (tune_file.c) and a table. Every GEMM in every range of M is a
 * contest (gemm_contest.c) of all generated configurations, all FP8 algorithms of cuBLASLt and all
 * its bf16 ones. The file is written anew, whole, after each shape, so that a run that is cut keeps
 * what it has. bf16 is never chosen: where it is faster, that is said, and the user decides.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"
#include "gen/cli/tune.h"

#define DEFAULT_SECONDS 0.1
#define MAX_TOKENS 64
#define MAX_SHOWN 200

struct values {
    const char *output;
    const char *layer;
    const char *tokens;
    const char *seconds;
    const char *candidates;
    const char *recipe;
    const char *fsdp;
    const char *template_dir;
};

static const struct cli_option options[] = {
    { .name = "output",
      .letter = 'o',
      .kind = CLI_TEXT,
      .metavar = "FILE",
      .doc = "the tuning file (required); an older one is replaced",
      .offset = offsetof(struct values, output) },
    CLI_OPTION_LAYER(struct values),
    { .name = "tokens",
      .kind = CLI_TEXT,
      .metavar = "N,...",
      .doc = "only the ranges of M that hold these, measured there (default: every range)",
      .offset = offsetof(struct values, tokens) },
    { .name = "seconds",
      .kind = CLI_TEXT,
      .metavar = "S",
      .doc = "measure each finalist of a GEMM for S seconds at most (default 0.1)",
      .offset = offsetof(struct values, seconds) },
    { .name = "candidates",
      .kind = CLI_TEXT,
      .metavar = "WHICH",
      .doc = "generated configurations: all, or names A,B,... (default all)",
      .offset = offsetof(struct values, candidates) },
    CLI_OPTION_RECIPE(struct values),
    CLI_OPTION_FSDP(struct values),
    CLI_OPTION_TEMPLATE_DIR(struct values),
    { .name = NULL },
};

struct tuner {
    const struct values *values;
    struct bench_values bench_values;
    struct bench bench;
    double seconds;
    int64_t tokens[MAX_TOKENS];
    int token_count;
    struct tune_plan plan;
    struct gemm_set set;
    struct baseline *baseline;
    struct gemm_data data;
    fp8_layer **layers[2]; /* of the candidates: fast, split */
};

static int no_memory(void)
{
    cli_error("out of memory");
    return CLI_MACHINE;
}

/* ---- options --------------------------------------------------------------------------------- */

static int read_tokens(struct tuner *t)
{
    const char *at = t->values->tokens;
    while (at && *at) {
        char *end;
        errno = 0;
        int64_t number = strtoll(at, &end, 10);
        if (end == at || errno || number < 1 || (*end && (*end != ',' || !end[1])) ||
            t->token_count == MAX_TOKENS) {
            cli_error("--tokens takes up to %d whole numbers from 1 with commas, not '%s'",
                      MAX_TOKENS, t->values->tokens);
            return CLI_USAGE;
        }
        t->tokens[t->token_count++] = number;
        at = *end ? end + 1 : end;
    }
    return CLI_DONE;
}

static int read_options(struct tuner *t, const char *spec)
{
    const struct values *v = t->values;
    if (!v->output) {
        cli_error("'tune' needs the tuning file");
        cli_hint("fp8gen tune %s -o FILE", spec);
        return CLI_USAGE;
    }
    if (cli_is_folder(v->output)) {
        cli_error("cannot write '%s': it is a folder", v->output);
        return CLI_USAGE;
    }
    if (v->candidates && strcmp(v->candidates, "plan") == 0) {
        cli_error("--candidates plan is for 'bench gemm': tuning measures configurations");
        return CLI_USAGE;
    }
    int code = read_tokens(t);
    return code ? code : cli_read_seconds("seconds", v->seconds, DEFAULT_SECONDS, &t->seconds);
}

static int read_plan(struct tuner *t, const char *path)
{
    struct cli_spec spec = { .path = path,
                             .recipe = t->values->recipe,
                             .fsdp = t->values->fsdp,
                             .template_dir = t->values->template_dir };
    fp8gen *gen = NULL;
    int code = cli_spec_open(&spec, NULL, &gen);
    if (code)
        return code;
    json_t *plan = plan_read(gen, path, &code);
    if (!code)
        code = tune_plan_read(&t->plan, plan, t->values->layer, t->tokens, t->token_count);
    json_decref(plan);
    fp8gen_close(gen);
    return code;
}

/* ---- one GEMM -------------------------------------------------------------------------------- */

static const char *short_name(const struct gemm_contender *c)
{
    return c->candidate ? c->candidate->name : c->name;
}

static int keep_figures(struct tune_entry *entry, const struct gemm_contest *contest)
{
    entry->measured = calloc((size_t)contest->count + 1, sizeof *entry->measured);
    if (!entry->measured)
        return no_memory();
    for (int i = 0; i < contest->count; i++) {
        const struct gemm_contender *c = &contest->list[i];
        if (c->out || c->seconds <= 0)
            continue;
        struct tune_measured *m = &entry->measured[entry->measured_count++];
        snprintf(m->name, sizeof m->name, "%.63s", short_name(c));
        m->seconds = c->seconds;
    }
    return CLI_DONE;
}

static void choose(struct tune_entry *entry, const struct gemm_contest *contest)
{
    const struct gemm_contender *generated = gemm_contest_best(contest, GEMM_GENERATED, 0);
    const struct gemm_contender *lt = gemm_contest_best(contest, GEMM_CUBLASLT, 0);
    const struct gemm_contender *bf16 = gemm_contest_best(contest, GEMM_BF16, 0);
    const struct gemm_contender *winner =
        !lt || (generated && generated->seconds <= lt->seconds) ? generated : lt;
    entry->done = true;
    if (generated)
        entry->generated_seconds = generated->seconds;
    if (lt)
        entry->cublaslt_seconds = lt->seconds;
    if (bf16)
        entry->bf16_seconds = bf16->seconds;
    if (!winner)
        return;
    entry->seconds = winner->seconds;
    snprintf(entry->winner, sizeof entry->winner, "%.63s", short_name(winner));
    if (winner == generated)
        entry->config = json_incref(winner->candidate->config);
    else
        baseline_gemm_hex(winner->gemm, winner->algorithm, entry->algorithm);
}

static int measure_entry(struct tuner *t, struct tune_entry *entry)
{
    struct gemm_problem problem =
        gemm_problem_of(&t->data, entry->pass, entry->split, entry->accumulate);
    struct gemm_contest contest = { .bench = &t->bench };
    struct gemm_check *check = NULL;
    struct baseline_gemm *lt = NULL, *bf16 = NULL;
    struct baseline_gemm_shape lt_shape = gemm_baseline_shape(&problem, true);
    struct baseline_gemm_shape bf16_shape = gemm_baseline_shape(&problem, false);
    int code = gemm_check_create(&problem, &check);
    if (!code)
        code = gemm_contest_add_set(&contest, GEMM_GENERATED, &problem, check, &t->set,
                                    t->layers[entry->split]);
    if (!code)
        code = baseline_gemm_open(t->baseline, &lt_shape, &lt);
    if (!code)
        code = gemm_contest_add_baseline(&contest, GEMM_CUBLASLT, &problem, check, lt, -1);
    if (!code)
        code = baseline_gemm_open(t->baseline, &bf16_shape, &bf16);
    if (!code)
        code = gemm_contest_add_baseline(&contest, GEMM_BF16, &problem, NULL, bf16, -1);
    if (!code)
        code = gemm_contest_run(&contest, t->seconds);
    if (!code)
        code = keep_figures(entry, &contest);
    if (!code)
        choose(entry, &contest);
    gemm_contest_destroy(&contest);
    baseline_gemm_destroy(lt);
    baseline_gemm_destroy(bf16);
    gemm_check_destroy(check);
    return code;
}

/* All GEMMs of a layer with that many tokens: they share the operands. */
static int measure_shape(struct tuner *t, int layer, int64_t m)
{
    const fp8_layer *by = NULL;
    bool wanted[2] = { false, false };
    int code = CLI_DONE;
    for (int i = 0; i < t->plan.count; i++) {
        const struct tune_entry *e = &t->plan.entries[i];
        if (e->layer == layer && e->measured_tokens == m)
            wanted[e->split] = true;
    }
    for (int split = 0; !code && split < 2; split++) {
        if (wanted[split])
            code = gemm_set_layers(&t->set, layer, split, t->layers[split]);
    }
    for (int i = 0; i < t->set.count; i++)
        by = t->layers[0][i] ? t->layers[0][i] : t->layers[1][i] ? t->layers[1][i] : by;
    if (!code)
        code = gemm_data_fill(&t->data, &t->plan.layers[layer], m, by);
    for (int i = 0; !code && i < t->plan.count; i++) {
        struct tune_entry *e = &t->plan.entries[i];
        if (e->layer != layer || e->measured_tokens != m)
            continue;
        code = measure_entry(t, e);
    }
    for (int split = 0; split < 2; split++)
        gemm_set_free_layers(&t->set, t->layers[split]);
    return code ? code : tune_file_write(&t->plan, &t->bench.device, t->values->output);
}

static int measure_all(struct tuner *t)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < t->plan.count; i++) {
        const struct tune_entry *e = &t->plan.entries[i];
        if (!e->done)
            code = measure_shape(t, e->layer, e->measured_tokens);
    }
    cli_progress_end();
    return code;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void figure(struct cli_table *table, enum cli_style style, double value, int digits)
{
    if (value > 0)
        cli_table_cell(table, style, "%.*f", digits, value);
    else
        cli_table_cell(table, CLI_PLAIN, "-");
}

static void print_row(struct cli_table *table, const struct tune_plan *plan,
                      const struct tune_entry *e)
{
    const struct gemm_layer *layer = &plan->layers[e->layer];
    double tflop = tune_flops(plan, e) * 1e-12;
    double of_bf16 = e->bf16_seconds > 0 ? e->bf16_seconds / e->seconds : -1;
    cli_table_cell(table, CLI_PLAIN, "%s%s", fp8_pass_name(e->pass), e->accumulate ? " +=" : "");
    cli_table_cell(table, CLI_PLAIN, "%" PRId64, layer->n);
    cli_table_cell(table, CLI_PLAIN, "%" PRId64, layer->k);
    cli_table_cell(table, CLI_PLAIN, "%s x %s -> %s", e->a_dtype, e->b_dtype, e->out_dtype);
    cli_table_cell(table, CLI_PLAIN, "%" PRId64 "-%" PRId64, e->min_tokens, e->max_tokens);
    cli_table_cell(table, CLI_PLAIN, "%" PRId64, e->measured_tokens);
    cli_table_cell(table, CLI_PLAIN, "%s", e->seconds > 0 ? e->winner : "none is right");
    figure(table, CLI_PLAIN, tflop / e->seconds, 1);
    figure(table, CLI_PLAIN, tflop / e->cublaslt_seconds, 1);
    figure(table, CLI_PLAIN, tflop / e->bf16_seconds, 1);
    figure(table, CLI_PLAIN, e->cublaslt_seconds > 0 ? e->cublaslt_seconds / e->seconds : -1, 3);
    figure(table, of_bf16 > 0 && of_bf16 < 1 ? CLI_YELLOW : CLI_PLAIN, of_bf16, 2);
}

static void print_slower(const struct tune_plan *plan)
{
    int count = 0;
    for (int i = 0; i < plan->count; i++) {
        const struct tune_entry *e = &plan->entries[i];
        const struct gemm_layer *layer = &plan->layers[e->layer];
        if (!e->done || e->bf16_seconds <= 0 || e->seconds <= e->bf16_seconds)
            continue;
        if (count++ == 0)
            printf("\nFP8 is slower than bf16 here:\n");
        if (count <= MAX_SHOWN)
            printf("  %s%s, N %" PRId64 ", K %" PRId64 ", M %" PRId64 "-%" PRId64
                   ": %.1f us at M %" PRId64 ", bf16 %.1f us\n",
                   fp8_pass_name(e->pass), e->accumulate ? " +=" : "", layer->n, layer->k,
                   e->min_tokens, e->max_tokens, e->seconds * 1e6, e->measured_tokens,
                   e->bf16_seconds * 1e6);
    }
    if (count == 0)
        printf("\nFP8 is faster than bf16 in every GEMM that was measured\n");
}

static void print_table(const struct tuner *t)
{
    static const char *const columns[] = { "GEMM",      ">N",    ">K",         "dtype",
                                           ">M",        ">at",   "winner",     ">TFLOP/s",
                                           ">cuBLASLt", ">bf16", ">/cuBLASLt", ">/bf16" };
    const struct tune_plan *plan = &t->plan;
    struct cli_table *table = cli_table_create(columns, 12);
    int done = 0;
    for (int i = 0; table && i < plan->count; i++) {
        if (!plan->entries[i].done)
            continue;
        print_row(table, plan, &plan->entries[i]);
        done++;
    }
    if (done) {
        printf("%s, cuBLASLt %d.%d.%d\n\n", t->bench.device.info.name,
               (int)(t->bench.device.info.cublaslt_version / 10000),
               (int)(t->bench.device.info.cublaslt_version / 100 % 100),
               (int)(t->bench.device.info.cublaslt_version % 100));
        cli_table_print(table, 0);
        print_slower(plan);
    }
    cli_table_destroy(table);
}

/* ---- the command ----------------------------------------------------------------------------- */

static int open_all(struct tuner *t)
{
    struct gemm_room room = { 0 };
    bool wanted[2] = { false, false };
    for (int i = 0; i < t->plan.count; i++) {
        const struct tune_entry *e = &t->plan.entries[i];
        wanted[e->split] = true;
        gemm_room_for(&room, &t->plan.layers[e->layer], e->measured_tokens);
    }
    t->set = (struct gemm_set){ &t->bench, t->plan.layers, t->plan.layer_count, NULL, 0 };
    int code = gemm_set_choose(&t->set, t->values->candidates, false, wanted);
    if (!code)
        code = bench_open_gpu(&t->bench, "tune");
    if (!code)
        tune_plan_notes(&t->plan);
    if (!code)
        code = gemm_set_build(&t->set);
    for (int i = 0; !code && i < 2; i++) {
        t->layers[i] = calloc((size_t)t->set.count + 1, sizeof *t->layers[i]);
        code = t->layers[i] ? CLI_DONE : no_memory();
    }
    if (!code)
        code = baseline_create(&t->bench, &t->baseline);
    return code ? code : gemm_data_create(&t->data, &t->bench, &room);
}

static int close_all(struct tuner *t, int code)
{
    gemm_data_destroy(&t->data);
    baseline_destroy(t->baseline);
    free(t->layers[0]);
    free(t->layers[1]);
    gemm_set_close(&t->set);
    code = bench_close(&t->bench, code);
    tune_plan_destroy(&t->plan);
    return code;
}

static int run(const void *v, int count, char **operands)
{
    struct tuner t = { .values = v, .bench_values = { .rounds = 31 } };
    (void)count;
    t.bench_values.template_dir = t.values->template_dir;
    t.bench.values = &t.bench_values;
    int code = read_options(&t, operands[0]);
    if (!code)
        code = read_plan(&t, operands[0]);
    if (!code)
        code = open_all(&t);
    if (!code)
        code = measure_all(&t);
    print_table(&t);
    return close_all(&t, code);
}

const struct cli_command cli_tune_command = {
    .name = "tune",
    .operands = "SPEC",
    .summary = "measure which kernel each GEMM should take and write a tuning file",
    .details =
        "Needs a CUDA device. Every GEMM of the spec, in every range of M that the plan "
        "tells apart, is measured with all generated configurations, all FP8 algorithms that "
        "cuBLASLt offers and all its bf16 ones: in turns, on buffers in rotation, with "
        "random data, at sustained clocks. A result is checked before it may win. Equal "
        "GEMMs of several layers are measured once. FILE names the winners and holds all "
        "figures; 'fp8gen plan', 'build', 'run' and 'bench' take it by --tuning FILE. It is "
        "written anew after each shape. Where FP8 is slower than bf16, the end of the table "
        "says so.",
    .min_operands = 1,
    .max_operands = 1,
    .options = options,
    .values_size = sizeof(struct values),
    .run = run,
};
