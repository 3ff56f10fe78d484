/*
 * manifest_layer.c - one layer record of a manifest: numbers, recipe, lists of steps.
 *
 * In: the JSON record and the kernels read before it. Out: a fp8_layer_plan. The recipe says which
 * copies the operands have and how these are scaled; everything else in the record must agree with
 * it. Buffers are read in manifest_buffers.c, steps in manifest_steps.c; what the steps do with the
 * buffers is checked in plan_check.c.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/json_read.h"

static const int64_t extent_limit = FP8_MANIFEST_EXTENT_LIMIT;

/* ---- passes ---- */

static fp8_status read_passes(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              const json_t *record, struct fp8_layer_plan *plan)
{
    static const char *const keys[] = { "weight", "fprop", "quantize_dy", "wgrad", "dgrad", NULL };
    const json_t *passes;
    FP8_TRY(fp8_read_object(reader, record, "passes", &passes));
    size_t mark = fp8_read_enter(reader, "passes");
    FP8_TRY(fp8_read_keys(reader, passes, keys));
    for (int i = 0; i < FP8_PASS_COUNT; i++)
        FP8_TRY(fp8_manifest_steps(reader, manifest, plan, passes, fp8_pass_name((fp8_pass)i),
                                   (fp8_pass)i));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

static fp8_status read_given(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                             const json_t *record, struct fp8_layer_plan *plan)
{
    static const char *const keys[] = { "x", "w", "dy", NULL };
    const json_t *object;
    if (json_is_null(json_object_get(record, "given")))
        return FP8_OK;
    FP8_TRY(fp8_read_object(reader, record, "given", &object));
    size_t mark = fp8_read_enter(reader, "given");
    FP8_TRY(fp8_read_keys(reader, object, keys));
    if (plan->scalings[FP8_ROLE_X][FP8_ROW_COPY] != FP8_SCALING_TENSOR)
        return fp8_read_bad(reader, "an amax may be given to recipes of tensor scaling only");
    for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++)
        FP8_TRY(fp8_manifest_steps(reader, manifest, plan, object, fp8_role_names[role],
                                   fp8_given_pass((fp8_role)role)));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

static fp8_status read_dequantize_kernel(struct fp8_reader *reader,
                                         const struct fp8_manifest *manifest, const json_t *object,
                                         fp8_dtype format, fp8_scaling scaling,
                                         const struct fp8_kernel **kernel)
{
    char key[32];
    snprintf(key, sizeof key, "%s_%s", fp8_dtype_name(format), fp8_scaling_names[scaling]);
    FP8_TRY(fp8_manifest_kernel_named(reader, manifest, object, key, FP8_OP_DEQUANTIZE, kernel));
    const fp8_semantics *how = &(*kernel)->semantics;
    if (how->source_dtype != format || how->target_dtype != FP8_DTYPE_FP32 ||
        how->scaling != scaling)
        return fp8_read_bad(reader, "kernel '%.100s' does not turn %s of scaling %s into fp32",
                            (*kernel)->name, fp8_dtype_name(format), fp8_scaling_names[scaling]);
    return FP8_OK;
}

static fp8_status read_dequantize(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                  const json_t *record, struct fp8_layer_plan *plan)
{
    static const char *const keys[] = { "e4m3_tensor", "e4m3_row",    "e4m3_block",
                                        "e4m3_tile",   "e5m2_tensor", NULL };
    const json_t *object;
    FP8_TRY(fp8_read_object(reader, record, "dequantize", &object));
    size_t mark = fp8_read_enter(reader, "dequantize");
    FP8_TRY(fp8_read_keys(reader, object, keys));
    for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++) {
        fp8_dtype format = plan->formats[role];
        for (int copy = 0; copy < FP8_COPY_COUNT; copy++) {
            fp8_scaling scaling = plan->scalings[role][copy];
            if (scaling != FP8_SCALING_NONE)
                FP8_TRY(
                    read_dequantize_kernel(reader, manifest, object, format, scaling,
                                           &plan->dequantize[format == FP8_DTYPE_E5M2][scaling]));
        }
    }
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

/* transpose and roll: there, or not, as the recipe says. */
static fp8_status read_extra_kernels(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                     const json_t *record, struct fp8_layer_plan *plan)
{
    bool transposes = fp8_plan_transposes(plan, FP8_ROLE_W);
    const json_t *transpose = json_object_get(record, "transpose");
    if (!json_is_null(transpose) && !transposes)
        return fp8_read_bad(reader, "'transpose' is not null, but the copies of w have scales of "
                                    "their own");
    if (!json_is_null(transpose))
        FP8_TRY(fp8_manifest_kernel_named(reader, manifest, record, "transpose", FP8_OP_TRANSPOSE,
                                          &plan->transpose));
    bool rolls = plan->recipe.kind == FP8_RECIPE_DELAYED && !plan->is_bf16;
    if (!rolls && json_object_get(record, "roll"))
        return fp8_read_bad(reader, "'roll' belongs to recipe 'delayed'");
    return rolls ? fp8_manifest_kernel_named(reader, manifest, record, "roll", FP8_OP_ROLL,
                                             &plan->roll)
                 : FP8_OK;
}

/* ---- the layer ---- */

const char *const fp8_recipe_names[FP8_RECIPE_COUNT] = { "current", "delayed", "rowwise",
                                                         "rowwise_hp_wgrad", "block" };

const char *fp8_plan_pass_name(fp8_pass pass)
{
    static const char *const given[] = { "given x", "given w", "given dy" };
    return (int)pass >= FP8_PASS_COUNT && (int)pass < FP8_PLAN_COUNT
               ? given[(int)pass - FP8_PASS_COUNT]
               : fp8_pass_name(pass);
}

/* How the operands' copies are scaled, by recipe: of x, w, dy the row and the transposed copy. */
static void set_scalings(struct fp8_layer_plan *plan)
{
    enum { TENSOR, ROW, BLOCK, TILE, NONE };
    static const uint8_t table[FP8_RECIPE_COUNT][FP8_ROLE_DY][FP8_COPY_COUNT] = {
        [FP8_RECIPE_CURRENT] = { { TENSOR, TENSOR }, { TENSOR, TENSOR }, { TENSOR, TENSOR } },
        [FP8_RECIPE_DELAYED] = { { TENSOR, TENSOR }, { TENSOR, TENSOR }, { TENSOR, TENSOR } },
        [FP8_RECIPE_ROWWISE] = { { ROW, ROW }, { ROW, ROW }, { ROW, ROW } },
        [FP8_RECIPE_ROWWISE_HP_WGRAD] = { { ROW, NONE }, { ROW, TENSOR }, { ROW, NONE } },
        [FP8_RECIPE_BLOCK] = { { BLOCK, BLOCK }, { TILE, TILE }, { BLOCK, BLOCK } },
    };
    for (int role = 0; role < FP8_ROLE_COUNT; role++) {
        for (int copy = 0; copy < FP8_COPY_COUNT; copy++)
            plan->scalings[role][copy] =
                role == FP8_ROLE_NONE || plan->is_bf16
                    ? FP8_SCALING_NONE
                    : (fp8_scaling)table[plan->recipe.kind][role - 1][copy];
    }
    if (plan->shard.own_scales) {
        plan->scalings[FP8_ROLE_W][FP8_ROW_COPY] = FP8_SCALING_ROW;
        plan->scalings[FP8_ROLE_W][FP8_TRANSPOSED_COPY] = FP8_SCALING_TILE;
    }
}

static fp8_status read_history(struct fp8_reader *reader, const json_t *object,
                               struct fp8_recipe *recipe)
{
    static const char *const algorithms[] = { "max", "most_recent" };
    static const char *const groups[] = { "rank", "fsdp" };
    int word = 0, group = 0;
    int64_t margin = 0;
    FP8_TRY(fp8_read_integer(reader, object, "history_length", 1, 65536, &recipe->history_length));
    FP8_TRY(fp8_read_word(reader, object, "algo", algorithms, 2, &word));
    recipe->most_recent = word == 1;
    FP8_TRY(fp8_read_word(reader, object, "amax_group", groups, 2, &group));
    recipe->shares_amaxes = group == 1;
    FP8_TRY(fp8_read_integer(reader, object, "margin", 0, FP8_MOST_MARGIN, &margin));
    recipe->margin = (int32_t)margin;
    return fp8_read_bool(reader, object, "calibrate", &recipe->calibrate);
}

static fp8_status read_recipe(struct fp8_reader *reader, const json_t *record,
                              struct fp8_layer_plan *plan)
{
    static const char *const keys[] = { "name", "format", "power_of_two", NULL };
    static const char *const current_keys[] = { "name", "format", "power_of_two", "weight_scale",
                                                NULL };
    static const char *const delayed_keys[] = { "name",           "format",     "power_of_two",
                                                "history_length", "algo",       "margin",
                                                "calibrate",      "amax_group", NULL };
    static const char *const formats[] = { "hybrid", "e4m3" };
    static const char *const scales[] = { "tensor", "shard" };
    struct fp8_recipe *recipe = &plan->recipe;
    const json_t *object;
    int word = 0;
    FP8_TRY(fp8_read_object(reader, record, "recipe", &object));
    size_t mark = fp8_read_enter(reader, "recipe");
    FP8_TRY(fp8_read_word(reader, object, "name", fp8_recipe_names, FP8_RECIPE_COUNT, &word));
    recipe->kind = (enum fp8_recipe_kind)word;
    bool is_delayed = recipe->kind == FP8_RECIPE_DELAYED;
    bool is_current = recipe->kind == FP8_RECIPE_CURRENT;
    FP8_TRY(fp8_read_keys(reader, object,
                          is_delayed   ? delayed_keys
                          : is_current ? current_keys
                                       : keys));
    FP8_TRY(fp8_read_word(reader, object, "format", formats, 2, &word));
    recipe->is_hybrid = word == 0;
    if (recipe->is_hybrid && !is_delayed && !is_current)
        return fp8_read_bad(reader, "format 'hybrid' is not for recipe '%s'",
                            fp8_recipe_names[recipe->kind]);
    FP8_TRY(fp8_read_bool(reader, object, "power_of_two", &recipe->power_of_two));
    if (is_delayed)
        FP8_TRY(read_history(reader, object, recipe));
    word = 0;
    if (is_current)
        FP8_TRY(fp8_read_word(reader, object, "weight_scale", scales, 2, &word));
    recipe->by_shard = word == 1;
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

static fp8_status read_accumulation(struct fp8_reader *reader, const json_t *record)
{
    static const char *const keys[] = { "fprop", "dgrad", "wgrad", NULL };
    const json_t *object;
    int word = 0;
    FP8_TRY(fp8_read_object(reader, record, "accumulation", &object));
    FP8_TRY(fp8_read_keys(reader, object, keys));
    for (int i = 0; keys[i]; i++)
        FP8_TRY(fp8_read_word(reader, object, keys[i], fp8_accumulation_names + 1,
                              FP8_ACCUMULATION_COUNT - 1, &word));
    return FP8_OK;
}

fp8_status fp8_manifest_layer(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              const json_t *record, struct fp8_layer_plan *plan)
{
    static const char *const keys[] = { "name",       "in_features", "out_features", "tokens",
                                        "max_tokens", "count",       "recipe",       "compute",
                                        "bias",       "passes",      "buffers",      "accumulation",
                                        "dequantize", "given",       "transpose",    "roll",
                                        "shard",      NULL };
    static const char *const computes[] = { "fp8", "bf16" };
    int64_t count;
    int compute = 0;
    FP8_TRY(fp8_read_keys(reader, record, keys));
    FP8_TRY(fp8_read_string(reader, record, "name", &plan->name));
    FP8_TRY(fp8_read_integer(reader, record, "in_features", 1, extent_limit, &plan->in_features));
    FP8_TRY(fp8_read_integer(reader, record, "out_features", 1, extent_limit, &plan->out_features));
    FP8_TRY(fp8_read_integer(reader, record, "max_tokens", 1, extent_limit, &plan->max_tokens));
    FP8_TRY(fp8_read_integer(reader, record, "tokens", 1, plan->max_tokens, &plan->tokens));
    FP8_TRY(fp8_read_integer(reader, record, "count", 1, extent_limit, &count));
    FP8_TRY(fp8_read_word(reader, record, "compute", computes, 2, &compute));
    plan->is_bf16 = compute == 1;
    FP8_TRY(fp8_read_bool(reader, record, "bias", &plan->has_bias));
    FP8_TRY(read_recipe(reader, record, plan));
    FP8_TRY(fp8_manifest_shard(reader, manifest, record, plan));
    FP8_TRY(read_accumulation(reader, record));
    set_scalings(plan);
    FP8_TRY(fp8_manifest_buffers(reader, record, plan));
    FP8_TRY(read_passes(reader, manifest, record, plan));
    FP8_TRY(read_given(reader, manifest, record, plan));
    FP8_TRY(read_dequantize(reader, manifest, record, plan));
    FP8_TRY(read_extra_kernels(reader, manifest, record, plan));
    return fp8_plan_check(reader->path, plan);
}
