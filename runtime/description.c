/*
 * description.c - a layer's description: checked, its defaults filled in, compared.
 *
 * In: the struct that a caller filled. Out: the same with nothing left to defaults, so that equal ones
 * are equal field by field; and whether a layer of a bundle is what a description says.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "runtime/internal.h"

fp8_status fp8_description_check(const char *call, const fp8_layer_description *d)
{
    if (!d)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: description is NULL", call);
    if (d->size != sizeof *d)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: description->size is %u, this library's is %zu; start from "
                        "FP8_LAYER_DESCRIPTION_INIT",
                        call, d->size, sizeof *d);
    if (d->arch || d->reserved0 || d->reserved[0] || d->reserved[1] || d->reserved[2] ||
        d->reserved[3])
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: arch and reserved fields must be 0", call);
    if (d->spec && (d->in_features || d->out_features || d->tokens || d->max_tokens))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: give a spec or the fields of a layer; the spec has fields of its own",
                        call);
    if (!d->spec && (d->in_features < 1 || d->out_features < 1))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: in_features is %" PRId64 " and out_features is %" PRId64
                        "; both are at least 1",
                        call, d->in_features, d->out_features);
    if (!d->spec && (d->tokens < 0 || d->max_tokens < 0 || (!d->tokens && !d->max_tokens) ||
                     (d->max_tokens && d->tokens > d->max_tokens)))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: tokens is %" PRId64 " and max_tokens is %" PRId64
                        "; one of them is at least 1, and tokens is not above max_tokens",
                        call, d->tokens, d->max_tokens);
    if ((unsigned)d->power_of_two > FP8_OFF || d->calibrate > 1 || d->history_length < 0 ||
        d->margin < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: power_of_two is %d, calibrate %u, history_length %" PRId64
                        ", margin %d; pass FP8_DEFAULT, FP8_ON or FP8_OFF, 0 or 1, and no negative "
                        "numbers",
                        call, (int)d->power_of_two, d->calibrate, d->history_length, d->margin);
    return FP8_OK;
}

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

/* The same description with nothing left to defaults, so that equal ones are equal field by field. */
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
           a->calibrate == b->calibrate && same_text(a->compute, b->compute) &&
           same_text(a->algo, b->algo) && same_text(a->recipe, b->recipe) &&
           same_text(a->format, b->format) && same_text(a->layer, b->layer) &&
           same_text(a->spec, b->spec);
}

/* "layer 4096 x 14336 (K x N)" into text; returns text. */
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

static bool fits_dtype(const struct fp8_layer_plan *plan, enum fp8_slot slot, fp8_dtype dtype)
{
    return plan->slots[slot] >= 0 && plan->buffers[plan->slots[slot]].dtype == dtype;
}

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
        recipe->power_of_two != (d->power_of_two == FP8_ON))
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
           fits_recipe(plan, d) && fits_dtype(plan, FP8_SLOT_W, d->w_dtype) &&
           fits_dtype(plan, FP8_SLOT_Y, d->y_dtype) && fits_dtype(plan, FP8_SLOT_DX, d->dx_dtype) &&
           fits_dtype(plan, FP8_SLOT_DW, d->dw_dtype);
}
