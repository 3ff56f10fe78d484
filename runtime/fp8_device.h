/*
 * fp8_device.h - memory, streams, events and the libraries that are opened at run time, for
 * programs without the CUDA runtime.
 *
 * The same calls on the host context use malloc and the CPU's clock, so one program serves both.
 */
#ifndef FP8_DEVICE_H
#define FP8_DEVICE_H

#include "fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 256-byte aligned, uninitialised. bytes = 0 gives a pointer that can be freed. Blocks.
 * FP8_ERR_MEMORY. */
FP8_API fp8_status fp8_memory_alloc(fp8_context *context, size_t bytes, void **memory);
FP8_API void fp8_memory_free(fp8_context *context, void *memory);
/* Any direction; stream-ordered. From or to pageable host memory it may block. */
FP8_API fp8_status fp8_memory_copy(fp8_context *context, void *target, const void *source,
                                   size_t bytes, fp8_stream stream);
FP8_API fp8_status fp8_memory_fill(fp8_context *context, void *target, uint8_t value, size_t bytes,
                                   fp8_stream stream);
/* A stream that waits for no other (CU_STREAM_NON_BLOCKING); NULL on the host. */
FP8_API fp8_status fp8_stream_create(fp8_context *context, fp8_stream *stream);
FP8_API void fp8_stream_destroy(fp8_context *context, fp8_stream stream);
/* Blocks until the stream's work is done and reports its errors. NULL is the default stream. */
FP8_API fp8_status fp8_stream_synchronize(fp8_context *context, fp8_stream stream);

FP8_API fp8_status fp8_event_create(fp8_context *context, fp8_event **event);
FP8_API void fp8_event_destroy(fp8_event *event);
FP8_API fp8_status fp8_event_record(fp8_event *event, fp8_stream stream);
/* Work enqueued on `stream` from now on waits for the event, which may be of another stream;
 * nothing to wait for if it was never recorded. */
FP8_API fp8_status fp8_event_wait(fp8_event *event, fp8_stream stream);
/* Seconds from start to end, both recorded; blocks until end has happened. */
FP8_API fp8_status fp8_event_seconds(fp8_event *start, fp8_event *end, double *seconds);

/* ---- the libraries that are opened at run time ----------------------------------------------- */

typedef enum fp8_library {
    FP8_LIBRARY_CUDA = 0,
    FP8_LIBRARY_CUBLASLT = 1,
    FP8_LIBRARY_NCCL = 2,
} fp8_library;

/* Opens a library as the runtime does (a copy already in the process, then the soname, then
 * FP8_CUBLASLT_PATH or FP8_NCCL_PATH) and looks up a symbol, so that a program shares the runtime's
 * copy. symbol may be NULL to ask only whether the library is there. *path (may be NULL) is valid
 * for the process's life.
 * FP8_ERR_LIBRARY: what was searched and what is missing. */
FP8_API fp8_status fp8_library_symbol(fp8_library library, const char *symbol, void **address,
                                      const char **path);

#ifdef __cplusplus
}
#endif
#endif /* FP8_DEVICE_H */
