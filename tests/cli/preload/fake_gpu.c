/*
 * fake_gpu.c - a GPU for the benchmarks on a machine without one, as a preloaded library.
 *
 * The context on device 0 is a host context that calls itself compute capability 9.0; the driver calls
 * of the program succeed, its copies are memcpy; cuBLASLt offers three algorithms, of which the second
 * is not usable, and multiplies nothing. So the flow of a benchmark is tested, its memory and its
 * rows, and not one of its figures.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8.h"

static int succeed(void)
{
    return 0;
}

static int retain(void **context, int device)
{
    (void)device;
    *context = &context;
    return 0;
}

static int pop(void **context)
{
    *context = NULL;
    return 0;
}

static int copy(unsigned long long target, unsigned long long source, size_t bytes, void *stream)
{
    (void)stream;
    memcpy((void *)(uintptr_t)target, (const void *)(uintptr_t)source, bytes);
    return 0;
}

static int create(void **object)
{
    *object = malloc(8);
    return *object ? 0 : 3;
}

static int destroy(void *object)
{
    free(object);
    return 0;
}

/* cublasLtMatmulHeuristicResult_t: the algorithm (64 bytes), workspace size, status, waves, reserved. */
struct algorithm {
    char opaque[64];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

static int offer(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                 int wanted, struct algorithm *algorithms, int *count)
{
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *count = wanted < 3 ? wanted : 3;
    memset(algorithms, 0, sizeof *algorithms * (size_t)*count);
    algorithms[1].state = 15;
    return 0;
}

static const struct {
    const char *name;
    void *function;
} symbols[] = {
    { "cuDevicePrimaryCtxRetain", (void *)retain },
    { "cuCtxPopCurrent_v2", (void *)pop },
    { "cuMemcpyDtoDAsync_v2", (void *)copy },
    { "cublasLtCreate", (void *)create },
    { "cublasLtDestroy", (void *)destroy },
    { "cublasLtMatmulDescCreate", (void *)create },
    { "cublasLtMatmulDescDestroy", (void *)destroy },
    { "cublasLtMatrixLayoutCreate", (void *)create },
    { "cublasLtMatrixLayoutDestroy", (void *)destroy },
    { "cublasLtMatmulPreferenceCreate", (void *)create },
    { "cublasLtMatmulPreferenceDestroy", (void *)destroy },
    { "cublasLtMatmulAlgoGetHeuristic", (void *)offer },
};

fp8_status fp8_library_symbol(fp8_library library, const char *symbol, void **address,
                              const char **path)
{
    (void)library;
    if (path)
        *path = "fake";
    if (address)
        *address = (void *)succeed;
    for (size_t i = 0; address && i < sizeof symbols / sizeof symbols[0]; i++) {
        if (strcmp(symbols[i].name, symbol) == 0)
            *address = symbols[i].function;
    }
    return FP8_OK;
}

fp8_status fp8_context_create(const fp8_context_options *options, fp8_context **context)
{
    fp8_status (*real)(const fp8_context_options *, fp8_context **) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "fp8_context_create");
    fp8_context_options changed = *options;
    changed.device = FP8_DEVICE_HOST;
    return real(&changed, context);
}

fp8_status fp8_context_info(const fp8_context *context, fp8_device_info *info)
{
    fp8_status (*real)(const fp8_context *, fp8_device_info *) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "fp8_context_info");
    fp8_status status = real(context, info);
    info->device = 0;
    info->arch = 90;
    info->cublaslt_version = 130100;
    strcpy(info->name, "fake GPU");
    return status;
}
