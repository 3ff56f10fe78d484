/*
 * parallel.h - a pool of threads that run the items of a loop.
 *
 * In: a count and a function of an index. Out: the function has been called once for every index.
 * Used by the host backend; knows nothing of tensors. Any number of threads may run loops on one
 * pool at once: each works on its own loop and idle workers help with the oldest. A loop started
 * from inside an item runs inline, so nesting cannot deadlock. Running a loop allocates nothing.
 */
#ifndef FP8_PARALLEL_H
#define FP8_PARALLEL_H

#include <stdint.h>

#include "runtime/fp8.h"

struct fp8_pool;

typedef void (*fp8_pool_item)(void *user, int64_t index);

/* threads counts the calling thread: threads - 1 workers are started. 0 = the CPUs this process may
 * use. FP8_ERR_MEMORY: no memory, or the system refuses a thread. */
fp8_status fp8_pool_create(int32_t threads, struct fp8_pool **pool);

/* No loop may be running. */
void fp8_pool_destroy(struct fp8_pool *pool);

/* Threads that can work on one loop, the caller among them. 1 for NULL. */
int32_t fp8_pool_threads(const struct fp8_pool *pool);

/* Calls item(user, i) for every i in [0, count), in any order and on any thread; returns when all
 * have returned. pool = NULL: on the calling thread. Workers are in the default floating-point
 * environment, the caller keeps its own. */
void fp8_pool_run(struct fp8_pool *pool, int64_t count, fp8_pool_item item, void *user);

#endif
