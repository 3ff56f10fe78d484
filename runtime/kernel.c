/*
 * kernel.c - a kernel of the bundle: loading its cubin, its grid, its parameter list, its launch.
 *
 * An op's arguments arrive evaluated in the op's order; the kernel record says which of them the
 * kernel takes, in which order. The parameter list is an array of pointers to those values; an
 * int32 is the low half of its value, which comes first in memory. The host context executes the op
 * itself, with the semantics of the same record. Kernels of op gemm take tensor maps too:
 * gemm_generated.c makes their lists.
 */
#include <stdio.h>

#include "runtime/driver.h"
#include "runtime/host.h"
#include "runtime/internal.h"

enum { DEFAULT_SHARED_BYTES = 48 * 1024 };

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "an int32 parameter is taken from its int64");

static size_t parameter_bytes(const struct fp8_kernel *kernel, int parameter)
{
    int index = kernel->arg_index[parameter];
    if (index == FP8_PARAMETER_OUT_BY_MAP)
        return sizeof(int32_t);
    if (index >= FP8_PARAMETER_MAP_A)
        return FP8_TENSOR_MAP_BYTES;
    return fp8_op_arg_type(kernel->op, index) == FP8_ARG_INT32 ? sizeof(int32_t) : sizeof(int64_t);
}

/* The compiled kernel's own parameters, where the driver can tell them. A parameter past the
 * manifest's list is not asked for: memory checkers report the question as an error of the
 * program. */
static fp8_status check_parameters(const struct fp8_context *context,
                                   const struct fp8_kernel *kernel)
{
    const struct fp8_driver *driver = context->driver;
    for (int i = 0; driver->func_get_param_info && i < kernel->arg_count; i++) {
        size_t offset, bytes, wanted = parameter_bytes(kernel, i);
        CUresult result = driver->func_get_param_info(kernel->function, (size_t)i, &offset, &bytes);
        if (result == CUDA_ERROR_INVALID_VALUE)
            return fp8_fail(FP8_ERR_BUNDLE,
                            "kernel '%s': the manifest lists %d parameters, but the cubin takes "
                            "fewer; rebuild the bundle",
                            kernel->name, kernel->arg_count);
        if (result != CUDA_SUCCESS)
            return FP8_OK; /* it cannot */
        if (bytes != wanted)
            return fp8_fail(
                FP8_ERR_BUNDLE,
                "kernel '%s': parameter %d of the cubin has %zu bytes, but the manifest "
                "says %zu; rebuild the bundle",
                kernel->name, i, bytes, wanted);
    }
    return FP8_OK;
}

enum { MOST_ATTRIBUTES = 3 };

/* Clusters; where the kernel waits for the one before it, an early start; CTAs that wait for each
 * other. */
static unsigned launch_attributes(const struct fp8_kernel *kernel, CUlaunchAttribute *list)
{
    unsigned count = 0;
    if (kernel->cluster > 1) {
        list[count] = (CUlaunchAttribute){ .id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION };
        list[count].value.clusterDim.x = (unsigned)kernel->cluster;
        list[count].value.clusterDim.y = 1;
        list[count].value.clusterDim.z = 1;
        count++;
    }
    if (kernel->overlaps) {
        list[count] =
            (CUlaunchAttribute){ .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION };
        list[count].value.programmaticStreamSerializationAllowed = 1;
        count++;
    }
    if (kernel->cooperative) {
        list[count] = (CUlaunchAttribute){ .id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE };
        list[count].value.cooperative = 1;
        count++;
    }
    return count;
}

/* attributes: room for all, part of the configuration. */
static CUlaunchConfig configuration(const struct fp8_kernel *kernel, unsigned ctas, CUstream stream,
                                    CUlaunchAttribute *attributes)
{
    return (CUlaunchConfig){ .gridDimX = ctas,
                             .gridDimY = 1,
                             .gridDimZ = 1,
                             .blockDimX = (unsigned)kernel->block,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = (unsigned)kernel->shared_bytes,
                             .hStream = stream,
                             .attrs = attributes,
                             .numAttrs = launch_attributes(kernel, attributes) };
}

static CUresult launch(const struct fp8_driver *driver, const struct fp8_kernel *kernel,
                       unsigned ctas, CUstream stream, void **parameters)
{
    CUlaunchAttribute attributes[MOST_ATTRIBUTES];
    CUlaunchConfig config = configuration(kernel, ctas, stream, attributes);
    if (config.numAttrs == 0)
        return driver->launch_kernel(kernel->function, ctas, 1, 1, config.blockDimX, 1, 1,
                                     config.sharedMemBytes, stream, parameters, NULL);
    return driver->launch_kernel_ex(&config, kernel->function, parameters, NULL);
}

/* A cluster lies within one GPC, whose number of SMs is no multiple of every size: fewer run at
 * once than SMs would be enough for. */
static CUresult count_clusters(const struct fp8_context *context, struct fp8_kernel *kernel)
{
    CUlaunchAttribute attributes[MOST_ATTRIBUTES];
    unsigned ctas = (unsigned)kernel->cluster * (unsigned)context->sms;
    CUlaunchConfig config = configuration(kernel, ctas, NULL, attributes);
    config.numAttrs = 1; /* the clusters */
    int count = 0;
    CUresult result = context->driver->max_active_clusters(&count, kernel->function, &config);
    if (result == CUDA_SUCCESS && count < 1)
        result = CUDA_ERROR_INVALID_CLUSTER_SIZE;
    kernel->most_clusters = count;
    fp8_log_write(&context->log, FP8_LOG_INFO, "kernel '%s': %d clusters of %d CTAs at once",
                  kernel->name, count, kernel->cluster);
    return result;
}

fp8_status fp8_kernel_load(const struct fp8_context *context, struct fp8_kernel *kernel,
                           const void *image)
{
    const struct fp8_driver *driver = context->driver;
    CUmodule module = NULL;
    CUfunction function = NULL;
    CUresult result = driver->module_load_data(&module, image);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "loading the cubin of kernel '%s'", kernel->name);
    kernel->module = module;
    result = driver->module_get_function(&function, module, kernel->entry);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "kernel '%s': looking up %s in its cubin",
                             kernel->name, kernel->entry);
    kernel->function = function;
    /* Loaded now: loaded by a launch it would block, and could deadlock beside a collective. */
    if (driver->func_load)
        result = driver->func_load(function);
    if (result == CUDA_SUCCESS && kernel->shared_bytes > DEFAULT_SHARED_BYTES)
        result = driver->func_set_attribute(
            function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel->shared_bytes);
    if (result == CUDA_SUCCESS && kernel->cluster > 1)
        result = count_clusters(context, kernel);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "preparing kernel '%s'", kernel->name);
    return check_parameters(context, kernel);
}

fp8_status fp8_kernel_share(const struct fp8_context *context, struct fp8_kernel *kernel,
                            const struct fp8_kernel *loaded)
{
    kernel->function = loaded->function;
    kernel->most_clusters = loaded->most_clusters;
    return check_parameters(context, kernel);
}

void fp8_kernel_unload(const struct fp8_context *context, struct fp8_kernel *kernel)
{
    if (kernel->module)
        (void)context->driver->module_unload(kernel->module);
    kernel->module = NULL;
    kernel->function = NULL;
}

int64_t fp8_kernel_grid(const struct fp8_context *context, const struct fp8_kernel *kernel,
                        const fp8_value *args, int32_t sms)
{
    const struct fp8_grid *grid = &kernel->grid;
    int64_t rows = args[grid->rows].i, cols = args[grid->cols].i, ctas;
    if (grid->rule == FP8_GRID_ELEMENTS)
        ctas = fp8_ceil_div(rows * cols, grid->tile_elements);
    else
        ctas = fp8_ceil_div(rows, grid->tile_rows) * fp8_ceil_div(cols, grid->tile_cols);
    if (grid->rule == FP8_GRID_CLUSTERS) {
        int64_t most = fp8_max_i64(1, sms / kernel->cluster);
        if (kernel->cluster > 1)
            most = fp8_min_i64(most, kernel->most_clusters);
        return kernel->cluster * fp8_min_i64(ctas, most);
    }
    if (grid->ctas_per_sm > 0 && (grid->persistent || sms < context->sms))
        ctas = fp8_min_i64(ctas, grid->ctas_per_sm * sms);
    if (grid->max_ctas > 0)
        ctas = fp8_min_i64(ctas, grid->max_ctas);
    ctas = fp8_min_i64(ctas, INT32_MAX / kernel->cluster * kernel->cluster);
    return fp8_round_up(ctas, kernel->cluster);
}

fp8_status fp8_kernel_launch(const struct fp8_context *context, const struct fp8_kernel *kernel,
                             int64_t ctas, void **parameters, fp8_stream stream)
{
    CUresult result = launch(context->driver, kernel, (unsigned)ctas, stream, parameters);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result,
                         "launching kernel '%s' with %lld CTAs of %d threads", kernel->name,
                         (long long)ctas, kernel->block);
}

fp8_status fp8_kernel_run(const struct fp8_context *context, const struct fp8_kernel *kernel,
                          const fp8_value *args, fp8_stream stream, int32_t sms)
{
    if (context->is_host)
        return fp8_host_run(context->pool, kernel->op, &kernel->semantics, args);
    int64_t ctas = fp8_kernel_grid(context, kernel, args, sms);
    if (ctas <= 0)
        return FP8_OK;
    void *parameters[FP8_OP_MAX_ARGS];
    for (int i = 0; i < kernel->arg_count; i++)
        parameters[i] = (void *)&args[kernel->arg_index[i]];
    return fp8_kernel_launch(context, kernel, ctas, parameters, stream);
}
