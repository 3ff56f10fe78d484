/*
 * ahead.c - opens a bundle on a machine that only has libfp8: no generator, no Lua, no NVRTC, no
 * toolkit.
 *
 * Computes y = x w^T of its only layer, 16 x 32, on the host, and lists what the process has
 * loaded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8.h"
#include "runtime/fp8_device.h"

enum { M = 4, N = 32, K = 16 };

static void check(fp8_status status, const char *what)
{
    if (status == FP8_OK)
        return;
    printf("%s: %s\n", what, fp8_last_error());
    exit(1);
}

static void *memory(fp8_context *context, size_t bytes)
{
    void *made;
    check(fp8_memory_alloc(context, bytes, &made), "alloc");
    return made;
}

static fp8_operand operand(fp8_context *context, const fp8_layer *layer, fp8_bytes which)
{
    fp8_operand made = FP8_OPERAND_INIT;
    check(fp8_layer_bytes(layer, M, which, &made.bytes), "bytes");
    made.data = memory(context, made.bytes);
    return made;
}

/* x and w are ones, so that every element of y is K. */
static void compute(fp8_context *context, const fp8_layer *layer)
{
    static unsigned short x[M * K], w[N * K], y[M * N];
    for (int i = 0; i < M * K; i++)
        x[i] = 0x3f80;
    for (int i = 0; i < N * K; i++)
        w[i] = 0x3f80;
    fp8_tensor tx = { x, M, K, K, FP8_DTYPE_BF16, 0 }, tw = { w, N, K, K, FP8_DTYPE_BF16, 0 };
    fp8_tensor ty = { y, M, N, N, FP8_DTYPE_BF16, 0 };
    fp8_operand weight = operand(context, layer, FP8_BYTES_WEIGHT);
    fp8_call call = FP8_CALL_INIT;
    check(fp8_layer_bytes(layer, M, FP8_BYTES_WORKSPACE, &call.workspace_bytes), "bytes");
    call.workspace = memory(context, call.workspace_bytes);
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &tw, update.version = 1, update.weight = &weight, update.call = call;
    check(fp8_weight_update(layer, &update), "weight");
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &tx, fprop.weight = &weight, fprop.y = &ty, fprop.call = call;
    check(fp8_layer_fprop(layer, &fprop), "fprop");
    for (int i = 0; i < M * N; i++) {
        if (y[i] != 0x4180) {
            printf("y[%d] is 0x%04x\n", i, y[i]);
            exit(1);
        }
    }
    fp8_memory_free(context, weight.data);
    fp8_memory_free(context, call.workspace);
}

int main(int argc, char **argv)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_layer *layer;
    if (argc != 2)
        return 2;
    options.device = FP8_DEVICE_HOST;
    check(fp8_context_create(&options, &context), "context");
    check(fp8_bundle_open(context, argv[1], &bundle), "bundle");
    check(fp8_layer_create(bundle, fp8_bundle_layer_name(bundle, 0), &layer), "layer");
    compute(context, layer);
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[1024];
    while (maps && fgets(line, sizeof line, maps)) {
        if (strchr(line, '/'))
            fputs(strchr(line, '/'), stdout);
    }
    return 0;
}
