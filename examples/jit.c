/*
 * jit.c - layers whose shapes are known only at run time: described, prepared, used.
 *
 *     example_jit [IN_FEATURES OUT_FEATURES MAX_TOKENS]...      (default: two layers of an MLP)
 *
 * The context has a provider that builds what no bundle has; kernels and bundles stay in the cache,
 * so the second run of this program compiles nothing. Runs on GPU 0, or on the CPU where there is
 * none.
 */
#include <stdio.h>
#include <stdlib.h>

#include <fp8.h>
#include <fp8_device.h>
#include <fp8_jit.h>
#include <fp8gen.h>

enum { MAX_LAYERS = 16 };

static void show(void *user, fp8_log_level level, const char *message)
{
    (void)user;
    (void)level; /* warnings, and what FP8_LOG asks for; errors are returned */
    fprintf(stderr, "libfp8: %s\n", message);
}

static fp8_context *open_context(void)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    if (fp8_context_create(&options, &context) == FP8_OK)
        return context;
    options.device = FP8_DEVICE_HOST;
    options.log = show;
    return fp8_context_create(&options, &context) == FP8_OK ? context : NULL;
}

static int describe(int argc, char **argv, fp8_layer_description *layers)
{
    static const char *const mlp[] = { "64", "256", "128", "256", "64", "128" };
    const char *const *words = argc > 1 ? (const char *const *)argv + 1 : mlp;
    int count = (argc > 1 ? argc - 1 : 6) / 3;
    for (int i = 0; i < count; i++) {
        layers[i] = (fp8_layer_description)FP8_LAYER_DESCRIPTION_INIT;
        layers[i].in_features = atoll(words[3 * i]);
        layers[i].out_features = atoll(words[3 * i + 1]);
        layers[i].max_tokens = atoll(words[3 * i + 2]);
    }
    return count;
}

int main(int argc, char **argv)
{
    fp8_layer_description layers[MAX_LAYERS];
    if ((argc - 1) % 3 != 0 || argc - 1 > 3 * MAX_LAYERS) {
        fprintf(stderr, "usage: %s [IN_FEATURES OUT_FEATURES MAX_TOKENS]...\n", argv[0]);
        return 2;
    }
    int count = describe(argc, argv, layers);
    fp8_context *context = open_context();
    if (!context) {
        fprintf(stderr, "%s\n", fp8_last_error());
        return 1;
    }
    fp8_context_set_provider(context, fp8gen_jit_provider, NULL);
    /* Before the first step: everything is compiled here, several layers at a time. */
    fp8_status status = fp8_context_prepare(context, layers, (size_t)count);
    for (int i = 0; i < count && status == FP8_OK; i++) {
        const fp8_layer *layer; /* of the context: nothing to destroy */
        size_t bytes = 0;
        status = fp8_context_layer(context, &layers[i], &layer);
        if (status == FP8_OK)
            status = fp8_layer_bytes(layer, layers[i].max_tokens, FP8_BYTES_SAVED, &bytes);
        if (status == FP8_OK)
            printf("%lld -> %lld: %zu bytes saved for backward\n", (long long)layers[i].in_features,
                   (long long)layers[i].out_features, bytes);
    }
    if (status != FP8_OK)
        fprintf(stderr, "error: %s\n  remedy: %s\n", fp8_last_error(), fp8_status_remedy(status));
    fp8_context_destroy(context);
    return status != FP8_OK;
}
