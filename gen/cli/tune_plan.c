/*
 * tune_plan.c - the GEMMs that a plan has, each once.
 *
 * In: the plan of a spec. Out: the layers that hold its GEMMs and one entry for each GEMM, way
 * of writing its output (overwriting, accumulating) and range of M. Layers that differ only in
 * name, count or bias share their GEMMs; a range that reaches further in another layer grows.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"
#include "gen/cli/tune.h"

struct reader {
    struct tune_plan *plan;
    const int64_t *tokens;
    int token_count;
};

static int no_memory(void)
{
    cli_error("out of memory");
    return CLI_MACHINE;
}

static fp8_dtype dtype_of(const char *name)
{
    for (int i = 1; i < 16; i++) {
        if (strcmp(fp8_dtype_name((fp8_dtype)i), name) == 0)
            return (fp8_dtype)i;
    }
    return FP8_DTYPE_NONE;
}

__attribute__((format(printf, 2, 3))) static int add_note(struct tune_plan *plan,
                                                          const char *format, ...)
{
    va_list arguments;
    if (!plan->notes)
        plan->notes = json_array();
    va_start(arguments, format);
    int failed = json_array_append_new(plan->notes, json_vsprintf(format, arguments));
    va_end(arguments);
    return failed ? no_memory() : CLI_DONE;
}

/* ---- layers ---------------------------------------------------------------------------------- */

static int add_layer(struct tune_plan *plan, const json_t *record, int *place)
{
    struct gemm_layer layer = {
        .n = plan_integer(record, "out_features"),
        .k = plan_integer(record, "in_features"),
        .y = dtype_of(plan_text(plan_gemm_step(record, "fprop"), "out_dtype")),
        .dx = dtype_of(plan_text(plan_gemm_step(record, "dgrad"), "out_dtype")),
        .dw = dtype_of(plan_text(plan_gemm_step(record, "wgrad"), "out_dtype"))
    };
    snprintf(layer.format, sizeof layer.format, "%s",
             plan_text(json_object_get(record, "recipe"), "format"));
    if (layer.n < 1 || layer.k < 1 || !layer.y || !layer.dx || !layer.dw) {
        cli_error("layer '%s': its GEMMs cannot be read from the plan", plan_text(record, "name"));
        return CLI_BUG;
    }
    for (int i = 0; i < plan->layer_count; i++) {
        const struct gemm_layer *l = &plan->layers[i];
        *place = i;
        if (l->n == layer.n && l->k == layer.k && l->y == layer.y && l->dx == layer.dx &&
            l->dw == layer.dw && strcmp(l->format, layer.format) == 0)
            return CLI_DONE;
    }
    struct gemm_layer *layers =
        realloc(plan->layers, sizeof *layers * (size_t)(plan->layer_count + 1));
    if (!layers)
        return no_memory();
    plan->layers = layers;
    *place = plan->layer_count++;
    snprintf(layer.name, sizeof layer.name, "layer_%d", *place);
    layers[*place] = layer;
    return CLI_DONE;
}

/* ---- entries --------------------------------------------------------------------------------- */

/* The M to measure for a range; 0: the range is not wanted. */
static int64_t tokens_in(const struct reader *r, int64_t min, int64_t max, int64_t usual)
{
    for (int i = 0; i < r->token_count; i++) {
        if (r->tokens[i] >= min && r->tokens[i] <= max)
            return r->tokens[i];
    }
    if (r->token_count)
        return 0;
    return usual >= min && usual <= max ? usual : max;
}

/* The same problem: its dims, formats, output, accumulation; layers may still differ in other
 * outputs. */
static bool same_gemm(const struct tune_plan *plan, const struct tune_entry *a,
                      const struct tune_entry *b)
{
    const struct gemm_layer *la = &plan->layers[a->layer], *lb = &plan->layers[b->layer];
    return a->pass == b->pass && la->n == lb->n && la->k == lb->k && a->split == b->split &&
           a->accumulate == b->accumulate && strcmp(a->a_dtype, b->a_dtype) == 0 &&
           strcmp(a->b_dtype, b->b_dtype) == 0 && strcmp(a->out_dtype, b->out_dtype) == 0;
}

static int add_entry(struct tune_plan *plan, const struct tune_entry *entry)
{
    for (int i = 0; i < plan->count; i++) {
        struct tune_entry *e = &plan->entries[i];
        if (!same_gemm(plan, e, entry) || e->max_tokens < entry->min_tokens ||
            entry->max_tokens < e->min_tokens)
            continue;
        if (entry->max_tokens > e->max_tokens)
            e->max_tokens = entry->max_tokens;
        if (entry->min_tokens < e->min_tokens)
            e->min_tokens = entry->min_tokens;
        return CLI_DONE;
    }
    struct tune_entry *entries =
        realloc(plan->entries, sizeof *entries * (size_t)(plan->count + 1));
    if (!entries)
        return no_memory();
    plan->entries = entries;
    entries[plan->count++] = *entry;
    return CLI_DONE;
}

static int read_step(struct reader *r, const json_t *record, int layer, fp8_pass pass)
{
    const json_t *step = plan_gemm_step(record, fp8_pass_name(pass));
    bool accumulates = json_is_string(json_object_get(json_object_get(step, "args"), "accumulate"));
    const char *accumulation = plan_text(step, "accumulation");
    int code = CLI_DONE;
    size_t index;
    json_t *range;
    if (strcmp(accumulation, "fast") != 0 && strcmp(accumulation, "split") != 0) {
        return add_note(r->plan,
                        "layer '%s', %s: not measured, tuning knows no interval of accumulation",
                        plan_text(record, "name"), fp8_pass_name(pass));
    }
    json_array_foreach(json_object_get(step, "dispatch"), index, range)
    {
        struct tune_entry e = { .layer = layer,
                                .pass = pass,
                                .split = strcmp(accumulation, "split") == 0,
                                .min_tokens = plan_integer(range, "min_tokens"),
                                .max_tokens = plan_integer(range, "max_tokens"),
                                .seconds = -1,
                                .generated_seconds = -1,
                                .cublaslt_seconds = -1,
                                .bf16_seconds = -1 };
        snprintf(e.a_dtype, sizeof e.a_dtype, "%s", plan_text(step, "a_dtype"));
        snprintf(e.b_dtype, sizeof e.b_dtype, "%s", plan_text(step, "b_dtype"));
        snprintf(e.out_dtype, sizeof e.out_dtype, "%s", plan_text(step, "out_dtype"));
        e.measured_tokens =
            tokens_in(r, e.min_tokens, e.max_tokens, plan_integer(record, "tokens"));
        if (e.measured_tokens == 0)
            continue;
        if (r->plan->layers[layer].max_m < e.measured_tokens)
            r->plan->layers[layer].max_m = e.measured_tokens;
        for (int i = 0; !code && i <= accumulates; i++) {
            e.accumulate = i == 1;
            code = add_entry(r->plan, &e);
        }
    }
    return code;
}

/* Tuning is of products with one scale a tensor: cuBLASLt alone computes the others. */
static bool is_tunable(const json_t *record)
{
    const json_t *step = plan_gemm_step(record, "fprop");
    return strcmp(plan_text(step, "a_scaling"), "tensor") == 0 &&
           strcmp(plan_text(step, "b_scaling"), "tensor") == 0;
}

static int read_layers(struct reader *r, const json_t *layers, const char *only)
{
    static const fp8_pass passes[] = { FP8_PASS_FPROP, FP8_PASS_WGRAD, FP8_PASS_DGRAD };
    bool found = false;
    int code = CLI_DONE;
    size_t index;
    json_t *record;
    json_array_foreach((json_t *)layers, index, record)
    {
        int place = 0;
        if (code || (only && strcmp(plan_text(record, "name"), only) != 0))
            continue;
        found = true;
        if (!is_tunable(record)) {
            code = add_note(r->plan,
                            "layer '%s' has nothing to tune: its products are not of FP8 with one "
                            "scale a tensor",
                            plan_text(record, "name"));
            continue;
        }
        code = add_layer(r->plan, record, &place);
        for (int i = 0; !code && i < 3; i++)
            code = read_step(r, record, place, passes[i]);
    }
    return code || found ? code : plan_unknown_layer(layers, only);
}

int tune_plan_read(struct tune_plan *plan, const json_t *json, const char *only,
                   const int64_t *tokens, int count)
{
    struct reader r = { plan, tokens, count };
    int code = read_layers(&r, json_object_get(json, "layers"), only);
    if (!code && plan->count == 0 && plan->layer_count > 0) {
        cli_error("no GEMM has a range that holds the tokens of --tokens");
        cli_hint("the ranges end at the spec's max_tokens");
        return CLI_USAGE;
    }
    if (!code && plan->count == 0) {
        tune_plan_notes(plan);
        cli_error("the spec has no GEMM that can be tuned");
        return CLI_USAGE;
    }
    return code;
}

void tune_plan_notes(const struct tune_plan *plan)
{
    size_t index;
    json_t *note;
    json_array_foreach(plan->notes, index, note) cli_note("%s", json_string_value(note));
}

void tune_plan_destroy(struct tune_plan *plan)
{
    json_decref(plan->notes);
    for (int i = 0; i < plan->count; i++) {
        json_decref(plan->entries[i].config);
        free(plan->entries[i].measured);
    }
    free(plan->entries);
    free(plan->layers);
    memset(plan, 0, sizeof *plan);
}

double tune_flops(const struct tune_plan *plan, const struct tune_entry *entry)
{
    const struct gemm_layer *layer = &plan->layers[entry->layer];
    return 2.0 * (double)entry->measured_tokens * (double)layer->n * (double)layer->k;
}
