/*
 * run_shard_report.c - the report of `fp8gen run --fsdp`: one row a layer, the worst of all ranks.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/run_shard.h"

struct shard_report {
    bool json;
    const char *model, *how, *device;
    struct cli_table *table;
    int failures, rows, ranks;
    size_t pool_bytes;
};

struct shard_report *shard_report_create(bool json, const char *model, const char *how,
                                         const char *device)
{
    static const char *const columns[] = { "layer",        "w",     "a rank", "tokens a rank",
                                           "gathered w",   "y",     "dx",     "dw",
                                           ">error of dw", "dbias", "verdict" };
    struct shard_report *report = calloc(1, sizeof *report);
    if (!report)
        return NULL;
    *report = (struct shard_report){ .json = json, .model = model, .how = how, .device = device };
    if (!json && !(report->table = cli_table_create(columns, 11))) {
        free(report);
        return NULL;
    }
    return report;
}

/* What is wrong, or "". */
static void explain(const struct shard_layer *l, char text[192])
{
    const float *r = l->results;
    text[0] = '\0';
    if (r[SHARD_W_WRONG] > 0)
        snprintf(text, 192, "%.0f bytes of the gathered weight differ", (double)r[SHARD_W_WRONG]);
    else if (r[SHARD_Y_WRONG] > 0)
        snprintf(text, 192, "%.0f bytes of y differ", (double)r[SHARD_Y_WRONG]);
    else if (r[SHARD_DX_WRONG] > 0)
        snprintf(text, 192, "%.0f bytes of dx differ", (double)r[SHARD_DX_WRONG]);
    else if (r[SHARD_DW_SHARE] > 1)
        snprintf(text, 192, "dw is off by %.2g times its bound", (double)r[SHARD_DW_SHARE]);
    else if (r[SHARD_DBIAS_SHARE] > 1)
        snprintf(text, 192, "dbias is off by %.2g times its bound", (double)r[SHARD_DBIAS_SHARE]);
}

static const char *same(float wrong)
{
    return wrong > 0 ? "differs" : "bit-equal";
}

/* Of w on a rank that has its full part. */
static int64_t rows_of(const struct shard_layer *l)
{
    return l->chunk < l->info.out_features ? l->chunk : l->info.out_features;
}

static void print_json(const struct shard_report *report, const struct shard_rank *s,
                       const struct shard_layer *l, const char *failure)
{
    const float *r = l->results;
    json_t *row = json_pack(
        "{s:s, s:s, s:I, s:I, s:i, s:I, s:I, s:s, s:s, s:b, s:b, s:b, s:f, s:f, s:s}", "model",
        report->model, "layer", l->info.name, "N", (json_int_t)l->info.out_features, "K",
        (json_int_t)l->info.in_features, "fsdp", s->rank->ranks, "rows", (json_int_t)rows_of(l),
        "M", (json_int_t)shard_tokens(s, l), "recipe", l->info.recipe, "device", report->device,
        "w_bit_equal", r[SHARD_W_WRONG] == 0, "y_bit_equal", r[SHARD_Y_WRONG] == 0, "dx_bit_equal",
        r[SHARD_DX_WRONG] == 0, "dw_error", (double)r[SHARD_DW_ERROR], "dw_share_of_bound",
        (double)r[SHARD_DW_SHARE], "verdict", failure[0] ? "failed" : "ok");
    if (!row) {
        cli_error("out of memory");
        return;
    }
    json_object_set_new(row, "dbias_share_of_bound",
                        l->info.has_bias ? json_real((double)r[SHARD_DBIAS_SHARE]) : json_null());
    json_object_set_new(row, "failure", failure[0] ? json_string(failure) : json_null());
    json_dumpf(row, stdout, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(6));
    putchar('\n');
    fflush(stdout);
    json_decref(row);
}

static void print_row(struct cli_table *table, const struct shard_rank *s,
                      const struct shard_layer *l, const char *failure)
{
    const float *r = l->results;
    long long n = l->info.out_features, k = l->info.in_features;
    cli_table_cell(table, CLI_PLAIN, "%s", l->info.name);
    cli_table_cell(table, CLI_PLAIN, "%lld x %lld", n, k);
    cli_table_cell(table, CLI_PLAIN, "%lld row%s%s", (long long)rows_of(l),
                   rows_of(l) == 1 ? "" : "s", n != l->chunk * s->rank->ranks ? ", uneven" : "");
    cli_table_cell(table, CLI_PLAIN, "%lld", (long long)shard_tokens(s, l));
    cli_table_cell(table, CLI_PLAIN, "%s", same(r[SHARD_W_WRONG]));
    cli_table_cell(table, CLI_PLAIN, "%s", same(r[SHARD_Y_WRONG]));
    cli_table_cell(table, CLI_PLAIN, "%s", same(r[SHARD_DX_WRONG]));
    cli_table_cell(table, CLI_PLAIN, "%s %s", fp8_dtype_name(l->info.dw_dtype),
                   l->reduce_each ? "each" : "last");
    cli_table_cell(table, CLI_PLAIN, "%.1e (%.0f %% of bound)", (double)r[SHARD_DW_ERROR],
                   100 * (double)r[SHARD_DW_SHARE]);
    cli_table_cell(table, CLI_PLAIN, "%s",
                   !l->info.has_bias          ? "-"
                   : r[SHARD_DBIAS_SHARE] > 1 ? "off"
                                              : "ok");
    if (failure[0])
        cli_table_cell(table, CLI_RED, "FAILED: %s", failure);
    else
        cli_table_cell(table, CLI_GREEN, "ok");
}

void shard_report_layer(struct shard_report *report, const struct shard_rank *s,
                        const struct shard_layer *l)
{
    char failure[192];
    explain(l, failure);
    report->rows++;
    report->ranks = s->rank->ranks;
    report->pool_bytes = s->pool_bytes;
    if (failure[0]) {
        report->failures++;
        cli_progress_end();
        cli_error("layer '%s': %s", l->info.name, failure);
    }
    if (report->json)
        print_json(report, s, l, failure);
    else
        print_row(report->table, s, l, failure);
}

int shard_report_finish(struct shard_report *report)
{
    int failures = report->failures;
    char pool[32];
    if (!report->json && report->rows) {
        cli_table_print(report->table, 0);
        printf("%s on %s: %d ranks (%s), %d layer%s, %d steps of %d micro-batches, the model's "
               "pool %s a rank, %s%d failed%s\n",
               report->model, report->device, report->ranks, report->how, report->rows,
               report->rows == 1 ? "" : "s", SHARD_STEPS, SHARD_MICRO_BATCHES,
               cli_format_bytes(pool, (double)report->pool_bytes),
               cli_style_on(failures ? CLI_RED : CLI_GREEN), failures, cli_style_off());
    }
    cli_table_destroy(report->table);
    free(report);
    return failures;
}
