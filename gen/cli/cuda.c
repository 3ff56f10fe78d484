/*
 * cuda.c - looks up the few driver calls that doctor and bench make themselves.
 */
#include <stddef.h>
#include <string.h>

#include "gen/cli/cuda.h"

static const struct {
    const char *symbol;
    size_t offset;
} symbols[] = {
    { "cuInit", offsetof(struct cli_cuda, init) },
    { "cuDriverGetVersion", offsetof(struct cli_cuda, driver_version) },
    { "cuDeviceGetCount", offsetof(struct cli_cuda, device_count) },
    { "cuDeviceGetName", offsetof(struct cli_cuda, device_name) },
    { "cuDeviceGetAttribute", offsetof(struct cli_cuda, device_attribute) },
    { "cuDeviceTotalMem_v2", offsetof(struct cli_cuda, device_memory) },
    { "cuDevicePrimaryCtxRetain", offsetof(struct cli_cuda, retain) },
    { "cuDevicePrimaryCtxRelease_v2", offsetof(struct cli_cuda, release) },
    { "cuCtxPushCurrent_v2", offsetof(struct cli_cuda, push) },
    { "cuCtxPopCurrent_v2", offsetof(struct cli_cuda, pop) },
    { "cuMemcpyDtoDAsync_v2", offsetof(struct cli_cuda, copy) },
    { "cuGetErrorString", offsetof(struct cli_cuda, error_string) },
};

fp8_status cli_cuda_load(struct cli_cuda *cuda)
{
    memset(cuda, 0, sizeof *cuda);
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *address = NULL;
        fp8_status status =
            fp8_library_symbol(FP8_LIBRARY_CUDA, symbols[i].symbol, &address, &cuda->path);
        if (status)
            return status;
        memcpy((char *)cuda + symbols[i].offset, &address, sizeof address);
    }
    return FP8_OK;
}

const char *cli_cuda_text(const struct cli_cuda *cuda, cli_cu_result result)
{
    const char *text = NULL;
    if (cuda->error_string && cuda->error_string(result, &text) == 0 && text)
        return text;
    return "unknown driver error";
}
