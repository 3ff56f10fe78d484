/*
 * tune_file.c - the tuning file: JSON that says which kernel each GEMM takes in each range of M,
 * with all figures that were measured.
 *
 * Keys are sorted and nothing depends on time or place, but the figures do: two runs differ in
 * them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/tune.h"

/* Five digits are more than a measurement holds. */
static double rounded(double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.5g", value);
    return strtod(text, NULL);
}

static json_t *measured_list(const struct tune_plan *plan, const struct tune_entry *entry)
{
    double flops = tune_flops(plan, entry);
    json_t *list = json_array();
    for (int i = 0; list && i < entry->measured_count; i++) {
        const struct tune_measured *m = &entry->measured[i];
        json_array_append_new(list, json_pack("{s:s, s:f, s:f}", "name", m->name, "microseconds",
                                              rounded(m->seconds * 1e6), "tflops",
                                              rounded(flops / m->seconds * 1e-12)));
    }
    return list;
}

static json_t *choice_of(const struct tune_entry *entry, uint64_t version)
{
    if (!entry->config)
        return json_pack("{s:s, s:s, s:I}", "backend", "cublaslt", "algo", entry->algorithm,
                         "version", (json_int_t)version);
    json_t *config = json_copy(entry->config);
    json_object_del(config, "name");
    return json_pack("{s:s, s:o}", "backend", "generated", "config", config);
}

static json_t *entry_record(const struct tune_plan *plan, const struct tune_entry *e,
                            uint64_t version)
{
    const struct gemm_layer *layer = &plan->layers[e->layer];
    json_t *record = json_pack(
        "{s:s, s:I, s:I, s:s, s:s, s:s, s:s, s:b, s:I, s:I, s:I}", "pass", fp8_pass_name(e->pass),
        "N", (json_int_t)layer->n, "K", (json_int_t)layer->k, "a_dtype", e->a_dtype, "b_dtype",
        e->b_dtype, "out_dtype", e->out_dtype, "accumulation", e->split ? "split" : "fast",
        "accumulate", e->accumulate, "min_tokens", (json_int_t)e->min_tokens, "max_tokens",
        (json_int_t)e->max_tokens, "measured_tokens", (json_int_t)e->measured_tokens);
    if (!record)
        return NULL;
    json_object_set_new(record, "choice", choice_of(e, version));
    json_object_set_new(record, "measured", measured_list(plan, e));
    json_object_set_new(record, "bf16_microseconds",
                        e->bf16_seconds > 0 ? json_real(rounded(e->bf16_seconds * 1e6))
                                            : json_null());
    return record;
}

int tune_file_write(const struct tune_plan *plan, const struct cli_device *device, const char *path)
{
    const fp8_device_info *info = &device->info;
    json_t *entries = json_array();
    for (int i = 0; i < plan->count; i++) {
        const struct tune_entry *e = &plan->entries[i];
        if (e->done && e->seconds > 0)
            json_array_append_new(entries, entry_record(plan, e, info->cublaslt_version));
    }
    json_t *root = json_pack("{s:s, s:i, s:s, s:I, s:o}", "format", "fp8gen-tuning",
                             "format_version", 1, "gpu", info->name, "cublaslt_version",
                             (json_int_t)info->cublaslt_version, "entries", entries);
    char *text =
        root ? json_dumps(root, JSON_INDENT(1) | JSON_SORT_KEYS | JSON_REAL_PRECISION(8)) : NULL;
    char *whole = NULL;
    int code = CLI_MACHINE;
    if (!text || asprintf(&whole, "%s\n", text) < 0)
        cli_error("out of memory");
    else
        code = cli_write_file(path, whole, strlen(whole));
    free(whole);
    free(text);
    json_decref(root);
    return code;
}
