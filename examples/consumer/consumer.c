/*
 * consumer.c - both libraries from one program: a layer is described at run time, a bundle is made
 * of it and opened again. No file of the fp8gen source tree is needed, only an installed package.
 *
 *     consumer [FOLDER]      the bundle is written to FOLDER (default: consumer_bundle)
 *
 * The bundle holds no kernels ("none"): the host backend needs none, and no NVRTC.
 */
#include <stdio.h>
#include <string.h>

#include <fp8.h>
#include <fp8gen.h>

static const char spec[] =
    "return model \"consumer\" {\n"
    "  tokens = 32,\n"
    "  layers = { linear \"head\" { in_features = 96, out_features = 2556 } },\n"
    "}\n";

static int make_bundle(const char *folder)
{
    fp8gen *gen = NULL;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = "none";
    options.output_dir = folder;
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (status == FP8GEN_OK)
        status = fp8gen_load_text(gen, "consumer.lua", spec, strlen(spec));
    if (status == FP8GEN_OK)
        status = fp8gen_build(gen, &options);
    if (status != FP8GEN_OK)
        fprintf(stderr, "%s", gen ? fp8gen_diagnostics(gen) : "out of memory\n");
    fp8gen_close(gen);
    return status;
}

static fp8_status use_bundle(const char *folder)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context = NULL;
    fp8_bundle *bundle = NULL;
    fp8_layer *layer = NULL;
    size_t bytes = 0;
    options.device = FP8_DEVICE_HOST;
    fp8_status status = fp8_context_create(&options, &context);
    if (status == FP8_OK)
        status = fp8_bundle_open(context, folder, &bundle);
    if (status == FP8_OK)
        status = fp8_layer_create(bundle, "head", &layer);
    if (status == FP8_OK)
        status = fp8_layer_bytes(layer, 32, FP8_BYTES_WEIGHT, &bytes);
    if (status == FP8_OK)
        printf("head: its quantised weight takes %zu bytes\n", bytes);
    else
        fprintf(stderr, "%s: %s\n", fp8_status_name(status), fp8_last_error());
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    return status;
}

int main(int argc, char **argv)
{
    const char *folder = argc > 1 ? argv[1] : "consumer_bundle";
    int status = make_bundle(folder);
    if (status)
        return status;
    return use_bundle(folder) == FP8_OK ? 0 : 1;
}
