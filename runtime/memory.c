/*
 * memory.c - memory, streams and time: the public calls, and the fills and copies that passes use.
 *
 * One program serves both backends: on the host context memory is malloc's, streams are NULL and
 * every call is done when it returns, so that events are readings of the clock. On CUDA all is
 * enqueued on the caller's stream.
 */
#include <stdint.h>
#include <string.h>

#include "runtime/driver.h"
#include "runtime/internal.h"

struct fp8_event {
    struct fp8_context *context;
    CUevent event; /* CUDA */
    bool recorded;
    double time; /* host: on the clock */
};

static CUdeviceptr device_pointer(const void *memory)
{
    return (CUdeviceptr)(uintptr_t)memory;
}

static fp8_status null_argument(const char *call, const char *name)
{
    return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL", call, name);
}

/* ---- what passes use ---- */

/* The driver takes a pitch of up to 2^31 - 1 bytes; beyond that row by row. */
static CUresult zero_2d_cuda(const struct fp8_driver *driver, void *target, int64_t pitch,
                             int64_t width, int64_t rows, CUstream stream)
{
    CUdeviceptr at = device_pointer(target);
    if (pitch == width || rows == 1)
        return driver->memset_d8(at, 0, (size_t)(width * rows), stream);
    if (pitch <= INT32_MAX)
        return driver->memset_2d_d8(at, (size_t)pitch, 0, (size_t)width, (size_t)rows, stream);
    CUresult result = CUDA_SUCCESS;
    for (int64_t i = 0; i < rows && result == CUDA_SUCCESS; i++)
        result = driver->memset_d8(at + (CUdeviceptr)(i * pitch), 0, (size_t)width, stream);
    return result;
}

fp8_status fp8_zero_2d(const struct fp8_context *context, void *target, int64_t pitch,
                       int64_t width, int64_t rows, fp8_stream stream)
{
    if (width <= 0 || rows <= 0)
        return FP8_OK;
    if (context->is_host) {
        for (int64_t i = 0; i < rows; i++)
            memset((char *)target + i * pitch, 0, (size_t)width);
        return FP8_OK;
    }
    CUresult result = zero_2d_cuda(context->driver, target, pitch, width, rows, stream);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "zeroing %lld x %lld bytes", (long long)rows,
                         (long long)width);
}

fp8_status fp8_fill_words(const struct fp8_context *context, void *target, uint32_t word,
                          int64_t count, fp8_stream stream)
{
    if (count == 0)
        return FP8_OK;
    if (context->is_host) {
        uint32_t *words = target;
        for (int64_t i = 0; i < count; i++)
            words[i] = word;
        return FP8_OK;
    }
    CUresult result =
        context->driver->memset_d32(device_pointer(target), word, (size_t)count, stream);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "filling %lld words", (long long)count);
}

fp8_status fp8_copy_bytes(const struct fp8_context *context, void *target, const void *source,
                          size_t bytes, fp8_stream stream)
{
    if (bytes == 0)
        return FP8_OK;
    if (context->is_host) {
        memmove(target, source, bytes);
        return FP8_OK;
    }
    CUresult result = context->driver->memcpy_async(device_pointer(target), device_pointer(source),
                                                    bytes, stream);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "copying %zu bytes", bytes);
}

fp8_status fp8_copy_2d(const struct fp8_context *context, void *target, int64_t target_pitch,
                       const void *source, int64_t source_pitch, int64_t width, int64_t rows,
                       fp8_stream stream)
{
    if (width <= 0 || rows <= 0)
        return FP8_OK;
    if (context->is_host) {
        for (int64_t i = 0; i < rows; i++)
            memmove((char *)target + i * target_pitch, (const char *)source + i * source_pitch,
                    (size_t)width);
        return FP8_OK;
    }
    const CUDA_MEMCPY2D copy = {
        .srcMemoryType = CU_MEMORYTYPE_DEVICE,
        .srcDevice = device_pointer(source),
        .srcPitch = (size_t)source_pitch,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE,
        .dstDevice = device_pointer(target),
        .dstPitch = (size_t)target_pitch,
        .WidthInBytes = (size_t)width,
        .Height = (size_t)rows,
    };
    CUresult result = context->driver->memcpy_2d(&copy, stream);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "copying %lld x %lld bytes", (long long)rows,
                         (long long)width);
}

/* ---- memory ---- */

fp8_status fp8_memory_alloc(fp8_context *context, size_t bytes, void **memory)
{
    if (!memory)
        return null_argument("memory_alloc", "memory");
    *memory = NULL;
    if (!context)
        return null_argument("memory_alloc", "context");
    if (context->is_host) {
        *memory = fp8_allocate_aligned(256, bytes);
        return *memory ? FP8_OK : fp8_fail_memory("memory_alloc", bytes);
    }
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(context, "memory_alloc", NULL, &entered));
    CUdeviceptr pointer = 0;
    CUresult result = context->driver->mem_alloc(&pointer, bytes ? bytes : 1);
    fp8_uncaptured_leave(context, &entered);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(context->driver, result, "memory_alloc: %zu bytes", bytes);
    *memory = (void *)(uintptr_t)pointer;
    return FP8_OK;
}

void fp8_memory_free(fp8_context *context, void *memory)
{
    if (!context || !memory)
        return;
    if (context->is_host) {
        fp8_release(memory);
        return;
    }
    struct fp8_uncaptured entered;
    if (!fp8_release_enter(context, &entered))
        return;
    (void)context->driver->mem_free(device_pointer(memory));
    fp8_uncaptured_leave(context, &entered);
}

fp8_status fp8_memory_copy(fp8_context *context, void *target, const void *source, size_t bytes,
                           fp8_stream stream)
{
    if (!context)
        return null_argument("memory_copy", "context");
    if (bytes && !target)
        return null_argument("memory_copy", "target");
    if (bytes && !source)
        return null_argument("memory_copy", "source");
    bool pushed;
    FP8_TRY(fp8_context_enter(context, &pushed));
    fp8_status status = fp8_copy_bytes(context, target, source, bytes, stream);
    fp8_context_leave(context, pushed);
    return status;
}

fp8_status fp8_memory_fill(fp8_context *context, void *target, uint8_t value, size_t bytes,
                           fp8_stream stream)
{
    if (!context)
        return null_argument("memory_fill", "context");
    if (bytes && !target)
        return null_argument("memory_fill", "target");
    if (bytes == 0)
        return FP8_OK;
    if (context->is_host) {
        memset(target, value, bytes);
        return FP8_OK;
    }
    bool pushed;
    FP8_TRY(fp8_context_enter(context, &pushed));
    CUresult result = context->driver->memset_d8(device_pointer(target), value, bytes, stream);
    fp8_context_leave(context, pushed);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "memory_fill: %zu bytes", bytes);
}

/* ---- streams ---- */

fp8_status fp8_stream_create(fp8_context *context, fp8_stream *stream)
{
    if (!stream)
        return null_argument("stream_create", "stream");
    *stream = NULL;
    if (!context)
        return null_argument("stream_create", "context");
    if (context->is_host)
        return FP8_OK;
    bool pushed;
    FP8_TRY(fp8_context_enter(context, &pushed));
    CUstream made = NULL;
    CUresult result = context->driver->stream_create(&made, CU_STREAM_NON_BLOCKING);
    fp8_context_leave(context, pushed);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(context->driver, result, "stream_create");
    *stream = made;
    return FP8_OK;
}

void fp8_stream_destroy(fp8_context *context, fp8_stream stream)
{
    if (!context || context->is_host || !stream)
        return;
    struct fp8_uncaptured entered;
    if (!fp8_release_enter(context, &entered))
        return;
    (void)context->driver->stream_destroy(stream);
    fp8_uncaptured_leave(context, &entered);
}

fp8_status fp8_stream_synchronize(fp8_context *context, fp8_stream stream)
{
    if (!context)
        return null_argument("stream_synchronize", "context");
    if (context->is_host)
        return FP8_OK;
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(context, "stream_synchronize", stream, &entered));
    CUresult result = context->driver->stream_synchronize(stream);
    fp8_uncaptured_leave(context, &entered);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(context->driver, result, "stream_synchronize");
}

/* ---- time ---- */

fp8_status fp8_event_create(fp8_context *context, fp8_event **event)
{
    if (!event)
        return null_argument("event_create", "event");
    *event = NULL;
    if (!context)
        return null_argument("event_create", "context");
    struct fp8_event *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_fail_memory("an event", sizeof *made);
    made->context = context;
    fp8_status status = FP8_OK;
    bool pushed = false;
    if (!context->is_host && (status = fp8_context_enter(context, &pushed)) == FP8_OK) {
        CUresult result = context->driver->event_create(&made->event, CU_EVENT_DEFAULT);
        fp8_context_leave(context, pushed);
        if (result != CUDA_SUCCESS)
            status = fp8_fail_cuda(context->driver, result, "event_create");
    }
    if (status == FP8_OK)
        *event = made;
    else
        fp8_release(made);
    return status;
}

void fp8_event_destroy(fp8_event *event)
{
    if (!event)
        return;
    struct fp8_uncaptured entered;
    if (event->event && fp8_release_enter(event->context, &entered)) {
        (void)event->context->driver->event_destroy(event->event);
        fp8_uncaptured_leave(event->context, &entered);
    }
    fp8_release(event);
}

fp8_status fp8_event_record(fp8_event *event, fp8_stream stream)
{
    if (!event)
        return null_argument("event_record", "event");
    if (event->context->is_host) {
        event->time = fp8_clock();
        event->recorded = true;
        return FP8_OK;
    }
    bool pushed;
    FP8_TRY(fp8_context_enter(event->context, &pushed));
    CUresult result = event->context->driver->event_record(event->event, stream);
    fp8_context_leave(event->context, pushed);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(event->context->driver, result, "event_record");
    event->recorded = true;
    return FP8_OK;
}

fp8_status fp8_event_wait(fp8_event *event, fp8_stream stream)
{
    if (!event)
        return null_argument("event_wait", "event");
    if (event->context->is_host || !event->recorded)
        return FP8_OK;
    bool pushed;
    FP8_TRY(fp8_context_enter(event->context, &pushed));
    CUresult result = event->context->driver->stream_wait_event(stream, event->event, 0);
    fp8_context_leave(event->context, pushed);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(event->context->driver, result, "event_wait");
}

fp8_status fp8_event_seconds(fp8_event *start, fp8_event *end, double *seconds)
{
    if (!seconds)
        return null_argument("event_seconds", "seconds");
    *seconds = 0;
    if (!start || !end)
        return null_argument("event_seconds", start ? "end" : "start");
    if (!start->recorded || !end->recorded)
        return fp8_fail(FP8_ERR_ARGUMENT, "event_seconds: %s was not recorded",
                        start->recorded ? "end" : "start");
    if (start->context->is_host != end->context->is_host)
        return fp8_fail(FP8_ERR_ARGUMENT, "event_seconds: the events are of different contexts");
    if (start->context->is_host) {
        *seconds = end->time - start->time;
        return FP8_OK;
    }
    const struct fp8_driver *driver = start->context->driver;
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(start->context, NULL, NULL, &entered));
    float milliseconds = 0;
    CUresult result = driver->event_synchronize(end->event);
    if (result == CUDA_SUCCESS)
        result = driver->event_elapsed_time(&milliseconds, start->event, end->event);
    fp8_uncaptured_leave(start->context, &entered);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "event_seconds");
    *seconds = milliseconds * 1e-3;
    return FP8_OK;
}
