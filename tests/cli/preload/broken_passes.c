/*
 * broken_passes.c - passes with a fault each, as a preloaded library: `fp8gen run` must find them.
 *
 * BROKEN names the fault: "byte" flips one bit of one FP8 byte of the weight, "skip" leaves dw as
 * it was, "scale" doubles one row of dx, "ulp" moves one bf16 number of dx by two, "twice" rounds a
 * bf16 product before it is added to dw.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8.h"

static int is(const char *fault)
{
    const char *broken = getenv("BROKEN");
    return broken && strcmp(broken, fault) == 0;
}

fp8_status fp8_weight_update(const fp8_layer *layer, const fp8_weight_args *args)
{
    fp8_status (*real)(const fp8_layer *, const fp8_weight_args *) = NULL;
    fp8_operand_view view;
    *(void **)&real = dlsym(RTLD_NEXT, "fp8_weight_update");
    fp8_status status = real(layer, args);
    if (!status && is("byte") && fp8_operand_parts(args->weight, &view) == FP8_OK)
        view.transposed[5] ^= 1;
    return status;
}

static float value_of(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static uint16_t bits_of(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

/* The product in bf16, then the sum in bf16. */
static fp8_status add_twice(const fp8_layer *layer, const fp8_wgrad_args *args,
                            fp8_status (*real)(const fp8_layer *, const fp8_wgrad_args *))
{
    size_t count = (size_t)(args->dw->rows * args->dw->cols);
    uint16_t *dw = args->dw->data, *before = malloc(count * sizeof *before);
    fp8_wgrad_args alone = *args;
    alone.accumulate = 0;
    memcpy(before, dw, count * sizeof *before);
    fp8_status status = real(layer, &alone);
    for (size_t i = 0; !status && i < count; i++)
        dw[i] = bits_of(value_of(before[i]) + value_of(dw[i]));
    free(before);
    return status;
}

fp8_status fp8_layer_wgrad(const fp8_layer *layer, const fp8_wgrad_args *args)
{
    fp8_status (*real)(const fp8_layer *, const fp8_wgrad_args *) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "fp8_layer_wgrad");
    if (is("twice") && args->accumulate && args->dw->dtype == FP8_DTYPE_BF16)
        return add_twice(layer, args, real);
    return is("skip") ? FP8_OK : real(layer, args);
}

fp8_status fp8_layer_dgrad(const fp8_layer *layer, const fp8_dgrad_args *args)
{
    fp8_status (*real)(const fp8_layer *, const fp8_dgrad_args *) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "fp8_layer_dgrad");
    fp8_status status = real(layer, args);
    uint16_t *bf16 = args->dx->data;
    for (int64_t j = 0; !status && is("scale") && j < args->dx->cols; j++)
        bf16[j] = (uint16_t)(bf16[j] + 0x80); /* one more in the exponent */
    if (!status && is("ulp"))
        bf16[0] = (uint16_t)(bf16[0] + 2);
    return status;
}
