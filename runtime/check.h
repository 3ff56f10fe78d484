/*
 * check.h - what every file of the runtime needs: failing with a sentence, allocating, sums.
 *
 * fp8_fail records the sentence that fp8_last_error() returns for this thread and gives the status
 * back, so that an error is one line: `return fp8_fail(FP8_ERR_SHAPE, "fprop: x is ...", ...);`.
 * All memory of the runtime's own objects comes from fp8_allocate, so that a test can make the n-th
 * allocation fail. Nothing here is called between a layer's creation and its end except fp8_fail.
 */
#ifndef FP8_CHECK_H
#define FP8_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/fp8.h"

/* Formats the sentence of this thread's last failure (cut at 1 KiB) and returns `status`. */
fp8_status fp8_fail(fp8_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));
/* The same for a failed allocation of `bytes` bytes for `what`. */
fp8_status fp8_fail_memory(const char *what, size_t bytes) __attribute__((cold));

#define FP8_TRY(call)                                                                              \
    do {                                                                                           \
        fp8_status try_status_ = (call);                                                           \
        if (try_status_ != FP8_OK)                                                                 \
            return try_status_;                                                                    \
    } while (0)

/* Zeroed memory, or NULL; aligned as malloc aligns. */
void *fp8_allocate(size_t bytes);
/* Uninitialised memory at a multiple of `align` (a power of two), or NULL. */
void *fp8_allocate_aligned(size_t align, size_t bytes);
void fp8_release(void *memory);

/* For tests: the allocation number `countdown` from now on fails (1 = the next one), all others
 * succeed; 0 = none. Returns how many allocations there were since the last call. */
int64_t fp8_allocation_fail_at(int64_t countdown);

/* Most divisors are powers of two, and a division costs as much as a dozen shifts. */
static inline int64_t fp8_ceil_div(int64_t value, int64_t by)
{
    if ((by & (by - 1)) == 0)
        return (value >> __builtin_ctzll((uint64_t)by)) + ((value & (by - 1)) != 0);
    return value / by + (value % by > 0);
}

static inline int64_t fp8_round_up(int64_t value, int64_t to)
{
    return fp8_ceil_div(value, to) * to;
}

static inline size_t fp8_align_up(size_t value, size_t align)
{
    return (value + align - 1) & ~(align - 1);
}

static inline int64_t fp8_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t fp8_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
