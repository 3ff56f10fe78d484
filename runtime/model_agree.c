/*
 * model_agree.c - the models of all ranks, compared before the first collective on weights.
 *
 * In: a planned model. Out: agreement, or which field of which layer differs and how. Compared is
 * what makes ranks issue the same collectives on bytes of the same meaning: the order, names and
 * shapes of the layers, how they are cut and grouped, every option of their recipes and formats,
 * accumulations, dtypes, and the options of the model. One text holds for all of it; only where it
 * differs are the fields compared one by one, which all ranks do alike.
 *
 * Left out is what a rank may have to itself: tokens and max_tokens (its batch), the GPU and the
 * kernels for it, comm_sms, hooks on outputs and their gradients, traces.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "runtime/model.h"

enum { MOST_FIELDS = 48, VALUE = FP8_MODEL_NAME, WHAT = FP8_COMM_LABEL };

struct field {
    const char *name;
    char value[VALUE];
};

struct fields {
    int count;
    struct field field[MOST_FIELDS];
};

static void add_text(struct fields *fields, const char *name, const char *value)
{
    struct field *field = &fields->field[fields->count++];
    field->name = name;
    snprintf(field->value, sizeof field->value, "%s", value);
}

static void add(struct fields *fields, const char *name, int64_t value)
{
    char text[VALUE];
    snprintf(text, sizeof text, "%" PRId64, value);
    add_text(fields, name, text);
}

/* ---- what is compared ---- */

static void add_dtypes(struct fields *fields, const struct fp8_layer_plan *plan)
{
    static const struct {
        enum fp8_slot slot;
        const char *name;
    } slots[] = { { FP8_SLOT_X, "x_dtype" },       { FP8_SLOT_W, "w_dtype" },
                  { FP8_SLOT_BIAS, "bias_dtype" }, { FP8_SLOT_Y, "y_dtype" },
                  { FP8_SLOT_DY, "dy_dtype" },     { FP8_SLOT_DX, "dx_dtype" },
                  { FP8_SLOT_DW, "dw_dtype" },     { FP8_SLOT_DBIAS, "dbias_dtype" } };
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++) {
        add_text(fields, slots[i].name, fp8_dtype_name(fp8_slot_dtype(plan, slots[i].slot)));
    }
    add_text(fields, "x_format", fp8_dtype_name(plan->formats[FP8_ROLE_X]));
    add_text(fields, "w_format", fp8_dtype_name(plan->formats[FP8_ROLE_W]));
    add_text(fields, "dy_format", fp8_dtype_name(plan->formats[FP8_ROLE_DY]));
}

static const char *accumulation_of(const struct fp8_layer_plan *plan, fp8_pass pass)
{
    const struct fp8_pass_plan *steps = &plan->passes[pass];
    return steps->gemm < steps->step_count
               ? fp8_accumulation_names[steps->steps[steps->gemm].gemm->accumulation]
               : "none";
}

static void add_recipe(struct fields *fields, const struct fp8_layer_plan *plan)
{
    const struct fp8_recipe *recipe = &plan->recipe;
    add_text(fields, "compute", plan->is_bf16 ? "bf16" : "fp8");
    add_text(fields, "recipe", fp8_recipe_names[recipe->kind]);
    add_text(fields, "format", recipe->is_hybrid ? "hybrid" : "e4m3");
    add(fields, "power_of_two", recipe->power_of_two);
    add(fields, "margin", recipe->margin);
    add(fields, "history_length", recipe->history_length);
    add_text(fields, "algo", recipe->most_recent ? "most_recent" : "max");
    add(fields, "calibrate", recipe->calibrate);
    add_text(fields, "weight_scale", plan->shard.own_scales ? "shard" : "tensor");
    add_text(fields, "amax_group", recipe->shares_amaxes ? "fsdp" : "none");
    add_text(fields, "accumulation of fprop", accumulation_of(plan, FP8_PASS_FPROP));
    add_text(fields, "accumulation of dgrad", accumulation_of(plan, FP8_PASS_DGRAD));
    add_text(fields, "accumulation of wgrad", accumulation_of(plan, FP8_PASS_WGRAD));
}

static void list_layer(const fp8_model *model, int i, struct fields *fields)
{
    const struct fp8_model_weight *weight = &model->weights[i];
    const struct fp8_layer_plan *plan = weight->plan;
    fields->count = 0;
    add_text(fields, "name", weight->name);
    add(fields, "in_features", plan->in_features);
    add(fields, "out_features", plan->out_features);
    add(fields, "bias", plan->has_bias);
    add_dtypes(fields, plan);
    add_recipe(fields, plan);
    add(fields, "group, counted from the first,", weight->group);
    add(fields, "weight hook", weight->is_hooked);
    add(fields, "grad hook", weight->hooks.grad != NULL);
    add(fields, "rows of a shard", weight->shard.chunk);
    add(fields, "bytes of a shard", (int64_t)weight->shard.bytes);
    add(fields, "amaxes of a shard", weight->shard.amaxes);
    add(fields, "bytes of a shard's bias", (int64_t)weight->bias_bytes);
}

static void list_options(const fp8_model *model, const fp8_model_options *options,
                         struct fields *fields)
{
    fields->count = 0;
    add(fields, "slots", model->slot_count);
    add(fields, "groups gathered ahead", model->ahead);
    add(fields, "keep", model->keep);
    add(fields, "average", model->average);
    add(fields, "no_prefetch", !model->prefetch);
    add(fields, "reduce_by", options->reduce_by);
    add(fields, "sums by an exchange", model->exchanges);
    add(fields, "transposed_shards", model->transposed_shards);
}

/* ---- comparing ---- */

static void mix(uint64_t *hash, const struct fields *fields)
{
    for (int i = 0; i < fields->count; i++) {
        const char *at = fields->field[i].value;
        do
            *hash = (*hash ^ (uint8_t)*at) * 0x100000001b3u; /* FNV-1a, the ends too */
        while (*at++);
    }
}

static uint64_t hash_of(const struct fields *fields)
{
    uint64_t hash = 0xcbf29ce484222325u;
    mix(&hash, fields);
    return hash;
}

static fp8_status compare(const fp8_model *model, const struct fields *fields, const char *of)
{
    char what[WHAT];
    for (int i = 0; i < fields->count; i++) {
        snprintf(what, sizeof what, "%s of %s", fields->field[i].name, of);
        FP8_TRY(fp8_comm_agree(model->comm, what, fields->field[i].value));
    }
    return FP8_OK;
}

static fp8_status agree_on_head(const fp8_model *model, const fp8_model_options *options,
                                const char *more, bool *differ)
{
    char text[192];
    snprintf(text, sizeof text, "spec %.64s, %d layers%s", options->hash ? options->hash : "(none)",
             model->weight_count, more);
    return fp8_comm_compare(model->comm, "spec and layers", text, differ);
}

static fp8_status agree_on_layer(const fp8_model *model, int i)
{
    struct fields fields;
    char text[VALUE], of[FP8_MODEL_NAME + 24];
    list_layer(model, i, &fields);
    snprintf(text, sizeof text, "hash %016" PRIx64, hash_of(&fields));
    bool differ;
    fp8_status status = fp8_comm_compare(model->comm, "a layer", text, &differ);
    if (!differ)
        return status;
    /* the names first: what is compared next is called by them */
    snprintf(of, sizeof of, "name of layer %d", i);
    FP8_TRY(fp8_comm_agree(model->comm, of, model->weights[i].name));
    snprintf(of, sizeof of, "layer %d ('%s')", i, model->weights[i].name);
    return compare(model, &fields, of);
}

/* Which field it is; `otherwise` if none is found. */
static fp8_status find_difference(const fp8_model *model, const fp8_model_options *options,
                                  fp8_status otherwise)
{
    struct fields fields;
    bool differ;
    FP8_TRY(agree_on_head(model, options, "", &differ));
    list_options(model, options, &fields);
    FP8_TRY(compare(model, &fields, "the model"));
    for (int i = 0; i < model->weight_count; i++)
        FP8_TRY(agree_on_layer(model, i));
    return otherwise;
}

fp8_status fp8_model_agree(const fp8_model *model, const fp8_model_options *options)
{
    struct fields fields;
    char text[VALUE];
    list_options(model, options, &fields);
    uint64_t hash = hash_of(&fields);
    for (int i = 0; i < model->weight_count; i++) {
        list_layer(model, i, &fields);
        mix(&hash, &fields);
    }
    snprintf(text, sizeof text, ", hash %016" PRIx64, hash);
    bool differ; /* what fails on this rank alone, the others do not look for */
    fp8_status status = agree_on_head(model, options, text, &differ);
    return differ ? find_difference(model, options, status) : status;
}
