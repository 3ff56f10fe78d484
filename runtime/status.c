/*
 * status.c - the status table, the thread's last sentence, dtypes, and the runtime's allocator.
 *
 * The sentence lives in a fixed thread-local buffer: failing needs no memory, so that out-of-memory
 * can be reported like anything else. Knows no other file of the runtime.
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/check.h"

static _Thread_local char last_error[1024];

fp8_status fp8_fail(fp8_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

fp8_status fp8_fail_memory(const char *what, size_t bytes)
{
    return fp8_fail(FP8_ERR_MEMORY, "out of memory: %s needs %zu bytes", what, bytes);
}

const char *fp8_last_error(void)
{
    return last_error;
}

const char *fp8_status_name(fp8_status status)
{
    switch (status) {
#define X(name, value, word, remedy)                                                               \
    case name:                                                                                     \
        return word;
        FP8_STATUS_MAP(X)
#undef X
    }
    return "unknown";
}

const char *fp8_status_remedy(fp8_status status)
{
    switch (status) {
#define X(name, value, word, remedy)                                                               \
    case name:                                                                                     \
        return remedy;
        FP8_STATUS_MAP(X)
#undef X
    }
    return "compare the versions of fp8.h and libfp8: this status is not in the table";
}

const char *fp8_version(void)
{
    return FP8_VERSION_STRING;
}

size_t fp8_dtype_bytes(fp8_dtype dtype)
{
    switch (dtype) {
    case FP8_DTYPE_E4M3:
    case FP8_DTYPE_E5M2:
    case FP8_DTYPE_UINT8:
        return 1;
    case FP8_DTYPE_BF16:
    case FP8_DTYPE_FP16:
        return 2;
    case FP8_DTYPE_FP32:
    case FP8_DTYPE_UINT32:
        return 4;
    case FP8_DTYPE_NONE:
        break;
    }
    return 0;
}

const char *fp8_dtype_name(fp8_dtype dtype)
{
    switch (dtype) {
    case FP8_DTYPE_E4M3:
        return "e4m3";
    case FP8_DTYPE_E5M2:
        return "e5m2";
    case FP8_DTYPE_BF16:
        return "bf16";
    case FP8_DTYPE_FP16:
        return "fp16";
    case FP8_DTYPE_FP32:
        return "fp32";
    case FP8_DTYPE_UINT32:
        return "uint32";
    case FP8_DTYPE_UINT8:
        return "uint8";
    case FP8_DTYPE_NONE:
        break;
    }
    return "none";
}

const char *fp8_pass_name(fp8_pass pass)
{
    static const char *const names[FP8_PASS_COUNT] = { "weight", "fprop", "quantize_dy", "wgrad",
                                                       "dgrad" };
    return (unsigned)pass < FP8_PASS_COUNT ? names[pass] : "unknown";
}

/* ---- allocation ---- */

static _Atomic int64_t allocations;
static _Atomic int64_t failing; /* the number of the allocation that fails, 0 = none */

static bool next_fails(void)
{
    int64_t number = atomic_fetch_add(&allocations, 1) + 1;
    return number == atomic_load(&failing);
}

void *fp8_allocate(size_t bytes)
{
    return next_fails() ? NULL : calloc(1, bytes ? bytes : 1);
}

void *fp8_allocate_aligned(size_t align, size_t bytes)
{
    if (next_fails() || bytes > SIZE_MAX / 2)
        return NULL;
    void *memory = NULL;
    return posix_memalign(&memory, align, bytes ? bytes : 1) == 0 ? memory : NULL;
}

void fp8_release(void *memory)
{
    free(memory);
}

int64_t fp8_allocation_fail_at(int64_t countdown)
{
    atomic_store(&failing, countdown);
    return atomic_exchange(&allocations, 0);
}
