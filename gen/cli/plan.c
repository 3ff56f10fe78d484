/*
 * plan.c - `fp8gen plan SPEC`: what each pass of each layer will run, move and cost.
 *
 * In: the plan as JSON from libfp8gen (runtime/bundle_format.h describes it). Out: that JSON
 * (--json), or tables for people: passes, steps, shapes, kernels with their dtype, bytes moved,
 * FLOPs and predicted time, at the spec's usual number of tokens. The cost of a pass stands at its
 * first step. Totals count every layer as often as the model has it.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"

struct values {
    bool json;
    const char *layer;
    const char *tokens;
    const char *recipe;
    const char *tuning;
    const char *gemm;
    const char *fsdp;
    int64_t rank;  /* -1: of none */
    int64_t world; /* 0: no comparison */
};

static const struct cli_option options[] = {
    { .name = "json",
      .kind = CLI_FLAG,
      .doc = "print the plan as JSON",
      .offset = offsetof(struct values, json) },
    CLI_OPTION_LAYER(struct values),
    { .name = "tokens",
      .kind = CLI_TEXT,
      .metavar = "N",
      .doc = "plan for N tokens instead of the spec's",
      .offset = offsetof(struct values, tokens) },
    CLI_OPTION_RECIPE(struct values),
    CLI_OPTION_FSDP(struct values),
    { .name = "rank",
      .kind = CLI_NUMBER,
      .metavar = "R",
      .doc = "what rank R of the mesh holds, from 0",
      .offset = offsetof(struct values, rank),
      .max = 4095,
      .fallback = -1 },
    { .name = "world",
      .kind = CLI_NUMBER,
      .metavar = "W",
      .doc = "compare the meshes of W GPUs and fewer: each with its time in a step",
      .offset = offsetof(struct values, world),
      .min = 1,
      .max = 8 },
    CLI_OPTION_TUNING(struct values),
    CLI_OPTION_GEMM(struct values),
    { .name = NULL },
};

struct cost {
    double bytes, flops, seconds;
};

static const char *const pass_names[] = { "weight", "fprop", "quantize_dy", "wgrad", "dgrad" };
enum { PASS_COUNT = sizeof pass_names / sizeof pass_names[0] };

/* ---- sizes ----------------------------------------------------------------------------------- */

/* A dim of a buffer record: min(roundup(ceil(of / div), pad), max). */
static int64_t dim_value(const json_t *dim, int64_t tokens)
{
    if (json_is_integer(dim))
        return json_integer_value(dim);
    const json_t *of = json_object_get(dim, "of");
    int64_t value = json_is_integer(of) ? json_integer_value(of) : tokens;
    int64_t div = plan_integer(dim, "div"), pad = plan_integer(dim, "pad");
    const json_t *max = json_object_get(dim, "max");
    if (div > 1)
        value = (value + div - 1) / div;
    if (pad > 1)
        value = (value + pad - 1) / pad * pad;
    if (max && value > json_integer_value(max))
        value = json_integer_value(max);
    return value;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* A number of a step; "M" is the usual tokens, "<buffer>.rows" the rows of a buffer. */
static int64_t argument(const json_t *layer, const json_t *step, const char *name)
{
    const json_t *value = json_object_get(json_object_get(step, "args"), name);
    const char *text = json_string_value(value);
    int64_t tokens = plan_integer(layer, "tokens");
    if (text && strcmp(text, "M") == 0)
        return tokens;
    const char *dot = text ? strchr(text, '.') : NULL;
    if (!dot)
        return json_integer_value(value);
    char buffer[64];
    snprintf(buffer, sizeof buffer, "%.*s", (int)(dot - text), text);
    return dim_value(json_object_get(plan_find(json_object_get(layer, "buffers"), buffer), "rows"),
                     tokens);
}

static const json_t *dispatch_of(const json_t *layer, const json_t *step)
{
    int64_t tokens = plan_integer(layer, "tokens");
    size_t index;
    json_t *range;
    json_array_foreach(json_object_get(step, "dispatch"), index, range)
    {
        if (tokens >= plan_integer(range, "min_tokens") &&
            tokens <= plan_integer(range, "max_tokens"))
            return range;
    }
    return NULL;
}

/* What runs if this GPU can: the first choice of a range. */
static const json_t *first_choice(const json_t *range)
{
    return json_array_get(json_object_get(range, "choices"), 0);
}

static void gemm_cells(struct cli_table *table, const json_t *layer, const json_t *step)
{
    const json_t *range = dispatch_of(layer, step);
    cli_table_cell(table, CLI_PLAIN, "%s %s", plan_text(first_choice(range), "backend"),
                   plan_text(step, "accumulation"));
    cli_table_cell(table, CLI_PLAIN, "%s x %s -> %s", plan_text(step, "a_dtype"),
                   plan_text(step, "b_dtype"), plan_text(step, "out_dtype"));
    cli_table_cell(table, CLI_PLAIN, "%" PRId64 " x %" PRId64 " x %" PRId64,
                   argument(layer, step, "rows"), argument(layer, step, "cols"),
                   argument(layer, step, "depth"));
}

static struct cost read_cost(const json_t *layer, const char *pass)
{
    const json_t *record = json_object_get(json_object_get(layer, "cost"), pass);
    return (struct cost){ plan_number(record, "bytes"), plan_number(record, "flops"),
                          plan_number(record, "seconds") };
}

/* A rank transposes what it has gathered, not its own rows. */
static bool is_of_whole_weight(const json_t *layer, const char *pass, const char *op)
{
    return strcmp(pass, "weight") == 0 && strcmp(op, "transpose") == 0 &&
           read_cost(layer, "transpose").bytes > 0;
}

/* The rows of a step that multiplies nothing: of w those of a shard. */
static int64_t rows_of(const json_t *layer, const json_t *step, const char *pass)
{
    bool sums = strcmp(plan_text(step, "op"), "column_sums") == 0;
    int64_t rows = argument(layer, step, sums ? "partial_rows" : "rows");
    int64_t shard = plan_integer(json_object_get(layer, "shard"), "rows");
    return strcmp(pass, "weight") == 0 && shard < rows ? shard : rows;
}

static void kernel_cells(struct cli_table *table, const json_t *plan, const json_t *layer,
                         const json_t *step, const char *pass)
{
    const char *name = plan_text(step, "kernel");
    const json_t *kernel = plan_find(json_object_get(plan, "kernels"), name);
    const json_t *semantics = json_object_get(kernel, "semantics");
    const char *target = json_string_value(json_object_get(semantics, "target_dtype"));
    cli_table_cell(table, CLI_PLAIN, "%s", name);
    cli_table_cell(table, CLI_PLAIN, "%s%s%s", plan_text(semantics, "source_dtype"),
                   target ? " -> " : "", target ? target : "");
    cli_table_cell(table, CLI_PLAIN, "%" PRId64 " x %" PRId64, rows_of(layer, step, pass),
                   argument(layer, step, "cols"));
}

static void cost_cells(struct cli_table *table, enum cli_style style, const struct cost *cost)
{
    char text[32];
    cli_table_cell(table, style, "%s", cli_format_bytes(text, cost->bytes));
    cli_table_cell(table, style, "%s", cost->flops > 0 ? cli_format_flops(text, cost->flops) : "-");
    cli_table_cell(table, style, "%s", cli_format_seconds(text, cost->seconds));
}

static void add_cost(struct cost *sum, struct cost cost)
{
    sum->bytes += cost.bytes;
    sum->flops += cost.flops;
    sum->seconds += cost.seconds;
}

/* What a rank does with a gathered weight before dgrad. */
static void transpose_row(struct cli_table *table, const json_t *layer, struct cost *sum)
{
    struct cost cost = read_cost(layer, "transpose");
    if (cost.bytes == 0)
        return;
    cli_table_cell(table, CLI_PLAIN, "gathered w");
    cli_table_cell(table, CLI_PLAIN, "transpose");
    cli_table_cell(table, CLI_PLAIN, "%s", plan_text(layer, "transpose"));
    cli_table_cell(table, CLI_PLAIN, "uint8 -> uint8");
    cli_table_cell(table, CLI_PLAIN, "%" PRId64 " x %" PRId64, plan_integer(layer, "out_features"),
                   plan_integer(layer, "in_features"));
    cost_cells(table, CLI_PLAIN, &cost);
    add_cost(sum, cost);
}

static void pass_rows(struct cli_table *table, const json_t *plan, const json_t *layer,
                      const char *pass, struct cost *sum)
{
    struct cost cost = read_cost(layer, pass);
    size_t index;
    json_t *step;
    if (strcmp(pass, "dgrad") == 0)
        transpose_row(table, layer, sum);
    json_array_foreach(json_object_get(json_object_get(layer, "passes"), pass), index, step)
    {
        const char *op = plan_text(step, "op");
        if (is_of_whole_weight(layer, pass, op))
            continue;
        cli_table_cell(table, CLI_PLAIN, "%s", index == 0 ? pass : "");
        cli_table_cell(table, CLI_PLAIN, "%s", op);
        if (strcmp(op, "gemm") == 0)
            gemm_cells(table, layer, step);
        else
            kernel_cells(table, plan, layer, step, pass);
        if (index == 0)
            cost_cells(table, CLI_PLAIN, &cost);
        else
            for (int i = 0; i < 3; i++)
                cli_table_cell(table, CLI_PLAIN, "%s", "");
    }
    add_cost(sum, cost);
}

/* ---- choices --------------------------------------------------------------------------------- */

static bool same_choice(const json_t *a, const json_t *b)
{
    static const char *const keys[] = { "backend", "kernel", "accumulate_kernel", "algo" };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (strcmp(plan_text(a, keys[i]), plan_text(b, keys[i])) != 0)
            return false;
    }
    return true;
}

/* Up to the first figure, or the end of the first clause. */
static int short_length(const char *reason)
{
    int length = (int)strcspn(reason, ":;,");
    for (int i = 0; i + 1 < length; i++) {
        if (reason[i] == ' ' && reason[i + 1] >= '0' && reason[i + 1] <= '9')
            return i;
    }
    return length;
}

/* Predicted (or measured) TFLOP/s at the usual M if the range holds it, else at its largest. */
static double choice_tflops(const json_t *layer, const json_t *range, const json_t *choice)
{
    int64_t m = plan_integer(layer, "tokens"), max = plan_integer(range, "max_tokens");
    double seconds = plan_number(choice, "seconds");
    if (m < plan_integer(range, "min_tokens") || m > max)
        m = max;
    return seconds > 0 ? 2e-12 * (double)m * (double)plan_integer(layer, "out_features") *
                             (double)plan_integer(layer, "in_features") / seconds
                       : -1;
}

static void choice_row(struct cli_table *table, const json_t *layer, const char *pass,
                       const json_t *first, const json_t *last)
{
    const json_t *choice = first_choice(last);
    const char *kernel = json_string_value(json_object_get(choice, "kernel"));
    const char *reason = plan_text(choice, "reason");
    double tflops = choice_tflops(layer, last, choice);
    bool whole = cli_verbosity() > 0;
    cli_table_cell(table, CLI_PLAIN, "%s", pass);
    cli_table_cell(table, CLI_PLAIN, "%" PRId64 "-%" PRId64, plan_integer(first, "min_tokens"),
                   plan_integer(last, "max_tokens"));
    cli_table_cell(table, CLI_PLAIN, "%s", plan_text(choice, "backend"));
    cli_table_cell(table, CLI_PLAIN, "%s",
                   kernel                            ? kernel
                   : json_object_get(choice, "algo") ? "tuned algorithm"
                                                     : "heuristic");
    if (tflops > 0)
        cli_table_cell(table, CLI_PLAIN, tflops < 99.95 ? "%.3g" : "%.0f", tflops);
    else
        cli_table_cell(table, CLI_PLAIN, "-");
    cli_table_cell(table, CLI_PLAIN, "%.*s", whole ? (int)strlen(reason) : short_length(reason),
                   reason);
}

/* The ranges of a pass's GEMM. In the short form, neighbours with one choice are one row. */
static void choice_rows(struct cli_table *table, const json_t *layer, const char *pass)
{
    const json_t *steps = json_object_get(json_object_get(layer, "passes"), pass);
    for (size_t i = 0; i < json_array_size(steps); i++) {
        const json_t *ranges = json_object_get(json_array_get(steps, i), "dispatch");
        const json_t *first = json_array_get(ranges, 0);
        bool begins = true;
        for (size_t j = 0; j < json_array_size(ranges); j++) {
            const json_t *range = json_array_get(ranges, j), *next = json_array_get(ranges, j + 1);
            if (next && cli_verbosity() <= 0 &&
                same_choice(first_choice(range), first_choice(next)))
                continue;
            choice_row(table, layer, begins ? pass : "", first, range);
            begins = false;
            first = next;
        }
    }
}

static void print_choices(const json_t *layer)
{
    static const char *const columns[] = { "GEMM",   ">tokens",  "backend",
                                           "kernel", ">TFLOP/s", "reason" };
    struct cli_table *table = cli_table_create(columns, 6);
    for (int i = 0; table && i < PASS_COUNT; i++)
        choice_rows(table, layer, pass_names[i]);
    cli_table_print(table, 2);
    cli_table_destroy(table);
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* "delayed hybrid power-of-two, max of 1024" */
static void print_recipe(const json_t *recipe)
{
    const char *algo = json_string_value(json_object_get(recipe, "algo"));
    printf("recipe %s %s%s", plan_text(recipe, "name"), plan_text(recipe, "format"),
           json_is_true(json_object_get(recipe, "power_of_two")) ? " power-of-two" : "");
    if (strcmp(plan_text(recipe, "weight_scale"), "shard") == 0)
        printf(", w by shard");
    if (!algo)
        return;
    printf(", %s of %" PRId64 " steps", strcmp(algo, "max") == 0 ? "max" : "most recent",
           plan_integer(recipe, "history_length"));
    if (plan_integer(recipe, "margin") > 0)
        printf(", margin %" PRId64, plan_integer(recipe, "margin"));
    if (json_is_true(json_object_get(recipe, "calibrate")))
        printf(", calibrated");
}

static void print_heading(const json_t *layer)
{
    const char *on = cli_style_on(CLI_BOLD), *off = cli_style_off();
    int64_t m = plan_integer(layer, "tokens"), n = plan_integer(layer, "out_features");
    int64_t k = plan_integer(layer, "in_features"), count = plan_integer(layer, "count");
    printf("%s%s%s", on, plan_text(layer, "name"), off);
    if (count > 1)
        printf(" (%" PRId64 " of them)", count);
    printf(": y[%" PRId64 ",%" PRId64 "] = x[%" PRId64 ",%" PRId64 "] w[%" PRId64 ",%" PRId64
           "]^T%s, ",
           m, n, m, k, n, k, json_is_true(json_object_get(layer, "bias")) ? " + bias" : "");
    if (strcmp(plan_text(layer, "compute"), "bf16") == 0)
        printf("computed in bf16");
    else
        print_recipe(json_object_get(layer, "recipe"));
    printf(", up to %" PRId64 " tokens\n", plan_integer(layer, "max_tokens"));
}

/* Whether the rank that was asked for has fewer rows than its piece of w takes. */
static bool is_padded(const json_t *layer)
{
    const json_t *shard = json_object_get(layer, "shard");
    const json_t *count = json_object_get(shard, "count");
    return count && json_integer_value(count) < plan_integer(shard, "rows");
}

static void print_memory(const json_t *layer)
{
    const json_t *memory = json_object_get(layer, "memory");
    const json_t *shard = json_object_get(memory, "shard");
    char a[32], b[32], c[32], d[32];
    if (shard)
        printf("  memory of a rank: its rows of w%s %s, gathered w %s, ",
               is_padded(layer) ? ", padded to as many as every rank's," : "",
               cli_format_bytes(d, json_number_value(shard)),
               cli_format_bytes(a, plan_number(memory, "weight")));
    else
        printf("  memory: quantised w %s, ", cli_format_bytes(a, plan_number(memory, "weight")));
    printf("x saved for backward %s, quantised dy %s\n\n",
           cli_format_bytes(b, plan_number(memory, "saved")),
           cli_format_bytes(c, plan_number(memory, "grad")));
}

static struct cost print_layer(const json_t *plan, const json_t *layer, int64_t rank)
{
    static const char *const columns[] = { "pass",  "step",   "kernel", "dtype",
                                           "shape", ">moved", ">FLOPs", ">predicted" };
    struct cost sum = { 0 };
    struct cli_table *table = cli_table_create(columns, 8);
    print_heading(layer);
    for (int i = 0; table && i < PASS_COUNT; i++)
        pass_rows(table, plan, layer, pass_names[i], &sum);
    if (table) {
        cli_table_cell(table, CLI_BOLD, "total");
        for (int i = 0; i < 4; i++)
            cli_table_cell(table, CLI_PLAIN, "%s", "");
        cost_cells(table, CLI_BOLD, &sum);
    }
    cli_table_print(table, 2);
    cli_table_destroy(table);
    print_choices(layer);
    plan_print_shards(layer, plan_integer(json_object_get(plan, "mesh"), "fsdp"), rank);
    print_memory(layer);
    return sum;
}

static void print_plan(const json_t *plan, const char *layer_alone, int64_t rank)
{
    const json_t *mesh = json_object_get(plan, "mesh");
    const int64_t ranks = plan_integer(mesh, "fsdp");
    struct cost total = { 0 };
    int64_t instances = 0;
    size_t index;
    json_t *layer;
    char a[32], b[32], c[32];
    json_array_foreach(json_object_get(plan, "layers"), index, layer)
    {
        struct cost cost = print_layer(plan, layer, rank);
        double count = (double)plan_integer(layer, "count");
        instances += plan_integer(layer, "count");
        total.bytes += cost.bytes * count;
        total.flops += cost.flops * count;
        total.seconds += cost.seconds * count;
    }
    plan_print_collectives(plan);
    printf("%s%s%s%s%s: %" PRId64 " layer%s, %zu kernels, tensor %" PRId64 ", fsdp %" PRId64
           "; one step%s moves %s, computes %s, predicted %s pass by pass\n",
           cli_style_on(CLI_BOLD), plan_text(plan, "model"), cli_style_off(),
           layer_alone ? ", layer " : "", layer_alone ? layer_alone : "", instances,
           instances == 1 ? "" : "s", json_array_size(json_object_get(plan, "kernels")),
           plan_integer(mesh, "tensor"), ranks, ranks > 1 ? " of a rank" : "",
           cli_format_bytes(a, total.bytes), cli_format_flops(b, total.flops),
           cli_format_seconds(c, total.seconds));
    if (layer_alone)
        plan_print_carried(plan);
    else
        plan_print_step(json_object_get(plan, "predicted"), ranks);
}

/* ---- one layer ------------------------------------------------------------------------------- */

/* Whether the text stands anywhere in a record. */
static bool mentions(const json_t *record, const char *text)
{
    size_t index;
    const char *key;
    json_t *item;
    if (json_is_string(record))
        return strcmp(json_string_value(record), text) == 0;
    json_array_foreach(record, index, item)
    {
        if (mentions(item, text))
            return true;
    }
    json_object_foreach((json_t *)record, key, item)
    {
        if (mentions(item, text))
            return true;
    }
    return false;
}

/* Leaves only what has to do with the layer of that name in the plan: its record, the kernels it
 * launches, the collectives that carry it. The predicted step is the whole model's. */
static int choose_layer(json_t *plan, const char *name)
{
    json_t *layers = json_object_get(plan, "layers"), *chosen = plan_find(layers, name);
    if (!chosen)
        return plan_unknown_layer(layers, name);
    json_t *only = json_pack("[O]", chosen);
    if (!only || json_object_set_new(plan, "layers", only) != 0) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    json_t *kernels = json_object_get(plan, "kernels");
    json_t *collectives = json_object_get(plan, "collectives");
    for (size_t i = json_array_size(kernels); i-- > 0;) {
        if (!mentions(json_array_get(only, 0), plan_text(json_array_get(kernels, i), "name")))
            json_array_remove(kernels, i);
    }
    for (size_t i = json_array_size(collectives); i-- > 0;) {
        if (!mentions(json_object_get(json_array_get(collectives, i), "layers"), name))
            json_array_remove(collectives, i);
    }
    json_object_del(plan, "predicted");
    return CLI_DONE;
}

static int show(const struct values *values, json_t *plan)
{
    int code = values->layer ? choose_layer(plan, values->layer) : CLI_DONE;
    if (!code && values->rank >= 0)
        code = plan_choose_rank(plan, values->rank);
    if (!code && values->json) {
        json_dumpf(plan, stdout, JSON_INDENT(2) | JSON_SORT_KEYS);
        putchar('\n');
    } else if (!code)
        print_plan(plan, values->layer, values->rank);
    return code;
}

static int compare(const struct cli_spec *spec, const struct values *values)
{
    if (!values->fsdp && !values->layer && values->rank < 0)
        return plan_compare(spec, values->world, values->json);
    cli_error(
        "--world compares meshes of whole models; it does not go with --fsdp, --rank or --layer");
    return CLI_USAGE;
}

static int run(const void *v, int count, char **operands)
{
    const struct values *values = v;
    struct cli_spec spec = { .path = operands[0],
                             .tokens = values->tokens,
                             .recipe = values->recipe,
                             .tuning = values->tuning,
                             .gemm = values->gemm,
                             .fsdp = values->fsdp };
    fp8gen *gen;
    (void)count;
    if (values->world)
        return compare(&spec, values);
    int code = cli_spec_open(&spec, NULL, &gen);
    if (code)
        return code;
    json_t *plan = plan_read(gen, operands[0], &code);
    if (!code)
        code = show(values, plan);
    json_decref(plan);
    fp8gen_close(gen);
    return code;
}

const struct cli_command cli_plan_command = {
    .name = "plan",
    .operands = "SPEC",
    .summary = "show passes, steps, kernels, bytes, FLOPs and predicted time",
    .details =
        "Nothing is compiled and no device is opened. Times are predicted for an H200. The "
        "second table of a layer says by what each GEMM is computed, for each range of M, "
        "and why; with -v every range and the whole reason. TFLOP/s are predicted, or as a "
        "tuning file measured them. Tables and totals tell the times of passes one by one; 'in a "
        "step' are those of all layers in a row, a tenth longer, since the card then holds lower "
        "clocks. For a mesh of several ranks, times, bytes and memory are those of a rank with a "
        "full shard.",
    .min_operands = 1,
    .max_operands = 1,
    .options = options,
    .values_size = sizeof(struct values),
    .run = run,
};
