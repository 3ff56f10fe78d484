/*
 * fake_gpu.c - a GPU for the benchmarks on a machine without one, as a preloaded library.
 *
 * The context on device 0 is a host context that calls itself compute capability 9.0; the driver
 * calls of the program succeed, its copies are memcpy; cuBLASLt offers three algorithms: the first
 * multiplies, plainly; the second is not usable; the third leaves its output as it is, which is
 * wrong. So the flow of a benchmark is tested, its memory, its rows and its checks, and not one of
 * its figures. The clock runs ten times as fast as time: what warms up a device that there is not
 * is soon over.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "runtime/fp8.h"
#include "runtime/fp8_device.h"

/* The kernel is asked: a program that this runs in may ask for the time before dlsym works. */
int clock_gettime(clockid_t clock, struct timespec *time)
{
    int result = (int)syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && clock == CLOCK_MONOTONIC) {
        long long fast = 10 * (time->tv_sec * 1000000000LL + time->tv_nsec);
        time->tv_sec = (time_t)(fast / 1000000000);
        time->tv_nsec = (long)(fast % 1000000000);
    }
    return result;
}

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

/* ---- cuBLASLt, column-major: d = alpha op(a) op(b) + beta d ---------------------------------- */

/* Attributes and types by the numbers of cublasLt.h and library_types.h. */
enum { TRANSA = 3, TRANSB = 4, A_SCALE = 17, B_SCALE = 18 };
enum { R_32F = 0, R_16BF = 14, R_E4M3 = 28, R_E5M2 = 29 };

struct desc {
    int trans_a, trans_b;
    const float *a_scale, *b_scale;
};

struct layout {
    int type;
    unsigned long long rows, cols;
    long long ld;
};

static int create_desc(struct desc **desc, int compute, int scale)
{
    (void)compute, (void)scale;
    *desc = calloc(1, sizeof **desc);
    return *desc ? 0 : 3;
}

static int set_desc(struct desc *desc, int attribute, const void *value, size_t size)
{
    void *const places[] = { [TRANSA] = &desc->trans_a,
                             [TRANSB] = &desc->trans_b,
                             [A_SCALE] = &desc->a_scale,
                             [B_SCALE] = &desc->b_scale };
    if (attribute == TRANSA || attribute == TRANSB || attribute == A_SCALE || attribute == B_SCALE)
        memcpy(places[attribute], value, size);
    return 0;
}

static int create_layout(struct layout **layout, int type, unsigned long long rows,
                         unsigned long long cols, long long ld)
{
    *layout = malloc(sizeof **layout);
    if (!*layout)
        return 3;
    **layout = (struct layout){ type, rows, cols, ld };
    return 0;
}

static float decode(unsigned code, int mantissa, int bias)
{
    int exponent = (int)(code & 0x7f) >> mantissa;
    int fraction = (int)code & ((1 << mantissa) - 1);
    float value = exponent ? ldexpf((float)(fraction | 1 << mantissa), exponent - bias - mantissa)
                           : ldexpf((float)fraction, 1 - bias - mantissa);
    return code & 0x80 ? -value : value;
}

static float decoded[2][256]; /* every E4M3 and every E5M2 number */

__attribute__((constructor)) static void fill_decoded(void)
{
    for (unsigned code = 0; code < 256; code++) {
        decoded[0][code] = decode(code, 3, 7);
        decoded[1][code] = decode(code, 2, 15);
    }
}

static float load(const void *data, const struct layout *l, size_t row, size_t col)
{
    size_t at = col * (size_t)l->ld + row;
    float value;
    if (l->type == R_32F)
        return ((const float *)data)[at];
    if (l->type == R_E4M3 || l->type == R_E5M2)
        return decoded[l->type == R_E5M2][((const unsigned char *)data)[at]];
    unsigned bits = (unsigned)((const unsigned short *)data)[at] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void store(void *data, const struct layout *l, size_t row, size_t col, float value)
{
    size_t at = col * (size_t)l->ld + row;
    unsigned bits;
    if (l->type == R_32F) {
        ((float *)data)[at] = value;
        return;
    }
    memcpy(&bits, &value, sizeof bits);
    ((unsigned short *)data)[at] = (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* cublasLtMatmulHeuristicResult_t: the algorithm (64 bytes), workspace size, status, waves,
 * reserved. */
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
    algorithms[2].opaque[0] = 2;
    return 0;
}

static int multiply(void *handle, const struct desc *desc, const float *alpha, const void *a,
                    const struct layout *la, const void *b, const struct layout *lb,
                    const float *beta, const void *c, const struct layout *lc, void *d,
                    const struct layout *ld, const char *algorithm, void *workspace, size_t bytes,
                    void *stream)
{
    (void)handle, (void)c, (void)lc, (void)workspace, (void)bytes, (void)stream;
    size_t depth = (size_t)(desc->trans_a ? la->rows : la->cols);
    float factor = *alpha * (desc->a_scale ? *desc->a_scale : 1);
    factor *= desc->b_scale ? *desc->b_scale : 1;
    if (algorithm[0] == 2)
        return 0;
    for (size_t j = 0; j < ld->cols; j++) {
        for (size_t i = 0; i < ld->rows; i++) {
            float sum = 0;
            for (size_t k = 0; k < depth; k++)
                sum += (desc->trans_a ? load(a, la, k, i) : load(a, la, i, k)) *
                       (desc->trans_b ? load(b, lb, j, k) : load(b, lb, k, j));
            store(d, ld, i, j, factor * sum + (*beta != 0 ? *beta * load(d, ld, i, j) : 0));
        }
    }
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
    { "cublasLtMatmulDescCreate", (void *)create_desc },
    { "cublasLtMatmulDescSetAttribute", (void *)set_desc },
    { "cublasLtMatmul", (void *)multiply },
    { "cublasLtMatmulDescDestroy", (void *)destroy },
    { "cublasLtMatrixLayoutCreate", (void *)create_layout },
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
