/*
 * broken_passes.c - passes with a fault each, as a preloaded library: `fp8gen run` must find them.
 *
 * BROKEN names the fault: "byte" flips one bit of one FP8 byte of the weight, "skip" leaves dw as it was,
 * "scale" doubles one row of dx.
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

fp8_status fp8_layer_wgrad(const fp8_layer *layer, const fp8_wgrad_args *args)
{
    fp8_status (*real)(const fp8_layer *, const fp8_wgrad_args *) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "fp8_layer_wgrad");
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
    return status;
}
