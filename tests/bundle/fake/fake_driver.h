/*
 * fake_driver.h - what the parts of the fake libcuda share: cuda.c and capture.c.
 */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <cuda.h>

#include "fake.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT struct fake_cuda *fake_cuda_state(void);

bool fake_fails(void);      /* this call, by its number */
bool fake_is_current(void); /* counts a misuse if not */
bool fake_may(void);        /* as fake_cuda.may */

#define MAY_FAIL()                                                                                 \
    do {                                                                                           \
        if (fake_fails())                                                                          \
            return (CUresult)fake_cuda_state()->fail_code;                                         \
    } while (0)

#define NEEDS_CONTEXT()                                                                            \
    do {                                                                                           \
        if (!fake_is_current())                                                                    \
            return CUDA_ERROR_INVALID_CONTEXT;                                                     \
    } while (0)

#define MAY_NOT_BE_CAPTURED()                                                                      \
    do {                                                                                           \
        if (!fake_may())                                                                           \
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;                                          \
    } while (0)

#define ENQUEUED(stream)                                                                           \
    do {                                                                                           \
        CUresult result_ = fake_enqueued(stream);                                                  \
        if (result_ != CUDA_SUCCESS)                                                               \
            return result_;                                                                        \
    } while (0)

/* Streams of one capture; each counts what was enqueued on it. */
enum { FAKE_MEMBERS = 4 };

/* Also a stream, of which nothing is read. */
struct fake_event {
    bool busy;
    uint64_t capture;             /* in which it was recorded; 0: in none */
    unsigned clock[FAKE_MEMBERS]; /* what lies before it on every stream of the capture */
};

/* Something comes onto a stream. The legacy stream would wait for a blocking one that is
 * captured. */
CUresult fake_enqueued(CUstream stream);
/* As fake_cuda.record. */
bool fake_keep(void *stream, void (*run)(void *data), const void *data, size_t bytes);
/* Asking for or waiting for the work of a captured stream breaks the capture, in every mode. */
bool fake_breaks(CUstream stream);
void fake_mark(CUstream stream, struct fake_event *event);
CUresult fake_wait(CUstream stream, const struct fake_event *event);

#endif
