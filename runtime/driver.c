/*
 * driver.c - opens libcuda and cuBLASLt once, fills the driver table, words CUDA's errors.
 *
 * In: nothing but the environment. Out: handles and tables that live as long as the process, so
 * that they can be handed out without counting. A library that could not be opened is searched
 * again by the next call: the user may have loaded it in between. Knows no context.
 */
#include "runtime/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime/dynlib.h"

static const char *const cuda_sonames[] = { "libcuda.so.1", "libcuda.so", NULL };
static const char *const cublaslt_sonames[] = { "libcublasLt.so.13", "libcublasLt.so.12",
                                                "libcublasLt.so", NULL };
static const char *const nccl_sonames[] = { "libnccl.so.2", "libnccl.so", NULL };

static const struct fp8_dynlib_spec library_specs[] = {
    [FP8_LIBRARY_CUDA] = { "libcuda (the NVIDIA driver)", NULL, cuda_sonames, false },
    [FP8_LIBRARY_CUBLASLT] = { "cuBLASLt", "FP8_CUBLASLT_PATH", cublaslt_sonames, true },
    [FP8_LIBRARY_NCCL] = { "NCCL", "FP8_NCCL_PATH", nccl_sonames, false },
};
enum { LIBRARY_COUNT = sizeof library_specs / sizeof library_specs[0] };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fp8_dynlib libraries[LIBRARY_COUNT];
static struct fp8_driver driver_table;
static bool driver_ready;

static fp8_status open_locked(fp8_library library)
{
    char message[FP8_DYNLIB_MESSAGE_SIZE];
    struct fp8_dynlib *lib = &libraries[library];
    if (lib->handle)
        return FP8_OK;
    if (!fp8_dynlib_open(&library_specs[library], lib, message, sizeof message)) {
        return fp8_fail(FP8_ERR_LIBRARY, "%s", message);
    }
    return FP8_OK;
}

fp8_status fp8_library_open(fp8_library library, const struct fp8_dynlib **opened)
{
    pthread_mutex_lock(&lock);
    fp8_status status = open_locked(library);
    pthread_mutex_unlock(&lock);
    *opened = status == FP8_OK ? &libraries[library] : NULL;
    return status;
}

fp8_status fp8_library_symbol(fp8_library library, const char *symbol, void **address,
                              const char **path)
{
    if (address)
        *address = NULL;
    if (path)
        *path = NULL;
    if ((unsigned)library >= LIBRARY_COUNT) {
        return fp8_fail(FP8_ERR_ARGUMENT, "library_symbol: library is %d; pass FP8_LIBRARY_*",
                        (int)library);
    }
    if (symbol && !address) {
        return fp8_fail(FP8_ERR_ARGUMENT, "library_symbol: address is NULL");
    }
    const struct fp8_dynlib *lib;
    FP8_TRY(fp8_library_open(library, &lib));
    if (symbol) {
        *address = dlsym(lib->handle, symbol);
        if (!*address) {
            return fp8_fail(FP8_ERR_LIBRARY, "%s has no symbol %s", lib->path, symbol);
        }
    }
    if (path)
        *path = lib->path;
    return FP8_OK;
}

static fp8_status fill_table_locked(void)
{
    const struct fp8_dynlib_symbol symbols[] = {
#define X(member, symbol, parameters) { symbol, &driver_table.member, false },
        FP8_DRIVER_TABLE(X)
#undef X
#define X(member, symbol, parameters) { symbol, &driver_table.member, true },
            FP8_DRIVER_OPTIONAL(X)
#undef X
    };
    char message[FP8_DYNLIB_MESSAGE_SIZE];
    FP8_TRY(open_locked(FP8_LIBRARY_CUDA));
    if (!fp8_dynlib_symbols(&libraries[FP8_LIBRARY_CUDA], symbols,
                            sizeof symbols / sizeof symbols[0], message, sizeof message)) {
        return fp8_fail(FP8_ERR_LIBRARY, "%s", message);
    }
    CUresult result = driver_table.init(0);
    if (result != CUDA_SUCCESS) {
        (void)fp8_fail_cuda(&driver_table, result, "%s: cuInit", libraries[FP8_LIBRARY_CUDA].path);
        return FP8_ERR_DEVICE;
    }
    driver_ready = true;
    return FP8_OK;
}

fp8_status fp8_driver_get(const struct fp8_driver **driver)
{
    pthread_mutex_lock(&lock);
    fp8_status status = driver_ready ? FP8_OK : fill_table_locked();
    pthread_mutex_unlock(&lock);
    *driver = status == FP8_OK ? &driver_table : NULL;
    return status;
}

fp8_status fp8_fail_cuda(const struct fp8_driver *driver, CUresult result, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    const char *name = NULL, *text = NULL;
    if (driver->get_error_name(result, &name) != CUDA_SUCCESS || !name)
        name = "unknown error";
    if (driver->get_error_string(result, &text) != CUDA_SUCCESS || !text)
        text = "no description";
    fp8_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? FP8_ERR_MEMORY : FP8_ERR_CUDA;
    return fp8_fail(status, "%s: %s (%d: %s)", what, name, (int)result, text);
}
