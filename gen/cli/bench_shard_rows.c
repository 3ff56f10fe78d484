/*
 * bench_shard_rows.c - the rows of `fp8gen bench shard`: what was measured, beside what is
 * predicted.
 *
 * In: results of rank 0 with the seconds behind them. Out: rows of a table, or JSON objects; behind
 * the rows of a number of ranks one with the mean and the worst error of the predictions. They are
 * of a GPU: on the host, which shows the flow alone, nothing is predicted and the column is left
 * out.
 */
#include <math.h>
#include <string.h>

#include "gen/cli/bench_shard.h"

int shard_bench_open_rows(struct shard_bench *b)
{
    static const char *const columns[] = { "case",   ">ranks",     "pass",       ">layer",
                                           ">value", "unit",       ">predicted", ">baseline",
                                           ">ratio", "baseline is" };
    static const char *const on_host[] = { "case", ">ranks",    "pass",   ">layer",     ">value",
                                           "unit", ">baseline", ">ratio", "baseline is" };
    if (b->values->json)
        return CLI_DONE;
    b->rows.table =
        b->rows.device.is_host ? cli_table_create(on_host, 9) : cli_table_create(columns, 10);
    if (b->rows.table)
        return CLI_DONE;
    cli_error("out of memory");
    return CLI_MACHINE;
}

double shard_bench_collective(const struct shard_bench_rank *r, const char *op, const char *way,
                              double bytes)
{
    double seconds = -1;
    if (r->rank->rank != 0 || r->rank->device.is_host ||
        fp8gen_collective_seconds(r->bench->gen, op, way, bytes, r->rank->ranks, &seconds))
        return -1;
    return seconds;
}

/* (predicted - measured) / measured; NAN: one of them is not there. */
static double note_error(struct shard_bench *b, const struct shard_bench_times *times, int which,
                         const struct bench_result *result)
{
    double measured = times->measured[which], predicted = times->predicted[which];
    if (!(measured > 0) || predicted < 0)
        return NAN;
    double error = predicted / measured - 1;
    b->errors.count++;
    b->errors.sum += fabs(error);
    if (fabs(error) >= fabs(b->errors.worst)) {
        b->errors.worst = error;
        snprintf(b->errors.where, sizeof b->errors.where, "%s of %s",
                 which ? "the baseline" : result->pass, result->name);
    }
    return error;
}

static void add_times(json_t *row, const struct shard_bench_times *times, const double errors[2])
{
    static const char *const names[2][3] = { { "seconds", "predicted_seconds", "prediction_error" },
                                             { "baseline_seconds", "baseline_predicted_seconds",
                                               "baseline_prediction_error" } };
    for (int i = 0; i < 2; i++) {
        const double values[3] = { times->measured[i], times->predicted[i], errors[i] };
        for (int v = 0; v < 3; v++)
            json_object_set_new(
                row, names[i][v],
                isnan(values[v]) || (v < 2 && values[v] < 0) ? json_null() : json_real(values[v]));
    }
}

static void print_cells(const struct shard_bench *b, const struct bench_result *result, int ranks,
                        double error)
{
    struct cli_table *t = b->rows.table;
    double baseline = result->baseline;
    double ratio = result->lower_is_better ? baseline / result->value : result->value / baseline;
    char layer[48] = "";
    if (result->shape->n)
        snprintf(layer, sizeof layer, "%lld x %lld", (long long)result->shape->n,
                 (long long)result->shape->k);
    cli_table_cell(t, CLI_PLAIN, "%s", result->name);
    cli_table_cell(t, CLI_PLAIN, "%d", ranks);
    cli_table_cell(t, CLI_PLAIN, "%s", result->pass);
    cli_table_cell(t, CLI_PLAIN, "%s", layer);
    cli_table_cell(t, CLI_PLAIN, "%.1f", result->value);
    cli_table_cell(t, CLI_PLAIN, "%s", result->unit);
    if (!b->rows.device.is_host)
        cli_table_cell(t, CLI_PLAIN, isnan(error) ? "" : "%+.0f %%", 100 * error);
    cli_table_cell(t, CLI_PLAIN, baseline >= 0 ? "%.1f" : "-", baseline);
    cli_table_cell(t, baseline >= 0 && ratio >= 1 ? CLI_GREEN : CLI_PLAIN,
                   baseline >= 0 ? "%.3f" : "-", ratio);
    cli_table_cell(t, CLI_PLAIN, "%s", result->baseline_name ? result->baseline_name : "");
}

void shard_bench_row(struct shard_bench_rank *r, const struct bench_result *result,
                     const struct shard_bench_times *times, json_t *more)
{
    struct shard_bench *b = r->bench;
    if (r->rank->rank == 0) {
        const double errors[2] = { note_error(b, times, 0, result),
                                   note_error(b, times, 1, result) };
        json_t *row = b->values->json ? bench_result_json(result) : NULL;
        b->rows.rows++;
        if (row) {
            add_times(row, times, errors);
            json_object_update(row, more);
        }
        if (b->values->json)
            bench_print_json(row);
        else
            print_cells(b, result, r->rank->ranks, errors[0]);
    }
    json_decref(more);
}

void shard_bench_errors(struct shard_bench *b)
{
    const struct bench_shape none = { 0 };
    const double mean = b->errors.count ? 100 * b->errors.sum / b->errors.count : 0;
    const struct bench_result result = { .bench = "shard",
                                         .name = "prediction_error",
                                         .pass = b->errors.where,
                                         .shape = &none,
                                         .unit = "%",
                                         .value = 100 * fabs(b->errors.worst),
                                         .baseline = -1,
                                         .launches = -1 };
    if (b->errors.count == 0)
        return;
    if (b->values->json) {
        json_t *row = bench_result_json(&result);
        if (row) {
            json_object_set_new(row, "ranks", json_integer(b->ranks));
            json_object_set_new(row, "mean", json_real(mean));
            json_object_set_new(row, "count", json_integer(b->errors.count));
        }
        bench_print_json(row);
    } else {
        print_cells(b, &result, b->ranks, NAN);
    }
    memset(&b->errors, 0, sizeof b->errors);
}
