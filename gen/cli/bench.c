/*
 * bench.c - what the benchmarks share.
 *
 * Rules of measuring: one run, all contenders in turns (clocks and power drift, so only neighbours
 * in time compare), buffer sets in rotation, random data, a warm-up of a second or more, medians.
 * Every turn is enqueued before the last one has finished, so that the device never waits for the
 * host unless the host is what limits. Rows are JSON objects or lines of a table.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/bench.h"
#include "gen/cli/random.h"

/* ---- options --------------------------------------------------------------------------------- */

#define OPTION_SHAPE(dims, text)                                                                   \
    {                                                                                              \
        .name = "shape", .kind = CLI_LIST, .metavar = dims, .doc = text,                           \
        .offset = offsetof(struct bench_values, shapes)                                            \
    }
#define OPTION_ROUNDS                                                                              \
    {                                                                                              \
        .name = "rounds", .kind = CLI_NUMBER, .metavar = "N",                                      \
        .doc = "medians of N rounds (default 31)",                                                 \
        .offset = offsetof(struct bench_values, rounds), .min = 1, .max = 10000, .fallback = 31    \
    }
#define OPTION_JSON                                                                                \
    {                                                                                              \
        .name = "json", .kind = CLI_FLAG, .doc = "a header object, then one JSON object per row",  \
        .offset = offsetof(struct bench_values, json)                                              \
    }
#define OPTION_HASH                                                                                \
    {                                                                                              \
        .name = "source-hash", .kind = CLI_TEXT, .metavar = "HASH",                                \
        .doc = "hash of the measured sources, kept in the header object",                          \
        .offset = offsetof(struct bench_values, source_hash)                                       \
    }
#define OPTION_RECIPE                                                                              \
    {                                                                                              \
        .name = "recipe", .kind = CLI_LIST, .metavar = "NAME",                                     \
        .doc = "current, delayed, rowwise, rowwise_hp_wgrad, block or bf16; again for more",       \
        .offset = offsetof(struct bench_values, recipes)                                           \
    }

#define OPTION_GEMM CLI_OPTION_TUNING(struct bench_values), CLI_OPTION_GEMM(struct bench_values)

static const char *const grad_weight_choices[] = { "bf16", "fp32", NULL };

const struct cli_option bench_options_layer[] = {
    OPTION_SHAPE("M,N,K", "tokens, out_features, in_features; again for more shapes"),
    { .name = "grad-weight",
      .kind = CLI_CHOICE,
      .metavar = "DTYPE",
      .doc = "dtype of dw, ours and bf16's: bf16 or fp32 (default bf16)",
      .offset = offsetof(struct bench_values, grad_weight),
      .choices = grad_weight_choices },
    OPTION_RECIPE,
    OPTION_GEMM,
    OPTION_ROUNDS,
    OPTION_JSON,
    OPTION_HASH,
    CLI_OPTION_TEMPLATE_DIR(struct bench_values),
    { .name = NULL },
};

const struct cli_option bench_options_quantize[] = {
    OPTION_SHAPE("M,N", "rows and columns of the tensor; again for more shapes"),
    OPTION_RECIPE,
    OPTION_ROUNDS,
    OPTION_JSON,
    OPTION_HASH,
    CLI_OPTION_TEMPLATE_DIR(struct bench_values),
    { .name = NULL },
};

const struct cli_option bench_options_host[] = {
    OPTION_SHAPE("M,N,K", "tokens, out_features, in_features; again for more shapes"),
    OPTION_GEMM,
    OPTION_ROUNDS,
    OPTION_JSON,
    OPTION_HASH,
    CLI_OPTION_TEMPLATE_DIR(struct bench_values),
    { .name = NULL },
};

const struct cli_option bench_options_gemm[] = {
    OPTION_SHAPE("M,N,K", "tokens, out_features, in_features; again for more shapes"),
    { .name = "case",
      .kind = CLI_LIST,
      .metavar = "NAME",
      .doc = "tensor_fast, tensor_split, wgrad_split, wgrad_fast or odd_n; again for more",
      .offset = offsetof(struct bench_values, cases) },
    { .name = "candidates",
      .kind = CLI_TEXT,
      .metavar = "WHICH",
      .doc = "generated kernels: plan (its choice), all, or configurations A,B,... (default all)",
      .offset = offsetof(struct bench_values, candidates) },
    CLI_OPTION_TUNING(struct bench_values),
    { .name = "seconds",
      .kind = CLI_TEXT,
      .metavar = "S",
      .doc = "measure each finalist of a row for S seconds at most (default 0.08)",
      .offset = offsetof(struct bench_values, seconds) },
    OPTION_ROUNDS,
    OPTION_JSON,
    OPTION_HASH,
    CLI_OPTION_TEMPLATE_DIR(struct bench_values),
    { .name = NULL },
};

static bool read_shape(const char *text, int dims, struct bench_shape *shape)
{
    int64_t numbers[3] = { 0 };
    const char *at = text;
    for (int i = 0; i < dims; i++) {
        char *end;
        numbers[i] = strtoll(at, &end, 10);
        if (end == at || numbers[i] < 1 || numbers[i] > 1 << 24 ||
            *end != (i + 1 < dims ? ',' : '\0'))
            return false;
        at = end + 1;
    }
    *shape =
        (struct bench_shape){ numbers[0], numbers[1], dims == 3 ? numbers[2] : numbers[1], "" };
    return true;
}

int bench_read_shapes(struct bench *bench, int dims, const struct bench_shape *standard, int count)
{
    const struct cli_list *given = &bench->values->shapes;
    if (given->count > BENCH_MAX_SHAPES) {
        cli_error("at most %d shapes in one run, not %d", BENCH_MAX_SHAPES, given->count);
        return CLI_USAGE;
    }
    bench->shape_count = given->count ? given->count : count;
    for (int i = 0; i < bench->shape_count; i++) {
        struct bench_shape *shape = &bench->shapes[i];
        if (!given->count)
            *shape = standard[i];
        else if (!read_shape(given->items[i], dims, shape)) {
            cli_error("--shape takes %d whole numbers from 1 with commas (%s), not '%s'", dims,
                      dims == 3 ? "M,N,K" : "M,N", given->items[i]);
            return CLI_USAGE;
        }
        snprintf(shape->name, sizeof shape->name, "shape_%d", i);
    }
    return CLI_DONE;
}

/* ---- opening and closing --------------------------------------------------------------------- */

static const char *const recipe_names[] = { "current",          "delayed", "rowwise",
                                            "rowwise_hp_wgrad", "block",   "bf16" };
enum { RECIPES = sizeof recipe_names / sizeof recipe_names[0] };

int bench_read_recipes(struct bench *bench, const char *const *standard, int count)
{
    const struct cli_list *given = &bench->values->recipes;
    if (given->count > BENCH_MAX_RECIPES) {
        cli_error("at most %d recipes in one run, not %d", BENCH_MAX_RECIPES, given->count);
        return CLI_USAGE;
    }
    bench->recipe_count = given->count ? given->count : count;
    for (int i = 0; i < bench->recipe_count; i++) {
        const char *name = given->count ? given->items[i] : standard[i];
        if (cli_find_name("recipe", "recipe", name, recipe_names, RECIPES) < 0)
            return CLI_USAGE;
        bench->recipes[i] = name;
    }
    return CLI_DONE;
}

struct bench_shape bench_shape_of(const struct bench *bench, int shape, int recipe)
{
    struct bench_shape named = bench->shapes[shape];
    snprintf(named.name, sizeof named.name, "shape_%d_%s", shape, bench->recipes[recipe]);
    return named;
}

/* The field that says how a layer computes. */
static void write_recipe(FILE *file, const char *name)
{
    if (strcmp(name, "bf16") == 0)
        fprintf(file, ", compute = \"bf16\"");
    else
        fprintf(file, ", recipe = recipe.%s {}", name);
}

static void write_layer(FILE *file, const struct bench_shape *s, const char *recipe,
                        const char *fields)
{
    fprintf(file,
            "  linear \"%s\" { in_features = %" PRId64 ", out_features = %" PRId64
            ", tokens = %" PRId64 ", max_tokens = %" PRId64,
            s->name, s->k, s->n, s->m, s->m);
    write_recipe(file, recipe);
    fprintf(file, "%s },\n", fields);
}

static char *write_spec(const struct bench *bench, const char *fields)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file)
        return NULL;
    fprintf(file, "return model \"bench\" { layers = {\n");
    for (int i = 0; i < bench->shape_count; i++) {
        for (int r = 0; r < bench->recipe_count; r++) {
            struct bench_shape named = bench_shape_of(bench, i, r);
            write_layer(file, &named, bench->recipes[r], fields);
        }
        if (bench->recipe_count == 0)
            write_layer(file, &bench->shapes[i], "current", fields);
    }
    fprintf(file, "} }\n");
    if (fclose(file) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static int open_bundle(struct bench *bench, const char *fields)
{
    struct cli_spec spec = { .path = "bench",
                             .template_dir = bench->values->template_dir,
                             .tuning = bench->values->tuning,
                             .gemm = bench->values->gemm };
    fp8gen *gen = NULL;
    char *text = write_spec(bench, fields);
    if (!text) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    int code = cli_spec_open(&spec, text, &gen);
    if (!code)
        code = cli_device_bundle(&bench->device, gen, &bench->bundle);
    fp8gen_close(gen);
    free(text);
    return code;
}

/* cuBLASLt wants the context current; the primary one is the one that libfp8 uses. */
static int push_context(struct bench *bench)
{
    cli_cu_context context = NULL;
    fp8_status status = cli_cuda_load(&bench->cuda);
    if (status)
        return cli_fp8_failed(status, "opening the driver");
    cli_cu_result result = bench->cuda.init(0);
    if (!result)
        result = bench->cuda.retain(&context, bench->device.info.device);
    if (!result) {
        result = bench->cuda.push(context);
        bench->context_pushed = result == 0;
        if (result)
            bench->cuda.release(bench->device.info.device);
    }
    if (result) {
        cli_error("making the GPU's context current: %s", cli_cuda_text(&bench->cuda, result));
        return CLI_MACHINE;
    }
    return CLI_DONE;
}

static json_t *driver_version(void)
{
    char text[64] = "";
    FILE *file = fopen("/sys/module/nvidia/version", "r");
    if (file && fgets(text, sizeof text, file))
        text[strcspn(text, "\n")] = '\0';
    if (file)
        fclose(file);
    return text[0] ? json_string(text) : json_null();
}

void bench_print_header(const struct bench *bench, const char *what)
{
    const fp8_device_info *info = &bench->device.info;
    char cuda[32], cublaslt[32];
    snprintf(cuda, sizeof cuda, "%d.%d", info->driver_version / 1000,
             info->driver_version % 1000 / 10);
    snprintf(cublaslt, sizeof cublaslt, "%d.%d.%d", (int)(info->cublaslt_version / 10000),
             (int)(info->cublaslt_version / 100 % 100), (int)(info->cublaslt_version % 100));
    if (!bench->values->json) {
        printf("%s", info->name);
        if (!bench->device.is_host)
            printf(", %d SMs, CUDA %s, cuBLASLt %s", info->sms, cuda, cublaslt);
        printf("; medians of %" PRId64 " round%s\n\n", bench->values->rounds,
               bench->values->rounds == 1 ? "" : "s");
        return;
    }
    const char *hash = bench->values->source_hash;
    json_t *header =
        json_pack("{s:s, s:s, s:s, s:i, s:o, s:s, s:s, s:o, s:s, s:o, s:I, s:i}", "header", what,
                  "generator", fp8gen_version(), "gpu", info->name, "sms", (int)info->sms, "driver",
                  driver_version(), "cuda", cuda, "cublaslt", cublaslt, "nccl",
                  bench->nccl[0] ? json_string(bench->nccl) : json_null(), "arch",
                  bench->device.arch, "source_hash", hash ? json_string(hash) : json_null(),
                  "rounds", (json_int_t)bench->values->rounds, "buffer_sets", BENCH_SETS);
    if (header) {
        json_dumpf(header, stdout, JSON_COMPACT | JSON_SORT_KEYS);
        putchar('\n');
    }
    json_decref(header);
    fflush(stdout);
}

int bench_open_gpu(struct bench *bench, const char *command)
{
    char what[32];
    snprintf(what, sizeof what, "'%s'", command);
    int code = cli_device_open("cuda", what, &bench->device);
    return code ? code : push_context(bench);
}

int bench_open(struct bench *bench, const char *what, const char *fields)
{
    static const char *const columns[] = { "case",      "recipe", "pass",       ">M",
                                           ">N",        ">K",     ">value",     "unit",
                                           ">baseline", ">ratio", "baseline is" };
    char command[32];
    snprintf(command, sizeof command, "bench %s", what);
    int code = bench_open_gpu(bench, command);
    if (!code)
        code = open_bundle(bench, fields);
    if (!code && !bench->values->json && !(bench->table = cli_table_create(columns, 11))) {
        cli_error("out of memory");
        code = CLI_MACHINE;
    }
    if (!code)
        bench_print_header(bench, what);
    return code;
}

int bench_close(struct bench *bench, int code)
{
    cli_progress_end();
    if (bench->rows && bench->table)
        cli_table_print(bench->table, 0);
    cli_table_destroy(bench->table);
    fp8_bundle_close(bench->bundle);
    if (bench->context_pushed) {
        cli_cu_context context;
        bench->cuda.pop(&context);
        bench->cuda.release(bench->device.info.device);
    }
    cli_device_close(&bench->device);
    return code;
}

int bench_fp8_failed(fp8_status status, const struct bench_shape *shape, const char *what)
{
    return cli_fp8_failed(status, "%s of %" PRId64 " x %" PRId64 " x %" PRId64, what, shape->m,
                          shape->n, shape->k);
}

/* ---- measuring ------------------------------------------------------------------------------- */

static int run_all(struct bench_item *items, int count)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < count; i++)
        for (int set = 0; !code && set < BENCH_SETS; set++)
            code = items[i].run(items[i].user, set);
    return code;
}

static int warm_up(struct bench *bench, struct bench_item *items, int count, double seconds)
{
    double start = cli_seconds();
    int code = CLI_DONE;
    do {
        for (int i = 0; !code && i < (count > 4 ? 1 : 4); i++)
            code = run_all(items, count);
        if (!code)
            code = cli_device_synchronize(&bench->device);
    } while (!code && cli_seconds() - start < seconds);
    return code;
}

/* Another order for every round, the same in every run: what ran before an item has set the clock
 * that it finds. */
static void shuffle(int order[BENCH_MAX_ITEMS], int count, int round)
{
    uint32_t random = 2654435769u * (uint32_t)(round + 1);
    for (int i = 0; i < count; i++) {
        random = random * 1664525u + 1013904223u;
        int place = (int)((random >> 8) % (uint32_t)(i + 1));
        order[i] = order[place];
        order[place] = i;
    }
}

/* One round: every item once over all sets, between two events. The first item runs once more
 * before them: while it does, the host gets ahead of the device. */
static int run_round(struct bench *bench, struct bench_item *items, int count, int round,
                     fp8_event *events[][2])
{
    int order[BENCH_MAX_ITEMS] = { 0 };
    shuffle(order, count, round);
    int ahead = run_all(&items[order[0]], 1);
    if (ahead)
        return ahead;
    for (int turn = 0; turn < count; turn++) {
        int i = order[turn];
        fp8_status status = fp8_event_record(events[i][0], bench->device.stream);
        for (int set = 0; !status && set < BENCH_SETS; set++) {
            int code = items[i].run(items[i].user, set);
            if (code)
                return code;
        }
        if (!status)
            status = fp8_event_record(events[i][1], bench->device.stream);
        if (status)
            return cli_fp8_failed(status, "recording an event");
    }
    return CLI_DONE;
}

int bench_measure(struct bench *bench, struct bench_item *items, int count, int rounds,
                  double warm_seconds)
{
    fp8_event *events[BENCH_MAX_ITEMS][2] = { { NULL } };
    double *samples = calloc((size_t)count * (size_t)rounds, sizeof *samples);
    fp8_status status = FP8_OK;
    int code = samples ? CLI_DONE : CLI_MACHINE;
    if (code)
        cli_error("out of memory");
    for (int i = 0; !code && !status && i < 2 * count; i++)
        status = fp8_event_create(bench->device.context, &events[i / 2][i % 2]);
    if (!code && !status)
        code = warm_up(bench, items, count, warm_seconds);
    for (int round = 0; !code && !status && round < rounds; round++) {
        code = run_round(bench, items, count, round, events);
        for (int i = 0; !code && !status && i < count; i++) {
            double seconds = 0;
            status = fp8_event_seconds(events[i][0], events[i][1], &seconds);
            samples[i * rounds + round] = seconds / BENCH_SETS;
        }
    }
    if (status)
        code = cli_fp8_failed(status, "measuring");
    for (int i = 0; !code && i < count; i++)
        items[i].seconds = cli_median(samples + i * rounds, rounds);
    for (int i = 0; i < 2 * count; i++)
        fp8_event_destroy(events[i / 2][i % 2]);
    free(samples);
    return code;
}

/* ---- results --------------------------------------------------------------------------------- */

static double ratio_of(const struct bench_result *r)
{
    if (r->baseline <= 0 || r->value <= 0)
        return -1;
    return r->lower_is_better ? r->baseline / r->value : r->value / r->baseline;
}

static json_t *real_or_null(double value)
{
    return value >= 0 ? json_real(value) : json_null();
}

json_t *bench_result_json(const struct bench_result *r)
{
    const struct bench_shape *s = r->shape;
    json_t *row =
        json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:s, s:f, s:s, s:o, s:o, s:o}", "bench", r->bench,
                  "case", r->name, "pass", r->pass, "M", (json_int_t)s->m, "N", (json_int_t)s->n,
                  "K", (json_int_t)s->k, "recipe", r->recipe ? r->recipe : "current", "value",
                  r->value, "unit", r->unit, "baseline", real_or_null(r->baseline), "baseline_name",
                  r->baseline_name ? json_string(r->baseline_name) : json_null(), "ratio",
                  real_or_null(ratio_of(r)));
    if (row && r->launches >= 0)
        json_object_set_new(row, "launches", json_integer(r->launches));
    return row;
}

void bench_print_json(json_t *row)
{
    if (!row) {
        cli_error("out of memory");
        return;
    }
    json_dumpf(row, stdout, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(6));
    putchar('\n');
    fflush(stdout);
    json_decref(row);
}

void bench_result_print(struct bench *bench, const struct bench_result *r)
{
    struct cli_table *t = bench->table;
    double ratio = ratio_of(r);
    bench->rows++;
    if (bench->values->json) {
        bench_print_json(bench_result_json(r));
        return;
    }
    cli_table_cell(t, CLI_PLAIN, "%s", r->name);
    cli_table_cell(t, CLI_PLAIN, "%s", r->recipe ? r->recipe : "current");
    cli_table_cell(t, CLI_PLAIN, "%s", r->pass);
    cli_table_cell(t, CLI_PLAIN, "%" PRId64, r->shape->m);
    cli_table_cell(t, CLI_PLAIN, "%" PRId64, r->shape->n);
    cli_table_cell(t, CLI_PLAIN, "%" PRId64, r->shape->k);
    cli_table_cell(t, CLI_PLAIN, "%.1f", r->value);
    cli_table_cell(t, CLI_PLAIN, "%s", r->unit);
    cli_table_cell(t, CLI_PLAIN, r->baseline >= 0 ? "%.1f" : "-", r->baseline);
    cli_table_cell(t, ratio >= 1 ? CLI_GREEN : CLI_PLAIN, ratio >= 0 ? "%.3f" : "-", ratio);
    if (r->launches >= 0)
        cli_table_cell(t, CLI_PLAIN, "%s%s%d launches", r->baseline_name ? r->baseline_name : "",
                       r->baseline_name ? "; ours: " : "", r->launches);
    else
        cli_table_cell(t, CLI_PLAIN, "%s", r->baseline_name ? r->baseline_name : "");
}

/* ---- buffers --------------------------------------------------------------------------------- */

/* Set 0 comes from the host; the others are copies of it, turned by a part, so that no two are
 * alike. */
static int fill_sets(struct bench *bench, struct bench_buffers *buffers, double sigma,
                     uint64_t seed)
{
    struct cli_buffer *first = &buffers->set[0];
    cli_random_fill(first->host, FP8_DTYPE_BF16, (int64_t)(first->bytes / 2), sigma, seed, 0);
    int code = cli_buffer_upload(&bench->device, first);
    for (int i = 1; !code && i < BENCH_SETS; i++) {
        size_t turn = first->bytes / (size_t)(2 * BENCH_SETS) * (size_t)i / 2 * 2;
        char *target = buffers->set[i].device, *source = first->device;
        code = bench_copy(bench, target, source + turn, first->bytes - turn);
        if (!code && turn)
            code = bench_copy(bench, target + first->bytes - turn, source, turn);
    }
    return code ? code : cli_device_synchronize(&bench->device);
}

int bench_buffers_create(struct bench *bench, struct bench_buffers *buffers, size_t bytes,
                         double sigma, uint64_t seed)
{
    int code = CLI_DONE;
    memset(buffers, 0, sizeof *buffers);
    for (int i = 0; !code && i < BENCH_SETS; i++) {
        code = cli_buffer_create(&bench->device, bytes, sigma > 0 && i == 0, &buffers->set[i]);
        if (!code && sigma <= 0)
            code = cli_buffer_fill(&bench->device, &buffers->set[i], 0);
    }
    if (!code && sigma > 0 && bytes)
        code = fill_sets(bench, buffers, sigma, seed);
    return code;
}

void bench_buffers_destroy(struct bench *bench, struct bench_buffers *buffers)
{
    for (int i = 0; i < BENCH_SETS; i++)
        cli_buffer_destroy(&bench->device, &buffers->set[i]);
}

int bench_copy(struct bench *bench, void *target, const void *source, size_t bytes)
{
    cli_cu_result result =
        bench->cuda.copy((unsigned long long)(uintptr_t)target,
                         (unsigned long long)(uintptr_t)source, bytes, bench->device.stream);
    if (!result)
        return CLI_DONE;
    cli_error("copying %zu bytes on the GPU: %s", bytes, cli_cuda_text(&bench->cuda, result));
    return CLI_MACHINE;
}
