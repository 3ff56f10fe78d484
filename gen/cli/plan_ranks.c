/*
 * plan_ranks.c - the part of `fp8gen plan` that is about ranks: shards, collectives, meshes
 * compared.
 *
 * In: the plan as JSON. Out: lines and tables for people; a rank's rows put into the plan; and for
 * --world one row for each mesh of so many GPUs of one host: what a rank keeps and moves, and the
 * predicted step. Predictions are step.lua's; nothing is computed here but totals.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "gen/cli/plan.h"

/* The rows of w that a rank holds. */
static int64_t rows_of_rank(const json_t *layer, int64_t rank, int64_t *first)
{
    int64_t n = plan_integer(layer, "out_features");
    int64_t chunk = plan_integer(json_object_get(layer, "shard"), "rows");
    *first = rank * chunk < n ? rank * chunk : n;
    return n - *first < chunk ? n - *first : chunk;
}

void plan_print_shards(const json_t *layer, int64_t ranks, int64_t rank)
{
    int64_t first, n = plan_integer(layer, "out_features"), k = plan_integer(layer, "in_features");
    int64_t chunk = plan_integer(json_object_get(layer, "shard"), "rows");
    if (ranks == 1)
        return;
    if (rank >= 0) {
        int64_t rows = rows_of_rank(layer, rank, &first);
        printf("  rank %" PRId64 " of %" PRId64 ": ", rank, ranks);
        if (rows)
            printf("rows %" PRId64 " to %" PRId64 " of w, w and dw shards [%" PRId64 ",%" PRId64
                   "]\n",
                   first, first + rows - 1, rows, k);
        else
            printf("no rows of w\n");
        return;
    }
    int64_t full = n / chunk, rest = n % chunk, empty = ranks - full - (rest > 0);
    printf("  shards of w: ");
    if (full)
        printf("%" PRId64 " of [%" PRId64 ",%" PRId64 "]", full, chunk, k);
    if (rest)
        printf("%sone of [%" PRId64 ",%" PRId64 "]", full ? ", " : "", rest, k);
    if (empty)
        printf(", %" PRId64 " empty", empty);
    printf("\n");
}

/* Names of layers, as many as a table's cell takes. */
static void layers_cell(struct cli_table *table, const json_t *names)
{
    char text[64] = "";
    size_t index;
    json_t *name;
    json_array_foreach(names, index, name)
    {
        size_t used = strlen(text);
        const char *word = json_string_value(name);
        if (index > 0 && used + strlen(word) + 6 > 48) {
            snprintf(text + used, sizeof text - used, ", ...");
            break;
        }
        snprintf(text + used, sizeof text - used, "%s%.40s", index ? ", " : "", word);
    }
    cli_table_cell(table, CLI_PLAIN, "%s", text);
}

void plan_print_collectives(const json_t *plan)
{
    static const char *const columns[] = { "pass",   "collective",      "layers",    "dtype",
                                           ">times", ">a rank's piece", ">predicted" };
    const json_t *list = json_object_get(plan, "collectives");
    struct cli_table *table = list ? cli_table_create(columns, 7) : NULL;
    char text[32];
    size_t index;
    json_t *item;
    if (!table)
        return;
    printf("collectives of one step, in the order in which they first come on every rank\n"
           "(times: in the whole step; a rank's piece: what it sends of a gather, receives of a "
           "sum):\n");
    json_array_foreach(list, index, item)
    {
        cli_table_cell(table, CLI_PLAIN, "%s", plan_text(item, "pass"));
        cli_table_cell(table, CLI_PLAIN, "%s", plan_text(item, "op"));
        layers_cell(table, json_object_get(item, "layers"));
        cli_table_cell(table, CLI_PLAIN, "%s", plan_text(item, "dtype"));
        cli_table_cell(table, CLI_PLAIN, "%" PRId64, plan_integer(item, "times"));
        cli_table_cell(table, CLI_PLAIN, "%s",
                       cli_format_bytes(text, plan_number(item, "bytes_a_rank")));
        bool known = json_is_number(json_object_get(item, "seconds"));
        cli_table_cell(table, CLI_PLAIN, "%s",
                       known ? cli_format_seconds(text, plan_number(item, "seconds")) : "-");
    }
    cli_table_print(table, 2);
    cli_table_destroy(table);
    printf("\n");
}

/* A step of all layers, longer than its passes one by one: the card holds lower clocks. */
void plan_print_step(const json_t *predicted, int64_t ranks)
{
    char a[32], b[32];
    if (!json_is_object(predicted))
        return;
    cli_format_seconds(a, plan_number(predicted, "update"));
    cli_format_seconds(b, plan_number(predicted, "step"));
    if (ranks == 1) {
        printf("in a step, at sustained clocks: quantising w %s, forward and backward %s\n", a, b);
        return;
    }
    printf("in a step, at sustained clocks, over %" PRId64
           " ranks: quantising this rank's rows %s, "
           "forward and backward %s, ",
           ranks, a, b);
    cli_format_seconds(a, plan_number(predicted, "exposed"));
    cli_format_seconds(b, plan_number(predicted, "all_gather"));
    printf("of it %s exposed (gathers %s, ", a, b);
    printf("sums %s)\n", cli_format_seconds(a, plan_number(predicted, "reduce")));
}

void plan_print_carried(const json_t *plan)
{
    const json_t *list = json_object_get(plan, "collectives");
    double gathers = 0, sums = 0;
    size_t index;
    json_t *item;
    char a[32], b[32];
    json_array_foreach(list, index, item)
    {
        const char *op = plan_text(item, "op");
        double seconds = plan_number(item, "seconds") * (double)plan_integer(item, "times");
        gathers += strcmp(op, "all_gather") == 0 ? seconds : 0;
        sums += strcmp(op, "reduce_scatter") == 0 ? seconds : 0;
    }
    if (gathers > 0)
        printf("over %" PRId64 " ranks: gathers %s, sums %s beside compute; what of them is "
               "exposed is predicted of all layers, without --layer\n",
               plan_integer(json_object_get(plan, "mesh"), "fsdp"), cli_format_seconds(a, gathers),
               cli_format_seconds(b, sums));
}

/* Puts a rank and its rows into the plan. */
int plan_choose_rank(json_t *plan, int64_t rank)
{
    int64_t first, ranks = plan_integer(json_object_get(plan, "mesh"), "fsdp");
    size_t index;
    json_t *layer;
    if (rank >= ranks) {
        cli_error("--rank %" PRId64 ": the mesh has %" PRId64 " rank%s, from 0", rank, ranks,
                  ranks == 1 ? "" : "s");
        cli_hint("--fsdp F plans for F ranks");
        return CLI_USAGE;
    }
    bool good = json_object_set_new(plan, "rank", json_integer(rank)) == 0;
    json_array_foreach(json_object_get(plan, "layers"), index, layer)
    {
        json_t *shard = json_object_get(layer, "shard");
        int64_t count = rows_of_rank(layer, rank, &first);
        good = good && json_object_set_new(shard, "first", json_integer(first)) == 0 &&
               json_object_set_new(shard, "count", json_integer(count)) == 0;
    }
    if (!good)
        cli_error("out of memory");
    return good ? CLI_DONE : CLI_MACHINE;
}

/* ---- meshes ---------------------------------------------------------------------------------- */

/* What a rank holds and moves in a step, all layers as often as the model has them. */
struct traffic {
    double shards, gathered, summed; /* bytes */
};

static struct traffic traffic_of(const json_t *plan, int64_t ranks)
{
    struct traffic sum = { 0 };
    size_t index;
    json_t *item;
    json_array_foreach(json_object_get(plan, "collectives"), index, item)
    {
        const char *op = plan_text(item, "op");
        double bytes = plan_number(item, "bytes_a_rank") * (double)plan_integer(item, "times");
        bool gathers = strcmp(op, "all_gather") == 0;
        if (gathers && strcmp(plan_text(item, "pass"), "fprop") == 0)
            sum.shards += bytes;
        if (gathers)
            sum.gathered += bytes * (double)(ranks - 1);
        else if (strcmp(op, "reduce_scatter") == 0)
            sum.summed += bytes * (double)(ranks - 1);
    }
    return sum;
}

static json_t *mesh_json(const json_t *plan, int64_t ranks, const struct traffic *t)
{
    return json_pack("{s:s, s:I, s:{s:i, s:I}, s:f, s:f, s:f, s:O}", "model",
                     plan_text(plan, "model"), "ranks", (json_int_t)ranks, "mesh", "tensor", 1,
                     "fsdp", (json_int_t)ranks, "shard_bytes", t->shards, "gathered_bytes",
                     t->gathered, "summed_bytes", t->summed, "predicted",
                     json_object_get(plan, "predicted"));
}

static void mesh_row(struct cli_table *table, const json_t *plan, int64_t ranks,
                     const struct traffic *t)
{
    const json_t *predicted = json_object_get(plan, "predicted");
    const double bytes[] = { t->shards, t->gathered, t->summed };
    const double step = plan_number(predicted, "step"), alone = plan_number(predicted, "alone");
    const double seconds[] = { plan_number(predicted, "update"), step,
                               plan_number(predicted, "exposed") };
    char text[32];
    cli_table_cell(table, CLI_PLAIN, "fsdp %" PRId64, ranks);
    for (int i = 0; i < 3; i++)
        cli_table_cell(table, CLI_PLAIN, "%s",
                       bytes[i] > 0 ? cli_format_bytes(text, bytes[i]) : "-");
    for (int i = 0; i < 3; i++)
        cli_table_cell(table, CLI_PLAIN, "%s",
                       seconds[i] > 0 ? cli_format_seconds(text, seconds[i]) : "-");
    cli_table_cell(table, CLI_PLAIN, "%.3f", alone > 0 ? step / alone : 1.0);
}

/* One mesh: its plan, and a row of it. */
static int add_mesh(const struct cli_spec *spec, int64_t ranks, struct cli_table *table)
{
    struct cli_spec meshed = *spec;
    char number[24];
    json_t *plan = NULL;
    fp8gen *gen = NULL;
    snprintf(number, sizeof number, "%" PRId64, ranks);
    meshed.fsdp = number;
    int code = cli_spec_open(&meshed, NULL, &gen);
    if (!code)
        plan = plan_read(gen, spec->path, &code);
    if (!code) {
        struct traffic t = traffic_of(plan, ranks);
        json_t *row = table ? NULL : mesh_json(plan, ranks, &t);
        if (table)
            mesh_row(table, plan, ranks, &t);
        else if (json_dumpf(row, stdout, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(6)))
            code = CLI_MACHINE;
        else
            putchar('\n');
        json_decref(row);
    }
    json_decref(plan);
    fp8gen_close(gen);
    return code;
}

int plan_compare(const struct cli_spec *spec, int64_t world, bool json)
{
    static const char *const columns[] = { "mesh",     ">w a rank",     ">gathered",
                                           ">summed",  ">quantising w", ">step",
                                           ">exposed", ">over compute" };
    struct cli_table *table = json ? NULL : cli_table_create(columns, 8);
    int code = CLI_DONE;
    if (!json && !table) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    for (int64_t ranks = 1; !code && ranks <= world; ranks++) {
        if (world % ranks == 0)
            code = add_mesh(spec, ranks, table);
    }
    if (!code && table) {
        cli_table_print(table, 0);
        printf(
            "step: forward and backward, in a step at sustained clocks, longer than pass by pass; "
            "quantising w comes on top\n");
    }
    cli_table_destroy(table);
    return code;
}
