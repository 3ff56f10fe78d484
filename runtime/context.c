/*
 * context.c - contexts: the primary context of one device, or the host with its pool of threads.
 *
 * The primary context is retained, never created anew, so that the runtime shares memory and
 * streams with whatever else the program uses. It is made current only while a call needs it and
 * only if it is not current already, and popped again: the caller's current device never changes.
 * Whether a device is stuck is kept here, once for the process. A host context opens no library.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/driver.h"
#include "runtime/internal.h"
#include "runtime/parallel.h"

/* What holds a device, counted; ordinals from 63 on, which no machine has, share the last. */
enum { DEVICES = 64 };
static atomic_int stuck_devices[DEVICES];

static atomic_int *stuck_of(int32_t device)
{
    return &stuck_devices[device < DEVICES ? device : DEVICES - 1];
}

bool fp8_context_is_stuck(const struct fp8_context *context)
{
    return !context->is_host && atomic_load(stuck_of(context->device)) > 0;
}

void fp8_device_hold(int32_t device)
{
    (void)atomic_fetch_add(stuck_of(device), 1);
}

void fp8_device_let_go(int32_t device)
{
    (void)atomic_fetch_sub(stuck_of(device), 1);
}

CUresult fp8_context_push(const struct fp8_context *context, bool *pushed)
{
    const struct fp8_driver *driver = context->driver;
    CUcontext current = NULL;
    CUresult result = driver->ctx_get_current(&current);
    *pushed = false;
    if (result == CUDA_SUCCESS && current == (CUcontext)context->primary)
        return CUDA_SUCCESS;
    result = driver->ctx_push((CUcontext)context->primary);
    *pushed = result == CUDA_SUCCESS;
    return result;
}

fp8_status fp8_context_enter(const struct fp8_context *context, bool *pushed)
{
    *pushed = false;
    if (context->is_host)
        return FP8_OK;
    if (fp8_context_is_stuck(context))
        return fp8_fail(FP8_ERR_COMM,
                        "device %d takes no calls until NCCL's abort of a communicator ends, "
                        "which waits for work on the device; call again, or where a copy engine "
                        "waits for a rank that has gone, end this process, which frees it",
                        context->device);
    CUresult result = fp8_context_push(context, pushed);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "making device %d current", context->device);
}

void fp8_context_leave(const struct fp8_context *context, bool pushed)
{
    CUcontext popped;
    if (pushed)
        (void)context->driver->ctx_pop(&popped);
}

fp8_status fp8_report(const struct fp8_context *context, fp8_status status)
{
    if (status != FP8_OK && fp8_log_wanted(&context->log, FP8_LOG_ERROR))
        fp8_log_write(&context->log, FP8_LOG_ERROR, "%s", fp8_last_error());
    return status;
}

/* A number that differs from process to process and from context to context (splitmix64). */
static uint64_t random_word(const void *address)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t z = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    z += (uint64_t)(uintptr_t)address + ((uint64_t)getpid() << 40) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static fp8_status create_host(struct fp8_context *context, const fp8_context_options *options)
{
    context->is_host = true;
    context->device = FP8_DEVICE_HOST;
    snprintf(context->name, sizeof context->name, "host");
    FP8_TRY(fp8_pool_create(options->threads, &context->pool));
    context->sms = fp8_pool_threads(context->pool);
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page > 0)
        context->memory_bytes = (uint64_t)pages * (uint64_t)page;
    return FP8_OK;
}

static fp8_status read_device(struct fp8_context *context, CUdevice device)
{
    const struct fp8_driver *driver = context->driver;
    int major = 0, minor = 0, sms = 0;
    size_t memory = 0;
    CUresult result =
        driver->device_get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (result == CUDA_SUCCESS)
        result = driver->device_get_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                              device);
    if (result == CUDA_SUCCESS)
        result =
            driver->device_get_attribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (result == CUDA_SUCCESS)
        result = driver->device_get_name(context->name, sizeof context->name, device);
    if (result == CUDA_SUCCESS)
        result = driver->device_total_mem(&memory, device);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "properties of device %d", context->device);
    context->arch = major * 10 + minor;
    context->sms = sms;
    context->memory_bytes = memory;
    return FP8_OK;
}

static fp8_status create_cuda(struct fp8_context *context, const fp8_context_options *options)
{
    FP8_TRY(fp8_driver_get(&context->driver));
    const struct fp8_driver *driver = context->driver;
    int count = 0;
    context->device = options->device;
    CUresult result = driver->device_get_count(&count);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "cuDeviceGetCount");
    if (options->device >= count)
        return fp8_fail(FP8_ERR_DEVICE,
                        "context_create: device is %d, but this process sees %d device%s",
                        options->device, count, count == 1 ? "" : "s");
    CUdevice device;
    result = driver->device_get(&device, options->device);
    if (result == CUDA_SUCCESS)
        result = driver->driver_get_version(&context->driver_version);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "device %d", options->device);
    FP8_TRY(read_device(context, device));
    CUcontext primary = NULL;
    result = driver->primary_retain(&primary, device);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "the primary context of device %d", options->device);
    context->primary = primary;
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(context, "context_create", NULL, &entered));
    fp8_status status = fp8_lt_create(context, &context->lt);
    fp8_uncaptured_leave(context, &entered);
    return status;
}

static fp8_status check_options(const fp8_context_options *options)
{
    if (options->size != sizeof *options)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "context_create: options->size is %u, this library's is %zu; start from "
                        "FP8_CONTEXT_OPTIONS_INIT",
                        options->size, sizeof *options);
    if (options->device < FP8_DEVICE_HOST)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "context_create: device is %d; pass a CUDA ordinal or FP8_DEVICE_HOST (-1)",
                        options->device);
    if (options->max_sms < 0 || options->threads < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "context_create: max_sms is %d and threads is %d; neither may be negative",
                        options->max_sms, options->threads);
    for (int i = 0; i < 4; i++) {
        if (options->reserved[i] || options->reserved0)
            return fp8_fail(FP8_ERR_ARGUMENT, "context_create: reserved fields must be 0");
    }
    return FP8_OK;
}

fp8_status fp8_context_create(const fp8_context_options *options, fp8_context **context)
{
    static const fp8_context_options defaults = FP8_CONTEXT_OPTIONS_INIT;
    if (!context)
        return fp8_fail(FP8_ERR_ARGUMENT, "context_create: context is NULL");
    *context = NULL;
    if (!options)
        options = &defaults;
    FP8_TRY(check_options(options));
    struct fp8_context *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_fail_memory("a context", sizeof *made);
    fp8_log_setup(&made->log, options);
    made->max_sms = options->max_sms;
    bool is_host = options->device == FP8_DEVICE_HOST;
    atomic_init(&made->epoch, random_word(made));
    fp8_status status = fp8_registry_create(&made->registry);
    if (status == FP8_OK)
        status = is_host ? create_host(made, options) : create_cuda(made, options);
    if (status != FP8_OK) {
        (void)fp8_report(made, status);
        fp8_context_destroy(made);
        return status;
    }
    fp8_log_write(&made->log, FP8_LOG_INFO, "context on %s, %d %s", made->name, made->sms,
                  is_host ? "threads" : "SMs");
    *context = made;
    return FP8_OK;
}

void fp8_context_destroy(fp8_context *context)
{
    if (!context)
        return;
    fp8_registry_destroy(context->registry);
    fp8_pool_destroy(context->pool);
    if (context->primary && !fp8_context_is_stuck(context)) {
        struct fp8_uncaptured entered;
        if (context->lt && fp8_release_enter(context, &entered)) {
            fp8_lt_destroy(context->lt);
            fp8_uncaptured_leave(context, &entered);
        }
        CUdevice device;
        if (context->driver->device_get(&device, context->device) == CUDA_SUCCESS)
            (void)context->driver->primary_release(device);
    }
    fp8_release(context);
}

fp8_status fp8_context_info(const fp8_context *context, fp8_device_info *info)
{
    if (!context)
        return fp8_fail(FP8_ERR_ARGUMENT, "context_info: context is NULL");
    FP8_TRY(fp8_check_answer("context_info", "info", info, sizeof *info));
    memset(info, 0, sizeof *info);
    info->size = sizeof *info;
    info->device = context->device;
    info->sms = context->sms;
    info->arch = context->arch;
    info->driver_version = context->driver_version;
    info->is_stuck = fp8_context_is_stuck(context);
    info->cublaslt_version = context->lt ? fp8_lt_version(context->lt) : 0;
    info->memory_bytes = context->memory_bytes;
    memcpy(info->name, context->name, sizeof info->name);
    return FP8_OK;
}
