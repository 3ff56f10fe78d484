/*
 * provider.c - the provider of a context: a description of a layer becomes the text of a spec.
 *
 * In: the runtime's description. Out: the path of a bundle with such a layer, which jit.c finds or
 * builds. What a description does not say is left out of the text, so that the schema's defaults
 * hold; what it says wrongly is refused by the schema, too, with the names of the fields.
 *
 * Knows both public headers.
 */
#include "gen/cache.h"

#include <inttypes.h>
#include <string.h>

#include "runtime/fp8.h"
#include "runtime/fp8_jit.h"

static const char *dtype_word(fp8_dtype dtype, char word[24])
{
    switch (dtype) {
    case FP8_DTYPE_BF16:
        return "bf16";
    case FP8_DTYPE_FP32:
        return "fp32";
    case FP8_DTYPE_FP16:
        return "fp16";
    default: /* the spec's own check names the choices */
        snprintf(word, 24, "dtype%d", (int)dtype);
        return word;
    }
}

static void put_dtype(struct buf *spec, const char *field, fp8_dtype dtype)
{
    char word[24];
    if (dtype != FP8_DTYPE_NONE)
        buf_printf(spec, "    %s = \"%s\",\n", field, dtype_word(dtype, word));
}

static void put_accumulation(struct buf *spec, const char *pass, fp8_accumulation accumulation)
{
    static const char *const words[] = { NULL, "\"fast\"", "\"split\"", "256", "512" };
    if (accumulation > FP8_ACCUMULATION_DEFAULT && accumulation <= FP8_ACCUMULATION_512)
        buf_printf(spec, " %s = %s,", pass, words[accumulation]);
}

/* Words enter the text of the spec: letters, digits and '_' alone. */
static bool is_word(const char *text)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    return text == NULL || (text[0] != '\0' && strspn(text, letters) == strlen(text));
}

/* What is not said is the recipe's default. */
static void put_recipe(struct buf *spec, const fp8_layer_description *d)
{
    buf_printf(spec, "    recipe = recipe.%s { ", d->recipe != NULL ? d->recipe : "current");
    if (d->format != NULL)
        buf_printf(spec, "format = \"%s\", ", d->format);
    if (d->power_of_two != FP8_DEFAULT)
        buf_printf(spec, "power_of_two = %s, ", d->power_of_two == FP8_ON ? "true" : "false");
    if (d->history_length > 0)
        buf_printf(spec, "history_length = %" PRId64 ", ", d->history_length);
    if (d->algo != NULL)
        buf_printf(spec, "algo = \"%s\", ", d->algo);
    if (d->margin != 0)
        buf_printf(spec, "margin = %d, ", (int)d->margin);
    if (d->calibrate)
        buf_puts(spec, "calibrate = true, ");
    buf_puts(spec, "},\n    accumulation = {");
    put_accumulation(spec, "fprop", d->fprop);
    put_accumulation(spec, "dgrad", d->dgrad);
    put_accumulation(spec, "wgrad", d->wgrad);
    buf_puts(spec, " },\n");
}

static void put_spec(struct buf *spec, const fp8_layer_description *d)
{
    /* what a mesh of one rank would leave out */
    const char *mesh = d->shards ? "mesh = { fsdp = 2 }, " : "";
    buf_printf(spec, "return model \"jit\" { %slayers = { linear \"layer\" {\n", mesh);
    buf_printf(spec, "    in_features = %" PRId64 ", out_features = %" PRId64 ",\n", d->in_features,
               d->out_features);
    buf_printf(spec, "    tokens = %" PRId64 ", max_tokens = %" PRId64 ", bias = %s,\n",
               d->tokens != 0 ? d->tokens : d->max_tokens,
               d->max_tokens != 0 ? d->max_tokens : d->tokens, d->has_bias ? "true" : "false");
    put_dtype(spec, "weight", d->w_dtype);
    put_dtype(spec, "output", d->y_dtype);
    put_dtype(spec, "grad_input", d->dx_dtype);
    put_dtype(spec, "grad_weight", d->dw_dtype);
    if (d->compute != NULL && strcmp(d->compute, "fp8") != 0)
        buf_printf(spec, "    compute = \"%s\",\n", d->compute);
    else
        put_recipe(spec, d);
    buf_puts(spec, "} } }\n");
}

static const char *device_archs(int32_t arch, char text[16])
{
    if (arch == 0)
        return "none";
    snprintf(text, 16, "sm_%da", (int)arch);
    return text;
}

static fp8_status to_fp8(fp8gen_status status)
{
    switch (status) {
    case FP8GEN_OK:
        return FP8_OK;
    case FP8GEN_ERR_SPEC:
    case FP8GEN_ERR_ARGUMENT:
        return FP8_ERR_ARGUMENT;
    case FP8GEN_ERR_MACHINE:
        return FP8_ERR_LIBRARY;
    case FP8GEN_ERR_INTERNAL:
        break;
    }
    return FP8_ERR_INTERNAL;
}

static fp8gen_status provide(const fp8gen_jit_options *given, const fp8_layer_description *d,
                             char *path, size_t path_bytes)
{
    if (d == NULL || d->size != sizeof(*d))
        return gen_jit_fail(
            FP8GEN_ERR_ARGUMENT,
            "error: the description of the layer is %s; libfp8 and libfp8gen are of "
            "different versions\n",
            d == NULL ? "NULL" : "of another size");
    if (given != NULL && given->size != sizeof(*given))
        return fp8gen_jit_bundle(given, "", "", 0, path, path_bytes); /* which says so */
    if (!is_word(d->recipe) || !is_word(d->format) || !is_word(d->compute) || !is_word(d->algo))
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                            "error: recipe, format, compute and algo of a layer are words\n");
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    if (given != NULL)
        options = *given;
    char archs[16];
    if (options.archs == NULL)
        options.archs = device_archs(d->arch, archs);
    if (d->spec != NULL)
        return fp8gen_jit_bundle(&options, "spec", d->spec, strlen(d->spec), path, path_bytes);
    struct buf spec = { 0 };
    put_spec(&spec, d);
    fp8gen_status status =
        spec.failed ? gen_jit_fail(FP8GEN_ERR_MACHINE, "%s", GEN_OUT_OF_MEMORY)
                    : fp8gen_jit_bundle(&options, "layer", spec.data, spec.size, path, path_bytes);
    buf_free(&spec);
    return status;
}

int fp8gen_jit_provider(void *user, const struct fp8_layer_description *description, char *path,
                        size_t path_bytes)
{
    if (path == NULL || path_bytes == 0)
        return to_fp8(fp8gen_jit_bundle(NULL, "", "", 0, path, path_bytes)); /* which says so */
    fp8gen_status status = provide(user, description, path, path_bytes);
    if (status != FP8GEN_OK)
        snprintf(path, path_bytes, "%s", fp8gen_jit_error());
    return to_fp8(status);
}
