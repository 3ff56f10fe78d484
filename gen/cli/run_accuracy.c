/*
 * run_accuracy.c - `fp8gen run --report`: what the recipes cost in accuracy, and what accumulation
 * does.
 *
 * Layers of its own, one a recipe, go through several kinds of data; SQNR of y, dx and dw is that
 * of the sampled outputs against float64 on the original tensors. Then layers of growing depth: the
 * relative error of y in fp32 against float64 on the operands as quantised, fast and split, on
 * centred data and on data with a mean. Bounds are those of the project's accuracy promise; a
 * figure that misses one is a failure. Data and shapes are fixed but for the seed, so that figures
 * of machines and versions compare.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/random.h"
#include "gen/cli/run.h"

/* Of the recipes' layers: an outlier column of few rows would not show how large its amax can
 * be. */
#define TOKENS 2048
#define FEATURES 32
#define DEPTH 4096
#define SIDE 128 /* tokens and features of the layers of growing depth */
#define NONE (-1.0)

struct session {
    const struct cli_device *device;
    uint64_t seed;
    bool json;
    fp8_bundle *bundle;
    json_t *manifest;
    struct cli_table *table;
    int rows, failures;
};

/* ---- recipes --------------------------------------------------------------------------------- */

enum { RECIPES = 6, DATA = 5, TENSORS = 3 };

/* e5m2: dy is E5M2, so that dx and dw have its noise. fine: 0 one scale a tensor, 1 a row, 2
 * blocks. */
static const struct {
    const char *name, *fields;
    int fine;
    bool e5m2, bf16_dw, bf16;
} recipes[RECIPES] = {
    { "current", "recipe = recipe.current {}", 0, true, false, false },
    { "delayed", "recipe = recipe.delayed {}", 0, true, false, false },
    { "rowwise", "recipe = recipe.rowwise {}", 1, false, false, false },
    { "rowwise_hp_wgrad", "recipe = recipe.rowwise_hp_wgrad {}", 1, false, true, false },
    { "block", "recipe = recipe.block {}", 2, false, false, false },
    { "bf16", "compute = \"bf16\"", 0, false, true, true },
};

/* y: what is expected of a recipe with scales of tensors, rows, blocks; within 1.5 dB. */
static const struct {
    const char *name;
    struct run_data data;
    double y[3];
} kinds[DATA] = {
    { "normal", { RUN_DATA_NORMAL, 1 }, { NONE, NONE, NONE } },
    { "outlier x 100", { RUN_DATA_OUTLIER, 100 }, { 28.5, 28.5, 28.5 } },
    { "outlier x 1e4", { RUN_DATA_OUTLIER, 1e4f }, { 25, 28, 28.5 } },
    { "outlier x 1e5", { RUN_DATA_OUTLIER, 1e5f }, { 6, 14.5, 26 } },
    { "after silu", { RUN_DATA_SILU, 1 }, { NONE, NONE, NONE } },
};

static const struct {
    const char *name;
    fp8_pass pass;
} tensors[TENSORS] = { { "y", FP8_PASS_FPROP },
                       { "dx", FP8_PASS_DGRAD },
                       { "dw", FP8_PASS_WGRAD } };

/* The least SQNR, and the most (an expected figure has both sides); NONE: printed, not judged. */
static void bounds_of(int recipe, int kind, int tensor, double *least, double *most)
{
    *least = *most = NONE;
    if (recipes[recipe].bf16 || (tensor == 2 && recipes[recipe].bf16_dw))
        return;
    if (kinds[kind].data.kind == RUN_DATA_NORMAL)
        *least = tensor > 0 && recipes[recipe].e5m2 ? 24 : 28;
    double expected = kinds[kind].y[recipes[recipe].fine];
    if (tensor == 0 && expected > 0) {
        *least = expected - 1.5;
        *most = expected + 1.5;
    }
}

/* ---- one layer ------------------------------------------------------------------------------- */

/* The passes, once, and what their outputs are worth; wanted: how many of `tensors`. */
static int run_layer(struct session *s, const char *name, struct run_data data, int wanted,
                     struct run_row rows[TENSORS])
{
    struct run_layer run = { .data = data };
    cli_progress("accuracy: %s", name);
    int code = run_layer_create(&run, s->device, s->bundle, name);
    if (!code) {
        run.recipe = run_read_recipe(s->manifest, name);
        run.m = run.wanted_m = run.info.tokens;
        run.seed = cli_random_word(s->seed, 3, (uint64_t)data.kind);
        code = run_layer_fill(&run);
    }
    if (!code)
        code = run_all(&run, wanted > 1);
    for (int i = 0; !code && i < wanted; i++) {
        rows[i] = run_row_of("report");
        code = run_check_gemm(&run, tensors[i].pass, NULL, &rows[i]);
    }
    run_layer_destroy(&run);
    return code;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void print_json(const struct session *s, const char *report, const char *recipe,
                       const char *data, const char *tensor, int64_t depth, double value,
                       double least, double most)
{
    json_t *row = json_pack("{s:s, s:s, s:s, s:s, s:s, s:I, s:f}", "report", report, "device",
                            s->device->info.name, "recipe", recipe, "data", data, "tensor", tensor,
                            "depth", (json_int_t)depth, "value", isfinite(value) ? value : 999.0);
    if (!row)
        return;
    json_object_set_new(row, "least", least > 0 ? json_real(least) : json_null());
    json_object_set_new(row, "most", most > 0 ? json_real(most) : json_null());
    json_dumpf(row, stdout, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(6));
    putchar('\n');
    fflush(stdout);
    json_decref(row);
}

static bool misses(double value, double least, double most)
{
    return isnan(value) || (least > 0 && !(value >= least)) || (most > 0 && !(value <= most));
}

static void sqnr_cell(struct session *s, int recipe, int kind, int tensor, double value)
{
    double least, most;
    bounds_of(recipe, kind, tensor, &least, &most);
    bool bad = misses(value, least, most);
    s->failures += bad;
    if (bad)
        cli_error("%s, %s: SQNR of %s is %.1f dB, must be %.1f%s%.1f dB", recipes[recipe].name,
                  kinds[kind].name, tensors[tensor].name, value, least,
                  most > 0 ? " to " : " or more: ", most > 0 ? most : least);
    if (s->json)
        print_json(s, "sqnr", recipes[recipe].name, kinds[kind].name, tensors[tensor].name,
                   tensor == 0   ? DEPTH
                   : tensor == 1 ? FEATURES
                                 : TOKENS,
                   value, least, most);
    else
        cli_table_cell(s->table, bad ? CLI_RED : CLI_PLAIN, "%.1f", value);
}

static int report_sqnr(struct session *s)
{
    static const char *const columns[] = { "recipe", "data", ">y", ">dx", ">dw" };
    int code = CLI_DONE;
    if (!s->json && !(s->table = cli_table_create(columns, 5)))
        return CLI_MACHINE;
    for (int r = 0; !code && r < RECIPES; r++) {
        for (int k = 0; !code && k < DATA; k++) {
            struct run_row rows[TENSORS];
            code = run_layer(s, recipes[r].name, kinds[k].data, TENSORS, rows);
            if (!code && !s->json) {
                cli_table_cell(s->table, CLI_PLAIN, "%s", k == 0 ? recipes[r].name : "");
                cli_table_cell(s->table, CLI_PLAIN, "%s", kinds[k].name);
            }
            for (int t = 0; !code && t < TENSORS; t++)
                sqnr_cell(s, r, k, t, rows[t].sqnr);
        }
    }
    cli_progress_end();
    if (!code && !s->json) {
        printf("SQNR in dB against float64 on the original tensors (M %d, N %d, K %d)\n\n", TOKENS,
               FEATURES, DEPTH);
        cli_table_print(s->table, 0);
    }
    cli_table_destroy(s->table);
    s->table = NULL;
    return code;
}

/* ---- accumulation ---------------------------------------------------------------------------- */

static const int64_t depths[] = { 128, 512, 4096, 16384, 65536 };
enum { DEPTHS = sizeof depths / sizeof depths[0], WAYS = 5 };

/* Ways to add up, with the bounds of the relative error of an fp32 output: centred, and any
 * data. */
static const struct {
    const char *name, *fields;
    int64_t max_depth;
    double centred, any;
} ways[WAYS] = {
    { "fast", "accumulation = { fprop = \"fast\" }", 28672, 1e-2, NONE },
    { "512", "accumulation = { fprop = 512 }", INT64_MAX, 1e-2, NONE },
    { "256", "accumulation = { fprop = 256 }", INT64_MAX, 1e-2, NONE },
    { "split", "accumulation = { fprop = \"split\" }", INT64_MAX, 2e-4, 1e-3 },
    { "block", "recipe = recipe.block {}", INT64_MAX, 2e-4, 1e-3 },
};

static void error_cell(struct session *s, int way, int64_t depth, bool mean, double value)
{
    double most = depth > ways[way].max_depth ? NONE : mean ? ways[way].any : ways[way].centred;
    bool bad = misses(value, NONE, most);
    s->failures += bad;
    if (bad)
        cli_error("%s accumulation over %lld: relative error %.2e, bound %.1e", ways[way].name,
                  (long long)depth, value, most);
    if (s->json)
        print_json(s, "accumulation", ways[way].name, mean ? "mean = sigma" : "centred", "y", depth,
                   value, NONE, most);
    else
        cli_table_cell(s->table, bad ? CLI_RED : CLI_PLAIN, "%.1e", value);
}

static void layer_name(char name[32], int way, int64_t depth)
{
    snprintf(name, 32, "by_%s_%lld", ways[way].name, (long long)depth);
}

static int report_accumulation(struct session *s)
{
    char titles[2 * WAYS][16];
    const char *columns[1 + 2 * WAYS] = { ">K" };
    int code = CLI_DONE;
    for (int i = 0; i < 2 * WAYS; i++) {
        snprintf(titles[i], sizeof titles[i], ">%s%s", ways[i % WAYS].name,
                 i < WAYS ? "" : ", mean");
        columns[1 + i] = titles[i];
    }
    if (!s->json && !(s->table = cli_table_create(columns, 1 + 2 * WAYS)))
        return CLI_MACHINE;
    for (int d = 0; !code && d < DEPTHS; d++) {
        if (!s->json)
            cli_table_cell(s->table, CLI_PLAIN, "%lld", (long long)depths[d]);
        for (int i = 0; !code && i < 2 * WAYS; i++) {
            int way = i % WAYS;
            bool mean = i >= WAYS;
            struct run_row rows[TENSORS];
            char name[32];
            layer_name(name, way, depths[d]);
            code = run_layer(
                s, name, (struct run_data){ mean ? RUN_DATA_MEAN : RUN_DATA_NORMAL, 1 }, 1, rows);
            if (!code)
                error_cell(s, way, depths[d], mean, rows[0].error);
        }
    }
    cli_progress_end();
    if (!code && !s->json) {
        printf("\nRelative error of y (fp32) against float64 on the operands as quantised; on the "
               "right "
               "data whose mean is its sigma\n\n");
        cli_table_print(s->table, 0);
    }
    cli_table_destroy(s->table);
    s->table = NULL;
    return code;
}

/* ---- all ------------------------------------------------------------------------------------- */

static char *write_spec(void)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file)
        return NULL;
    fprintf(file, "return model \"accuracy\" { tokens = %d, layers = {\n", TOKENS);
    for (int r = 0; r < RECIPES; r++)
        fprintf(file, "  linear \"%s\" { in_features = %d, out_features = %d, %s },\n",
                recipes[r].name, DEPTH, FEATURES, recipes[r].fields);
    for (int w = 0; w < WAYS; w++) {
        for (int d = 0; d < DEPTHS; d++) {
            char name[32];
            layer_name(name, w, depths[d]);
            fprintf(file,
                    "  linear \"%s\" { tokens = %d, in_features = %lld, out_features = %d, "
                    "output = \"fp32\", %s },\n",
                    name, SIDE, (long long)depths[d], SIDE, ways[w].fields);
        }
    }
    fprintf(file, "} }\n");
    if (fclose(file) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static int open_bundle(struct session *s, const char *template_dir)
{
    struct cli_spec spec = { .path = "run --report", .template_dir = template_dir };
    fp8gen *gen = NULL;
    char *text = write_spec();
    if (!text) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    int code = cli_spec_open(&spec, text, &gen);
    if (!code)
        code = cli_device_bundle(s->device, gen, &s->bundle);
    if (!code)
        s->manifest = json_loads(fp8_bundle_manifest(s->bundle), 0, NULL);
    fp8gen_close(gen);
    free(text);
    return code;
}

int run_accuracy(const struct cli_device *device, const char *template_dir, uint64_t seed,
                 bool json)
{
    struct session s = { .device = device, .seed = seed, .json = json };
    int code = open_bundle(&s, template_dir);
    if (!code)
        code = report_sqnr(&s);
    if (!code)
        code = report_accumulation(&s);
    if (!code && s.failures) {
        cli_error(
            "%d figure%s out of bounds: a bug of fp8gen, please report the device and the seed",
            s.failures, s.failures == 1 ? " is" : "s are");
        code = CLI_BUG;
    }
    json_decref(s.manifest);
    fp8_bundle_close(s.bundle);
    return code;
}
