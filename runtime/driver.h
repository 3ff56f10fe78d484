/*
 * driver.h - the entry points of libcuda that the runtime uses, in one table.
 *
 * The library is opened by the first context, once for the process, and stays open: a driver cannot
 * be reloaded. Symbols carry their versioned names here, so that the table means the same with
 * every toolkit's cuda.h. Types come from cuda.h; nothing links libcuda.
 */
#ifndef FP8_DRIVER_H
#define FP8_DRIVER_H

#include <cuda.h>

#include "runtime/check.h"
#include "runtime/fp8_device.h"

/* X(member, symbol, parameters) */
#define FP8_DRIVER_TABLE(X)                                                                        \
    X(init, "cuInit", (unsigned))                                                                  \
    X(driver_get_version, "cuDriverGetVersion", (int *))                                           \
    X(get_error_name, "cuGetErrorName", (CUresult, const char **))                                 \
    X(get_error_string, "cuGetErrorString", (CUresult, const char **))                             \
    X(device_get, "cuDeviceGet", (CUdevice *, int))                                                \
    X(device_get_count, "cuDeviceGetCount", (int *))                                               \
    X(device_get_attribute, "cuDeviceGetAttribute", (int *, CUdevice_attribute, CUdevice))         \
    X(device_get_name, "cuDeviceGetName", (char *, int, CUdevice))                                 \
    X(device_total_mem, "cuDeviceTotalMem_v2", (size_t *, CUdevice))                               \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))                         \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                                 \
    X(ctx_get_current, "cuCtxGetCurrent", (CUcontext *))                                           \
    X(ctx_push, "cuCtxPushCurrent_v2", (CUcontext))                                                \
    X(ctx_pop, "cuCtxPopCurrent_v2", (CUcontext *))                                                \
    X(module_load_data, "cuModuleLoadData", (CUmodule *, const void *))                            \
    X(module_unload, "cuModuleUnload", (CUmodule))                                                 \
    X(module_get_function, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))          \
    X(func_set_attribute, "cuFuncSetAttribute", (CUfunction, CUfunction_attribute, int))           \
    X(launch_kernel, "cuLaunchKernel",                                                             \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
       void **, void **))                                                                          \
    X(tensor_map_encode, "cuTensorMapEncodeTiled",                                                 \
      (CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,                 \
       const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,          \
       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill))                       \
    X(max_active_clusters, "cuOccupancyMaxActiveClusters",                                         \
      (int *, CUfunction, const CUlaunchConfig *))                                                 \
    X(launch_kernel_ex, "cuLaunchKernelEx",                                                        \
      (const CUlaunchConfig *, CUfunction, void **, void **))                                      \
    X(mem_alloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                         \
    X(mem_free, "cuMemFree_v2", (CUdeviceptr))                                                     \
    X(memcpy_async, "cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, size_t, CUstream))                 \
    X(memcpy_2d, "cuMemcpy2DAsync_v2", (const CUDA_MEMCPY2D *, CUstream))                          \
    X(memset_d8, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))                \
    X(memset_d32, "cuMemsetD32Async", (CUdeviceptr, unsigned, size_t, CUstream))                   \
    X(memset_2d_d8, "cuMemsetD2D8Async",                                                           \
      (CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream))                              \
    X(stream_create, "cuStreamCreate", (CUstream *, unsigned))                                     \
    X(priority_range, "cuCtxGetStreamPriorityRange", (int *, int *))                               \
    X(stream_create_first, "cuStreamCreateWithPriority", (CUstream *, unsigned, int))              \
    X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                                            \
    X(stream_synchronize, "cuStreamSynchronize", (CUstream))                                       \
    X(stream_query, "cuStreamQuery", (CUstream))                                                   \
    X(stream_wait_event, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                       \
    X(stream_is_capturing, "cuStreamIsCapturing", (CUstream, CUstreamCaptureStatus *))             \
    X(stream_capture_info, "cuStreamGetCaptureInfo_v2",                                            \
      (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **,           \
       size_t *))                                                                                  \
    X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (CUstreamCaptureMode *))         \
    X(event_create, "cuEventCreate", (CUevent *, unsigned))                                        \
    X(event_destroy, "cuEventDestroy_v2", (CUevent))                                               \
    X(event_record, "cuEventRecord", (CUevent, CUstream))                                          \
    X(event_query, "cuEventQuery", (CUevent))                                                      \
    X(event_synchronize, "cuEventSynchronize", (CUevent))                                          \
    X(event_elapsed_time, "cuEventElapsedTime", (float *, CUevent, CUevent))

/* Newer drivers only; NULL if missing. */
#define FP8_DRIVER_OPTIONAL(X)                                                                     \
    X(func_load, "cuFuncLoad", (CUfunction))                                                       \
    X(func_get_param_info, "cuFuncGetParamInfo", (CUfunction, size_t, size_t *, size_t *))

struct fp8_driver {
#define X(member, symbol, parameters) CUresult(*member) parameters;
    FP8_DRIVER_TABLE(X)
    FP8_DRIVER_OPTIONAL(X)
#undef X
};

/* The process's table, opened by the first call. FP8_ERR_LIBRARY: what was searched;
 * FP8_ERR_DEVICE: the library is there but no driver. */
fp8_status fp8_driver_get(const struct fp8_driver **driver);

/* "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)" behind the words of `what`; the status is
 * FP8_ERR_MEMORY for want of memory and FP8_ERR_CUDA otherwise. */
fp8_status fp8_fail_cuda(const struct fp8_driver *driver, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4), cold));

/* fp8_context_enter without its checks and its sentence. */
struct fp8_context;
CUresult fp8_context_push(const struct fp8_context *context, bool *pushed);

/* The libraries of this process, for the runtime and fp8_library_symbol. The handle stays open. */
struct fp8_dynlib;
fp8_status fp8_library_open(fp8_library library, const struct fp8_dynlib **opened);

#endif
