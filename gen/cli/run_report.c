/*
 * run_report.c - the report of `fp8gen run`: a table, or one JSON object per row.
 *
 * Rows come as the passes finish. JSON lines are written at once, so that a long run can be
 * followed; the table is printed at the end, when its widths are known. "error" is that of the
 * kernel, with its bound, or "each" where every output is judged by itself; "SQNR" is that of FP8
 * against the original tensors.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/run.h"

struct run_report {
    bool json;
    const char *model;
    const struct cli_device *device;
    struct cli_table *table;
    int failures, unjudged, rows;
};

struct run_report *run_report_create(bool json, const char *model, const struct cli_device *device)
{
    static const char *const columns[] = { "layer", "pass",   "shape",  "kernel", "dtype",
                                           ">time", ">speed", ">error", ">SQNR",  "verdict" };
    struct run_report *report = calloc(1, sizeof *report);
    if (!report)
        return NULL;
    *report = (struct run_report){ .json = json, .model = model, .device = device };
    if (!json && !(report->table = cli_table_create(columns, 10))) {
        free(report);
        return NULL;
    }
    return report;
}

static json_t *number_or_null(double value, bool known)
{
    return known && isfinite(value) ? json_real(value) : json_null();
}

static const char *verdict(const struct run_row *row)
{
    return row->failure[0] ? "failed" : row->no_bound ? "not judged" : "ok";
}

static void print_json(const struct run_report *report, const struct run_layer *run,
                       const struct run_row *row)
{
    const fp8_layer_info *i = &run->info;
    bool has_speed = row->seconds > 0;
    json_t *object = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:s, s:s, s:s, s:s}",
                               "model", report->model, "layer", i->name, "pass", row->pass, "M",
                               (json_int_t)run->m, "N", (json_int_t)i->out_features, "K",
                               (json_int_t)i->in_features, "spec_M", (json_int_t)run->wanted_m,
                               "recipe", run->recipe.name, "device", report->device->info.name,
                               "kernel", row->kernel, "dtype", row->dtype, "verdict", verdict(row));
    if (!object) {
        cli_error("out of memory");
        return;
    }
    json_object_set_new(object, "seconds", number_or_null(row->seconds, row->seconds >= 0));
    json_object_set_new(
        object, "tflops",
        number_or_null(row->flops / row->seconds * 1e-12, has_speed && row->flops > 0));
    json_object_set_new(
        object, "gbytes_per_s",
        number_or_null(row->bytes / row->seconds * 1e-9, has_speed && row->bytes > 0));
    json_object_set_new(object, "error", number_or_null(row->error, row->error >= 0));
    json_object_set_new(object, "error_bound",
                        number_or_null(row->error_bound, row->error_bound >= 0));
    json_object_set_new(object, "sqnr_db", number_or_null(row->sqnr, row->sqnr >= 0));
    json_object_set_new(object, "sqnr_bound_db",
                        number_or_null(row->sqnr_bound, row->sqnr_bound >= 0));
    json_object_set_new(object, "dbias_error",
                        number_or_null(row->dbias_error, row->dbias_error >= 0));
    json_object_set_new(object, "judged",
                        row->each               ? json_string("each")
                        : row->error_bound >= 0 ? json_string("average")
                                                : json_null());
    json_object_set_new(object, "samples", json_integer(row->samples));
    json_object_set_new(object, "bit_equal",
                        row->bit_equal < 0 ? json_null() : json_boolean(row->bit_equal));
    json_object_set_new(object, "failure",
                        row->failure[0] ? json_string(row->failure) : json_null());
    json_dumpf(object, stdout, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    putchar('\n');
    fflush(stdout);
    json_decref(object);
}

static void speed_cell(struct cli_table *table, const struct run_row *row)
{
    if (row->seconds <= 0 || (row->flops <= 0 && row->bytes <= 0))
        cli_table_cell(table, CLI_PLAIN, "-");
    else if (row->flops > 0)
        cli_table_cell(table, CLI_PLAIN, "%.*f TFLOP/s", row->flops / row->seconds < 1e13 ? 3 : 0,
                       row->flops / row->seconds * 1e-12);
    else
        cli_table_cell(table, CLI_PLAIN, "%.3g GB/s", row->bytes / row->seconds * 1e-9);
}

static void error_cell(struct cli_table *table, const struct run_row *row)
{
    char dbias[32] = "";
    if (row->dbias_error >= 0)
        snprintf(dbias, sizeof dbias, ", dbias %.0e", row->dbias_error);
    if (row->bit_equal < 0 && row->error < 0)
        cli_table_cell(table, CLI_PLAIN, "%s", dbias[0] ? dbias + 2 : "-");
    else if (row->bit_equal >= 0 && row->error < 0)
        cli_table_cell(table, CLI_PLAIN, "%s%s", row->bit_equal ? "bit-equal" : "bytes differ",
                       dbias);
    else if (row->each)
        cli_table_cell(table, CLI_PLAIN, "%.2e (each)", row->error);
    else if (row->error_bound >= 0)
        cli_table_cell(table, CLI_PLAIN, "%.2e (%.1e)", row->error, row->error_bound);
    else
        cli_table_cell(table, CLI_PLAIN, "%.2e", row->error);
}

static void print_row(struct cli_table *table, const struct run_layer *run,
                      const struct run_row *row)
{
    char text[32];
    bool bad = row->failure[0];
    cli_table_cell(table, CLI_PLAIN, "%s", run->info.name);
    cli_table_cell(table, CLI_PLAIN, "%s", row->pass);
    cli_table_cell(table, CLI_PLAIN, "%s", row->shape);
    cli_table_cell(table, CLI_PLAIN, "%s", row->kernel);
    cli_table_cell(table, CLI_PLAIN, "%s", row->dtype);
    cli_table_cell(table, CLI_PLAIN, "%s",
                   row->seconds >= 0 ? cli_format_seconds(text, row->seconds) : "-");
    speed_cell(table, row);
    error_cell(table, row);
    if (row->sqnr >= 0 && row->sqnr_bound >= 0)
        cli_table_cell(table, CLI_PLAIN, "%.1f dB (%.0f)", row->sqnr, row->sqnr_bound);
    else if (row->sqnr >= 0)
        cli_table_cell(table, CLI_PLAIN, "%.1f dB", row->sqnr);
    else
        cli_table_cell(table, CLI_PLAIN, "-");
    if (bad)
        cli_table_cell(table, CLI_RED, "FAILED: %s", row->failure);
    else
        cli_table_cell(table, row->no_bound ? CLI_PLAIN : CLI_GREEN, "%s", verdict(row));
}

void run_report_row(struct run_report *report, const struct run_layer *run,
                    const struct run_row *row)
{
    report->rows++;
    report->unjudged += !row->failure[0] && row->no_bound;
    if (row->failure[0]) {
        report->failures++;
        cli_error("layer '%s', %s: %s", run->info.name, row->pass, row->failure);
    }
    if (report->json)
        print_json(report, run, row);
    else
        print_row(report->table, run, row);
}

int run_report_finish(struct run_report *report)
{
    int failures = report->failures;
    if (!report->json && report->rows) {
        cli_table_print(report->table, 0);
        printf("%s on %s: %d passes, %s%d failed%s", report->model, report->device->info.name,
               report->rows, cli_style_on(failures ? CLI_RED : CLI_GREEN), failures,
               cli_style_off());
        if (report->unjudged)
            printf(", %d not judged (fast accumulation has no bound at this depth)",
                   report->unjudged);
        printf("\n");
    }
    cli_table_destroy(report->table);
    free(report);
    return failures;
}
