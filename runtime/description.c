/*
 * description.c - a layer's description: checked, its defaults filled in, compared.
 *
 * In: the struct that a caller filled. Out: the same with nothing left to defaults, so that equal
 * ones are equal field by field; and whether a layer of a bundle is what a description says.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "runtime/internal.h"

/* ---- checks ---- */

enum { MOST_EXTENT = 1 << 28, MOST_HISTORY = 65536 }; /* as a spec has them */

static fp8_status check_struct(const char *call, const fp8_layer_description *d)
{
    if (!d)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: description is NULL", call);
    if (d->size != sizeof *d)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: description->size is %u, this library's is %zu; start from "
                        "FP8_LAYER_DESCRIPTION_INIT",
                        call, d->size, sizeof *d);
    if (d->arch || d->reserved[0] || d->reserved[1] || d->reserved[2] || d->reserved[3])
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: arch and reserved fields must be 0", call);
    return FP8_OK;
}

/* A spec has fields of its own: none here has an effect beside it. */
static fp8_status check_spec(const char *call, const fp8_layer_description *d)
{
    fp8_layer_description plain = FP8_LAYER_DESCRIPTION_INIT;
    plain.spec = d->spec;
    plain.layer = d->layer;
    if (fp8_description_equal(d, &plain))
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT,
                    "%s: give a spec or the fields of a layer; the spec has fields of its own",
                    call);
}

static fp8_status check_numbers(const char *call, const fp8_layer_description *d)
{
    static const char extent[] = "pass the features of the layer";
    static const char tokens[] = "pass the rows of x in one call, 0 for those of the other field";
    static const char sums[] = "pass FP8_ACCUMULATION_DEFAULT, _FAST, _SPLIT, _256 or _512";
    static const char flag[] = "pass 0 or 1";
    const struct
    { /* enumerations and flags as signed numbers: -1 is shown as the caller wrote it */
        const char *name;
        int64_t value, least, most;
        const char *remedy;
    } numbers[] = {
        { "in_features", d->in_features, 1, MOST_EXTENT, extent },
        { "out_features", d->out_features, 1, MOST_EXTENT, extent },
        { "tokens", d->tokens, 0, MOST_EXTENT, tokens },
        { "max_tokens", d->max_tokens, 0, MOST_EXTENT, tokens },
        { "has_bias", (int32_t)d->has_bias, 0, 1, flag },
        { "fprop", (int32_t)d->fprop, 0, FP8_ACCUMULATION_COUNT - 1, sums },
        { "dgrad", (int32_t)d->dgrad, 0, FP8_ACCUMULATION_COUNT - 1, sums },
        { "wgrad", (int32_t)d->wgrad, 0, FP8_ACCUMULATION_COUNT - 1, sums },
        { "power_of_two", (int32_t)d->power_of_two, 0, FP8_OFF, "pass FP8_DEFAULT, _ON or _OFF" },
        { "history_length", d->history_length, 0, MOST_HISTORY,
          "pass the optimizer steps that are kept, 0 for 1024" },
        { "margin", d->margin, 0, FP8_MOST_MARGIN, "pass powers of two of room above the amax" },
        { "calibrate", (int32_t)d->calibrate, 0, 1, flag },
        { "shards", (int32_t)d->shards, 0, 1, flag },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (numbers[i].value < numbers[i].least || numbers[i].value > numbers[i].most)
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "%s: %s is %" PRId64 ", not in %" PRId64 "..%" PRId64 "; %s", call,
                            numbers[i].name, numbers[i].value, numbers[i].least, numbers[i].most,
                            numbers[i].remedy);
    }
    if ((!d->tokens && !d->max_tokens) || (d->max_tokens && d->tokens > d->max_tokens))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: tokens is %" PRId64 " and max_tokens is %" PRId64
                        "; one of them is at least 1, and tokens is not above max_tokens",
                        call, d->tokens, d->max_tokens);
    return FP8_OK;
}

static fp8_status check_dtypes(const char *call, const fp8_layer_description *d)
{
    const struct {
        const char *name;
        fp8_dtype dtype;
        bool has_half;
    } dtypes[] = { { "w_dtype", d->w_dtype, false },
                   { "y_dtype", d->y_dtype, true },
                   { "dx_dtype", d->dx_dtype, true },
                   { "dw_dtype", d->dw_dtype, true } };
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        const fp8_dtype dtype = dtypes[i].dtype;
        if (dtype != FP8_DTYPE_NONE && dtype != FP8_DTYPE_BF16 && dtype != FP8_DTYPE_FP32 &&
            !(dtypes[i].has_half && dtype == FP8_DTYPE_FP16))
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "%s: %s is %d (%s); pass FP8_DTYPE_BF16, %s_FP32 or, for the default, "
                            "_NONE",
                            call, dtypes[i].name, (int)dtype, fp8_dtype_name(dtype),
                            dtypes[i].has_half ? "_FP16, " : "");
    }
    return FP8_OK;
}

/* The word's place in the list; -1: NULL, the default. */
static fp8_status check_word(const char *call, const char *name, const char *word,
                             const char *const *words, int count, int *place)
{
    char list[128] = "";
    *place = -1;
    if (!word)
        return FP8_OK;
    for (int i = 0; i < count; i++) {
        if (strcmp(word, words[i]) == 0)
            *place = i;
        const size_t end = strlen(list);
        snprintf(list + end, sizeof list - end, "%s\"%s\"", i ? ", " : "", words[i]);
    }
    if (*place >= 0)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is \"%.60s\"; pass one of the words %s, or NULL",
                    call, name, word, list);
}

/* What a recipe has not, or does not leave to choose. */
static fp8_status check_recipe(const char *call, const fp8_layer_description *d,
                               enum fp8_recipe_kind kind)
{
    const bool is_delayed = kind == FP8_RECIPE_DELAYED;
    const char *name = fp8_recipe_names[kind];
    if (d->format && strcmp(d->format, "hybrid") == 0 && !is_delayed && kind != FP8_RECIPE_CURRENT)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: format is \"hybrid\", but recipe \"%s\" is of e4m3 alone; pass \"e4m3\" "
            "or NULL",
            call, name);
    if (!is_delayed && (d->history_length || d->algo || d->margin || d->calibrate))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: %s is given, but recipe \"%s\" keeps no history; leave it 0, or pass "
                        "recipe \"delayed\"",
                        call,
                        d->history_length ? "history_length"
                        : d->algo         ? "algo"
                        : d->margin       ? "margin"
                                          : "calibrate",
                        name);
    const bool is_block = kind == FP8_RECIPE_BLOCK;
    const struct {
        const char *pass;
        fp8_accumulation given;
        bool is_fixed;
    } sums[] = { { "fprop", d->fprop, is_block },
                 { "dgrad", d->dgrad, is_block },
                 { "wgrad", d->wgrad, is_block || kind == FP8_RECIPE_ROWWISE_HP_WGRAD } };
    for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
        if (sums[i].is_fixed && sums[i].given != FP8_ACCUMULATION_DEFAULT &&
            sums[i].given != FP8_ACCUMULATION_SPLIT)
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "%s: %s is %d, but with recipe \"%s\" its sums are always split; pass "
                            "FP8_ACCUMULATION_DEFAULT",
                            call, sums[i].pass, (int)sums[i].given, name);
    }
    return FP8_OK;
}

fp8_status fp8_description_check(const char *call, const fp8_layer_description *d)
{
    static const char *const formats[] = { "hybrid", "e4m3" };
    static const char *const computes[] = { "fp8", "bf16" };
    static const char *const algos[] = { "max", "most_recent" };
    int compute, recipe, any;
    FP8_TRY(check_struct(call, d));
    if (d->spec)
        return check_spec(call, d);
    if (d->layer)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: layer is \"%.60s\", which names a layer of a spec, but spec is NULL; "
                        "give the spec too, or pass NULL",
                        call, d->layer);
    FP8_TRY(check_numbers(call, d));
    FP8_TRY(check_dtypes(call, d));
    FP8_TRY(check_word(call, "compute", d->compute, computes, 2, &compute));
    FP8_TRY(check_word(call, "recipe", d->recipe, fp8_recipe_names, FP8_RECIPE_COUNT, &recipe));
    FP8_TRY(check_word(call, "format", d->format, formats, 2, &any));
    FP8_TRY(check_word(call, "algo", d->algo, algos, 2, &any));
    if (compute == 1)
        return FP8_OK; /* a layer in bf16 has none of what follows */
    return check_recipe(call, d, recipe < 0 ? FP8_RECIPE_CURRENT : (enum fp8_recipe_kind)recipe);
}

/* ---- defaults ---- */

static fp8_accumulation or_default(fp8_accumulation value, fp8_accumulation otherwise)
{
    return value == FP8_ACCUMULATION_DEFAULT ? otherwise : value;
}

static fp8_dtype dtype_or(fp8_dtype dtype, fp8_dtype otherwise)
{
    return dtype == FP8_DTYPE_NONE ? otherwise : dtype;
}

/* The defaults of the recipe; what it does not have is left out. */
static void fill_recipe(fp8_layer_description *d)
{
    bool is_bf16 = strcmp(d->compute, "bf16") == 0;
    bool is_delayed = !is_bf16 && strcmp(d->recipe, "delayed") == 0;
    bool is_tensor = is_delayed || strcmp(d->recipe, "current") == 0;
    bool is_block = strcmp(d->recipe, "block") == 0;
    if (is_bf16) {
        d->recipe = "current";
        d->format = NULL;
        d->power_of_two = FP8_DEFAULT;
        d->fprop = d->dgrad = d->wgrad = FP8_ACCUMULATION_DEFAULT;
    } else {
        d->format = d->format ? d->format : is_tensor ? "hybrid" : "e4m3";
        if (d->power_of_two == FP8_DEFAULT)
            d->power_of_two = is_tensor ? FP8_OFF : FP8_ON;
        d->fprop = or_default(d->fprop, is_block ? FP8_ACCUMULATION_SPLIT : FP8_ACCUMULATION_FAST);
        d->dgrad = or_default(d->dgrad, FP8_ACCUMULATION_SPLIT);
        d->wgrad = or_default(d->wgrad, FP8_ACCUMULATION_SPLIT);
    }
    d->history_length = !is_delayed ? 0 : d->history_length ? d->history_length : 1024;
    d->algo = !is_delayed ? NULL : d->algo ? d->algo : "max";
    d->margin = is_delayed ? d->margin : 0;
    d->calibrate = is_delayed ? d->calibrate : 0;
}

fp8_layer_description fp8_description_fill(const fp8_layer_description *given)
{
    fp8_layer_description d = *given;
    if (d.spec)
        return d;
    d.tokens = given->tokens ? given->tokens : given->max_tokens;
    d.max_tokens = given->max_tokens ? given->max_tokens : given->tokens;
    d.has_bias = given->has_bias != 0;
    d.w_dtype = dtype_or(d.w_dtype, FP8_DTYPE_BF16);
    d.y_dtype = dtype_or(d.y_dtype, FP8_DTYPE_BF16);
    d.dx_dtype = dtype_or(d.dx_dtype, FP8_DTYPE_BF16);
    d.dw_dtype = dtype_or(d.dw_dtype, FP8_DTYPE_FP32);
    d.compute = d.compute ? d.compute : "fp8";
    d.recipe = d.recipe ? d.recipe : "current";
    d.layer = NULL; /* a name means nothing without a spec */
    fill_recipe(&d);
    return d;
}

/* ---- comparing ---- */

static bool same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

bool fp8_description_equal(const fp8_layer_description *a, const fp8_layer_description *b)
{
    return a->in_features == b->in_features && a->out_features == b->out_features &&
           a->tokens == b->tokens && a->max_tokens == b->max_tokens && a->has_bias == b->has_bias &&
           a->w_dtype == b->w_dtype && a->y_dtype == b->y_dtype && a->dx_dtype == b->dx_dtype &&
           a->dw_dtype == b->dw_dtype && a->fprop == b->fprop && a->dgrad == b->dgrad &&
           a->wgrad == b->wgrad && a->power_of_two == b->power_of_two &&
           a->history_length == b->history_length && a->margin == b->margin &&
           a->calibrate == b->calibrate && a->shards == b->shards &&
           same_text(a->compute, b->compute) && same_text(a->algo, b->algo) &&
           same_text(a->recipe, b->recipe) && same_text(a->format, b->format) &&
           same_text(a->layer, b->layer) && same_text(a->spec, b->spec);
}

const char *fp8_description_name(const fp8_layer_description *d, char text[128])
{
    if (d->spec)
        snprintf(text, 128, "layer %.60s of the spec", d->layer ? d->layer : "1");
    else
        snprintf(text, 128, "layer of %" PRId64 " in_features, %" PRId64 " out_features",
                 d->in_features, d->out_features);
    return text;
}

/* ---- does a layer of a bundle fit? ---- */

static bool fits_accumulation(const struct fp8_layer_plan *plan, fp8_pass pass,
                              fp8_accumulation accumulation)
{
    const struct fp8_pass_plan *steps = &plan->passes[pass];
    return steps->gemm < steps->step_count &&
           steps->steps[steps->gemm].gemm->accumulation == accumulation;
}

static bool fits_format(const struct fp8_layer_plan *plan, const char *format)
{
    fp8_dtype dy = strcmp(format, "hybrid") == 0 ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    return (strcmp(format, "hybrid") == 0 || strcmp(format, "e4m3") == 0) &&
           plan->formats[FP8_ROLE_W] == FP8_DTYPE_E4M3 && plan->formats[FP8_ROLE_DY] == dy;
}

static bool fits_recipe(const struct fp8_layer_plan *plan, const fp8_layer_description *d)
{
    const struct fp8_recipe *recipe = &plan->recipe;
    bool is_bf16 = strcmp(d->compute, "bf16") == 0;
    if (plan->is_bf16 || is_bf16)
        return plan->is_bf16 == is_bf16;
    if (strcmp(fp8_recipe_names[recipe->kind], d->recipe) != 0 || !fits_format(plan, d->format) ||
        recipe->power_of_two != (d->power_of_two == FP8_ON) || plan->shard.own_scales)
        return false;
    if (recipe->kind == FP8_RECIPE_DELAYED &&
        (recipe->history_length != d->history_length || recipe->margin != d->margin ||
         recipe->calibrate != (d->calibrate != 0) ||
         recipe->most_recent != (strcmp(d->algo, "most_recent") == 0)))
        return false;
    return fits_accumulation(plan, FP8_PASS_FPROP, d->fprop) &&
           fits_accumulation(plan, FP8_PASS_DGRAD, d->dgrad) &&
           fits_accumulation(plan, FP8_PASS_WGRAD, d->wgrad);
}

bool fp8_description_fits(const struct fp8_layer_plan *plan, const fp8_layer_description *d)
{
    return plan->in_features == d->in_features && plan->out_features == d->out_features &&
           plan->max_tokens >= d->max_tokens && plan->has_bias == (d->has_bias != 0) &&
           (!d->shards || plan->shard.ranks > 1) && fits_recipe(plan, d) &&
           fp8_slot_dtype(plan, FP8_SLOT_W) == d->w_dtype &&
           fp8_slot_dtype(plan, FP8_SLOT_Y) == d->y_dtype &&
           fp8_slot_dtype(plan, FP8_SLOT_DX) == d->dx_dtype &&
           fp8_slot_dtype(plan, FP8_SLOT_DW) == d->dw_dtype;
}
