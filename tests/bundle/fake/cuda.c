/*
 * cuda.c - the fake libcuda: see fake.h. Entry points carry the real, versioned symbol names.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#include "fake_driver.h"

#pragma GCC diagnostic ignored "-Wmissing-prototypes"

static struct fake_cuda state = {
    .device_count = 1, .major = 9, .minor = 0, .may = fake_may, .record = fake_keep
};
static int primary; /* its address is the primary context */
static _Thread_local CUcontext stack[8];
static _Thread_local int height;

EXPORT struct fake_cuda *fake_cuda_state(void);
struct fake_cuda *fake_cuda_state(void)
{
    return &state;
}

bool fake_fails(void)
{
    int64_t call = __atomic_add_fetch(&state.calls, 1, __ATOMIC_RELAXED);
    return call == state.fail_at;
}

bool fake_is_current(void)
{
    if (height > 0 && stack[height - 1] == (CUcontext)(void *)&primary)
        return true;
    __atomic_add_fetch(&state.misuse, 1, __ATOMIC_RELAXED);
    return false;
}

static void count(int64_t *counter, int64_t by)
{
    __atomic_add_fetch(counter, by, __ATOMIC_RELAXED);
}

EXPORT CUresult fake_init(unsigned flags) __asm__("cuInit");
CUresult fake_init(unsigned flags)
{
    MAY_FAIL();
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult fake_version(int *version) __asm__("cuDriverGetVersion");
CUresult fake_version(int *version)
{
    MAY_FAIL();
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_error_name(CUresult error, const char **text) __asm__("cuGetErrorName");
CUresult fake_error_name(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_error_string(CUresult error, const char **text) __asm__("cuGetErrorString");
CUresult fake_error_string(CUresult error, const char **text)
{
    (void)error;
    *text = "an error of the fake driver";
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_device(CUdevice *device, int ordinal) __asm__("cuDeviceGet");
CUresult fake_device(CUdevice *device, int ordinal)
{
    MAY_FAIL();
    *device = ordinal;
    return ordinal < state.device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult fake_device_count(int *number) __asm__("cuDeviceGetCount");
CUresult fake_device_count(int *number)
{
    MAY_FAIL();
    *number = state.device_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_attribute(int *value, CUdevice_attribute attribute,
                               CUdevice device) __asm__("cuDeviceGetAttribute");
CUresult fake_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    MAY_FAIL();
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = state.major;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = state.minor;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = FAKE_SMS;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult fake_name(char *name, int size, CUdevice device) __asm__("cuDeviceGetName");
CUresult fake_name(char *name, int size, CUdevice device)
{
    (void)device;
    MAY_FAIL();
    strncpy(name, "a GPU that is not there", (size_t)size);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_total(size_t *bytes, CUdevice device) __asm__("cuDeviceTotalMem_v2");
CUresult fake_total(size_t *bytes, CUdevice device)
{
    (void)device;
    MAY_FAIL();
    *bytes = (size_t)1 << 30;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_retain(CUcontext *context,
                            CUdevice device) __asm__("cuDevicePrimaryCtxRetain");
CUresult fake_retain(CUcontext *context, CUdevice device)
{
    (void)device;
    MAY_FAIL();
    count(&state.live, 1);
    *context = (CUcontext)(void *)&primary;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_release(CUdevice device) __asm__("cuDevicePrimaryCtxRelease_v2");
CUresult fake_release(CUdevice device)
{
    (void)device;
    count(&state.live, -1);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_get_current(CUcontext *context) __asm__("cuCtxGetCurrent");
CUresult fake_get_current(CUcontext *context)
{
    *context = height > 0 ? stack[height - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_push(CUcontext context) __asm__("cuCtxPushCurrent_v2");
CUresult fake_push(CUcontext context)
{
    MAY_FAIL();
    if (height == 8)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[height++] = context;
    count(&state.depth, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_pop(CUcontext *context) __asm__("cuCtxPopCurrent_v2");
CUresult fake_pop(CUcontext *context)
{
    if (height == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--height];
    count(&state.depth, -1);
    return CUDA_SUCCESS;
}

/* ---- modules: a function is its name ---- */

struct module {
    char *names[4];
    int count;
};

EXPORT CUresult fake_load(CUmodule *module, const void *image) __asm__("cuModuleLoadData");
CUresult fake_load(CUmodule *module, const void *image)
{
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    NEEDS_CONTEXT();
    if (strncmp(image, "fake cubin", 10) != 0)
        return CUDA_ERROR_INVALID_IMAGE;
    *module = calloc(1, sizeof(struct module));
    if (!*module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    count(&state.live, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_unload(CUmodule module) __asm__("cuModuleUnload");
CUresult fake_unload(CUmodule module)
{
    MAY_NOT_BE_CAPTURED();
    NEEDS_CONTEXT();
    struct module *loaded = (struct module *)module;
    for (int i = 0; i < loaded->count; i++)
        free(loaded->names[i]);
    free(loaded);
    count(&state.live, -1);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_function(CUfunction *function, CUmodule module,
                              const char *name) __asm__("cuModuleGetFunction");
CUresult fake_function(CUfunction *function, CUmodule module, const char *name)
{
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    struct module *loaded = (struct module *)module;
    if (loaded->count == 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *copy = loaded->names[loaded->count++] = strdup(name);
    *function = (CUfunction)(void *)copy;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_set_attribute(CUfunction function, CUfunction_attribute attribute,
                                   int value) __asm__("cuFuncSetAttribute");
CUresult fake_set_attribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_func_load(CUfunction function) __asm__("cuFuncLoad");
CUresult fake_func_load(CUfunction function)
{
    (void)function;
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_param_info(CUfunction function, size_t index, size_t *offset,
                                size_t *size) __asm__("cuFuncGetParamInfo");
CUresult fake_param_info(CUfunction function, size_t index, size_t *offset, size_t *size)
{
    if (!state.parameter)
        return CUDA_ERROR_NOT_SUPPORTED;
    *offset = index * 8;
    *size = state.parameter((const char *)function, index);
    return *size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A launch as a graph keeps it: the parameters by value. */
struct kept_launch {
    char entry[128];
    unsigned grid, block;
    size_t count;
    _Alignas(64) unsigned char values[24][128];
};

static void run_launch(void *data)
{
    struct kept_launch *kept = data;
    void *parameters[24];
    for (size_t i = 0; i < kept->count; i++)
        parameters[i] = kept->values[i];
    if (state.launch)
        state.launch(kept->entry, kept->grid, kept->block, parameters);
}

static bool record_launch(const char *entry, unsigned grid, unsigned block, CUstream stream,
                          void **parameters)
{
    struct kept_launch kept = { .grid = grid, .block = block };
    snprintf(kept.entry, sizeof kept.entry, "%s", entry);
    size_t bytes;
    while (state.parameter && (bytes = state.parameter(entry, kept.count)) > 0) {
        if (kept.count == 24 || bytes > 128)
            abort();
        memcpy(kept.values[kept.count], parameters[kept.count], bytes);
        kept.count++;
    }
    return fake_keep(stream, run_launch, &kept, sizeof kept);
}

EXPORT CUresult fake_launch_kernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz,
                                   unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                   CUstream stream, void **parameters,
                                   void **extra) __asm__("cuLaunchKernel");
CUresult fake_launch_kernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, CUstream stream,
                            void **parameters, void **extra)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    if (gx == 0 || gx > INT32_MAX || gy != 1 || gz != 1 || bx == 0 || bx > 1024 || by != 1 ||
        bz != 1 || extra)
        return CUDA_ERROR_INVALID_VALUE;
    count(&state.launches, 1);
    state.last_grid = gx;
    state.last_cluster = 1;
    state.last_overlaps = false;
    state.last_shared = shared;
    snprintf(state.last_entry, sizeof state.last_entry, "%s", (const char *)function);
    if (state.captured && record_launch((const char *)function, gx, bx, stream, parameters))
        return CUDA_SUCCESS;
    if (state.launch)
        state.launch((const char *)function, gx, bx, parameters);
    return CUDA_SUCCESS;
}

EXPORT CUresult
fake_max_active_clusters(int *count, CUfunction function,
                         const CUlaunchConfig *config) __asm__("cuOccupancyMaxActiveClusters");
CUresult fake_max_active_clusters(int *count, CUfunction function, const CUlaunchConfig *config)
{
    (void)function;
    MAY_FAIL();
    NEEDS_CONTEXT();
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *attribute = &config->attrs[i];
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            *count = FAKE_GPCS * (FAKE_SMS / FAKE_GPCS / (int)attribute->value.clusterDim.x);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult fake_launch_ex(const CUlaunchConfig *config, CUfunction function, void **parameters,
                               void **extra) __asm__("cuLaunchKernelEx");
CUresult fake_launch_ex(const CUlaunchConfig *config, CUfunction function, void **parameters,
                        void **extra)
{
    unsigned cluster = 1;
    bool overlaps = false, cooperative = false;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *attribute = &config->attrs[i];
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            cluster = attribute->value.clusterDim.x;
        else if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            overlaps = attribute->value.programmaticStreamSerializationAllowed;
        else if (attribute->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && attribute->value.cooperative)
            cooperative = true;
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (config->numAttrs == 0 || cluster == 0 || config->gridDimX % cluster != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (cooperative && config->gridDimX > FAKE_SMS * 2)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    CUresult result =
        fake_launch_kernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                           config->blockDimX, config->blockDimY, config->blockDimZ,
                           config->sharedMemBytes, config->hStream, parameters, extra);
    state.last_cluster = cluster;
    state.last_overlaps = overlaps;
    count(&state.cooperative, cooperative);
    return result;
}

/* ---- tensor maps ---- */

static int64_t element_bytes(CUtensorMapDataType type)
{
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    default:
        return 0;
    }
}

/* What CUDA documents of cuTensorMapEncodeTiled, and that rows do not overlap. */
static bool is_legal(const struct fake_map *map, const cuuint32_t *steps)
{
    const int64_t most = (int64_t)1 << 32, pitch_most = (int64_t)1 << 40;
    int64_t element = element_bytes((CUtensorMapDataType)map->type);
    return element > 0 && map->data && (uintptr_t)map->data % 16 == 0 && map->cols > 0 &&
           map->cols <= most && map->rows > 0 && map->rows <= most && map->pitch % 16 == 0 &&
           map->pitch < pitch_most && map->pitch >= map->cols * element && map->box_cols > 0 &&
           map->box_cols <= 256 && map->box_rows > 0 && map->box_rows <= 256 &&
           map->box_cols * element % 16 == 0 && map->box_cols * element <= 128 && steps[0] == 1 &&
           steps[1] == 1;
}

EXPORT CUresult fake_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                            const cuuint64_t *extents, const cuuint64_t *pitches,
                            const cuuint32_t *box, const cuuint32_t *steps,
                            CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                            CUtensorMapL2promotion promotion,
                            CUtensorMapFloatOOBfill fill) __asm__("cuTensorMapEncodeTiled");
CUresult fake_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                     const cuuint64_t *extents, const cuuint64_t *pitches, const cuuint32_t *box,
                     const cuuint32_t *steps, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                     CUtensorMapFloatOOBfill fill)
{
    MAY_FAIL();
    struct fake_map made = { FAKE_MAP_MAGIC,      data,
                             (int64_t)extents[0], (int64_t)extents[1],
                             (int64_t)pitches[0], (int32_t)type,
                             (int32_t)box[0],     (int32_t)box[1] };
    if ((uintptr_t)map % 64 != 0 || rank != 2 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        swizzle != CU_TENSOR_MAP_SWIZZLE_128B || promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || !is_legal(&made, steps)) {
        count(&state.rules, 1);
        return CUDA_ERROR_INVALID_VALUE;
    }
    count(&state.maps, 1);
    memset(map, 0, sizeof *map);
    memcpy(map, &made, sizeof made);
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

EXPORT CUresult fake_alloc(CUdeviceptr *pointer, size_t bytes) __asm__("cuMemAlloc_v2");
CUresult fake_alloc(CUdeviceptr *pointer, size_t bytes)
{
    void *memory = NULL;
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    NEEDS_CONTEXT();
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (posix_memalign(&memory, 256, bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    count(&state.live, 1);
    *pointer = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_free(CUdeviceptr pointer) __asm__("cuMemFree_v2");
CUresult fake_free(CUdeviceptr pointer)
{
    MAY_NOT_BE_CAPTURED();
    NEEDS_CONTEXT();
    free((void *)(uintptr_t)pointer);
    count(&state.live, -1);
    return CUDA_SUCCESS;
}

/* Lines from memory, or of one word. */
struct kept_lines {
    CUdeviceptr target, source;
    size_t target_pitch, source_pitch, width, height;
    uint32_t word; /* where source is 0 */
};

static void run_lines(void *data)
{
    const struct kept_lines *kept = data;
    for (size_t i = 0; i < kept->height; i++) {
        unsigned char *to = (unsigned char *)(uintptr_t)kept->target + i * kept->target_pitch;
        if (kept->source)
            memmove(to, (const char *)(uintptr_t)kept->source + i * kept->source_pitch,
                    kept->width);
        for (size_t j = 0; j < kept->width && !kept->source; j++)
            to[j] = (unsigned char)(kept->word >> j % 4 * 8);
    }
}

static CUresult do_lines(CUstream stream, struct kept_lines lines)
{
    if (!fake_keep(stream, run_lines, &lines, sizeof lines))
        run_lines(&lines);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_copy(CUdeviceptr target, CUdeviceptr source, size_t bytes,
                          CUstream stream) __asm__("cuMemcpyAsync");
CUresult fake_copy(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    count(&state.copies, 1);
    return do_lines(stream, (struct kept_lines){ target, source, 0, 0, bytes, 1, 0 });
}

EXPORT CUresult fake_copy2d(const CUDA_MEMCPY2D *copy,
                            CUstream stream) __asm__("cuMemcpy2DAsync_v2");
CUresult fake_copy2d(const CUDA_MEMCPY2D *copy, CUstream stream)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    if (copy->srcMemoryType != CU_MEMORYTYPE_DEVICE ||
        copy->dstMemoryType != CU_MEMORYTYPE_DEVICE || copy->srcPitch < copy->WidthInBytes ||
        copy->dstPitch < copy->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    count(&state.copies, 1);
    return do_lines(stream,
                    (struct kept_lines){ copy->dstDevice, copy->srcDevice, copy->dstPitch,
                                         copy->srcPitch, copy->WidthInBytes, copy->Height, 0 });
}

EXPORT CUresult fake_set8(CUdeviceptr target, unsigned char value, size_t bytes,
                          CUstream stream) __asm__("cuMemsetD8Async");
CUresult fake_set8(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    count(&state.memsets, 1);
    return do_lines(stream, (struct kept_lines){ target, 0, 0, 0, bytes, 1, value * 0x01010101u });
}

EXPORT CUresult fake_set32(CUdeviceptr target, unsigned value, size_t words,
                           CUstream stream) __asm__("cuMemsetD32Async");
CUresult fake_set32(CUdeviceptr target, unsigned value, size_t words, CUstream stream)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    if (target % 4)
        return CUDA_ERROR_INVALID_VALUE;
    count(&state.memsets, 1);
    return do_lines(stream, (struct kept_lines){ target, 0, 0, 0, words * 4, 1, value });
}

EXPORT CUresult fake_set2d(CUdeviceptr target, size_t pitch, unsigned char value, size_t width,
                           size_t height_, CUstream stream) __asm__("cuMemsetD2D8Async");
CUresult fake_set2d(CUdeviceptr target, size_t pitch, unsigned char value, size_t width,
                    size_t height_, CUstream stream)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    if (pitch < width || pitch > INT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    count(&state.memsets, 1);
    return do_lines(
        stream, (struct kept_lines){ target, 0, pitch, 0, width, height_, value * 0x01010101u });
}

/* ---- streams and events ---- */

static CUresult make(void **object)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    *object = calloc(1, sizeof(struct fake_event));
    if (!*object)
        return CUDA_ERROR_OUT_OF_MEMORY;
    count(&state.live, 1);
    return CUDA_SUCCESS;
}

static CUresult unmake(void *object)
{
    NEEDS_CONTEXT();
    free(object);
    count(&state.live, -1);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_stream(CUstream *stream, unsigned flags) __asm__("cuStreamCreate");
CUresult fake_stream(CUstream *stream, unsigned flags)
{
    (void)flags;
    return make((void **)stream);
}

EXPORT CUresult fake_priorities(int *least, int *greatest) __asm__("cuCtxGetStreamPriorityRange");
CUresult fake_priorities(int *least, int *greatest)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_stream_first(CUstream *stream, unsigned flags,
                                  int priority) __asm__("cuStreamCreateWithPriority");
CUresult fake_stream_first(CUstream *stream, unsigned flags, int priority)
{
    (void)flags;
    return priority < -5 || priority > 0 ? CUDA_ERROR_INVALID_VALUE : make((void **)stream);
}

EXPORT CUresult fake_stream_destroy(CUstream stream) __asm__("cuStreamDestroy_v2");
CUresult fake_stream_destroy(CUstream stream)
{
    return unmake(stream);
}

EXPORT CUresult fake_synchronize(CUstream stream) __asm__("cuStreamSynchronize");
CUresult fake_synchronize(CUstream stream)
{
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    NEEDS_CONTEXT();
    if (fake_breaks(stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_stream_query(CUstream stream) __asm__("cuStreamQuery");
CUresult fake_stream_query(CUstream stream)
{
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    NEEDS_CONTEXT();
    if (fake_breaks(stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return state.busy && state.busy() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult fake_stream_wait(CUstream stream, CUevent event,
                                 unsigned flags) __asm__("cuStreamWaitEvent");
CUresult fake_stream_wait(CUstream stream, CUevent event, unsigned flags)
{
    (void)flags;
    MAY_FAIL();
    NEEDS_CONTEXT();
    return fake_wait(stream, (struct fake_event *)event);
}

EXPORT CUresult fake_event(CUevent *event, unsigned flags) __asm__("cuEventCreate");
CUresult fake_event(CUevent *event, unsigned flags)
{
    (void)flags;
    return make((void **)event);
}

EXPORT CUresult fake_event_destroy(CUevent event) __asm__("cuEventDestroy_v2");
CUresult fake_event_destroy(CUevent event)
{
    return unmake(event);
}

EXPORT CUresult fake_record(CUevent event, CUstream stream) __asm__("cuEventRecord");
CUresult fake_record(CUevent event, CUstream stream)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    ENQUEUED(stream);
    fake_mark(stream, (struct fake_event *)event);
    return CUDA_SUCCESS;
}

/* An event behind work that hangs has not happened as long as it does. */
EXPORT CUresult fake_event_query(CUevent event) __asm__("cuEventQuery");
CUresult fake_event_query(CUevent event)
{
    const struct fake_event *made = (const struct fake_event *)event;
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    if (made->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    return made->busy && state.busy && state.busy() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult fake_event_synchronize(CUevent event) __asm__("cuEventSynchronize");
CUresult fake_event_synchronize(CUevent event)
{
    MAY_FAIL();
    MAY_NOT_BE_CAPTURED();
    return ((const struct fake_event *)event)->capture ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

EXPORT CUresult fake_elapsed(float *milliseconds, CUevent start,
                             CUevent end) __asm__("cuEventElapsedTime");
CUresult fake_elapsed(float *milliseconds, CUevent start, CUevent end)
{
    MAY_FAIL();
    if (((const struct fake_event *)start)->capture || ((const struct fake_event *)end)->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    *milliseconds = 1.0f;
    return CUDA_SUCCESS;
}
