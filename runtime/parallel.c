/*
 * parallel.c - the thread pool behind parallel.h.
 *
 * A loop is a record on its caller's stack, linked into the pool's list while indices are left.
 * Caller and workers draw indices from an atomic counter. A worker holds a reference while it works
 * on a loop, and the caller returns only when the loop is unlinked and the last reference is gone;
 * so the record cannot vanish under a worker.
 *
 * Threads inherit the floating-point mode of their creator, which may have switched subnormals off;
 * so each worker goes back to the default one.
 */
#include "runtime/parallel.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "runtime/check.h"
#include "runtime/thread.h"

struct loop {
    fp8_pool_item item;
    void *user;
    int64_t count;
    atomic_int_fast64_t next;
    int32_t helpers; /* workers inside this loop; under the pool's lock */
    bool linked;     /* in the pool's list; under the pool's lock */
    struct loop *before, *after;
};

struct fp8_pool {
    pthread_mutex_t lock;
    pthread_cond_t work; /* a loop was linked, or stop */
    pthread_cond_t idle; /* a worker left a loop */
    struct loop *first, *last;
    bool stop;
    int32_t workers;
    pthread_t threads[];
};

static _Thread_local bool inside_item;

static void link_loop(struct fp8_pool *pool, struct loop *loop)
{
    loop->before = pool->last;
    loop->after = NULL;
    if (pool->last != NULL)
        pool->last->after = loop;
    else
        pool->first = loop;
    pool->last = loop;
    loop->linked = true;
}

static void unlink_loop(struct fp8_pool *pool, struct loop *loop)
{
    if (!loop->linked)
        return;
    if (loop->before != NULL)
        loop->before->after = loop->after;
    else
        pool->first = loop->after;
    if (loop->after != NULL)
        loop->after->before = loop->before;
    else
        pool->last = loop->before;
    loop->linked = false;
}

static void draw(struct loop *loop)
{
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed);
        if (index >= loop->count)
            return;
        loop->item(loop->user, index);
    }
}

static void *worker(void *argument)
{
    struct fp8_pool *pool = argument;
    fesetenv(FE_DFL_ENV);
    inside_item = true;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        struct loop *loop = pool->first;
        if (loop == NULL) {
            pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        loop->helpers++;
        pthread_mutex_unlock(&pool->lock);
        draw(loop);
        pthread_mutex_lock(&pool->lock);
        unlink_loop(pool, loop);
        if (--loop->helpers == 0)
            pthread_cond_broadcast(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int32_t usable_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int32_t)online : 1;
}

static int start_workers(struct fp8_pool *pool, int32_t count)
{
    int error = 0;
    while (error == 0 && pool->workers < count) {
        error = fp8_thread_start(&pool->threads[pool->workers], worker, pool);
        if (error == 0)
            pool->workers++;
    }
    return error;
}

fp8_status fp8_pool_create(int32_t threads, struct fp8_pool **pool)
{
    *pool = NULL;
    if (threads < 0 || threads > 4096)
        return fp8_fail(FP8_ERR_ARGUMENT, "host context: threads is %d, not in 0..4096",
                        (int)threads);
    if (threads == 0)
        threads = usable_cpus();
    size_t workers = (size_t)threads - 1;
    size_t bytes = sizeof(struct fp8_pool) + workers * sizeof(pthread_t);
    struct fp8_pool *made = fp8_allocate(bytes);
    if (made == NULL)
        return fp8_fail_memory("the host context's thread pool", bytes);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->work, NULL);
    pthread_cond_init(&made->idle, NULL);
    int error = start_workers(made, (int32_t)workers);
    if (error != 0) {
        int32_t started = made->workers;
        fp8_pool_destroy(made);
        return fp8_fail(FP8_ERR_MEMORY, "host context: thread %d of %d does not start (error %d)",
                        (int)started + 2, (int)threads, error);
    }
    *pool = made;
    return FP8_OK;
}

void fp8_pool_destroy(struct fp8_pool *pool)
{
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->workers; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    fp8_release(pool);
}

int32_t fp8_pool_threads(const struct fp8_pool *pool)
{
    return pool == NULL ? 1 : pool->workers + 1;
}

static void run_shared(struct fp8_pool *pool, struct loop *loop)
{
    pthread_mutex_lock(&pool->lock);
    link_loop(pool, loop);
    if (loop->count - 1 < pool->workers) {
        for (int64_t i = 1; i < loop->count; i++)
            pthread_cond_signal(&pool->work);
    } else {
        pthread_cond_broadcast(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);

    draw(loop);

    pthread_mutex_lock(&pool->lock);
    unlink_loop(pool, loop);
    while (loop->helpers > 0)
        pthread_cond_wait(&pool->idle, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

void fp8_pool_run(struct fp8_pool *pool, int64_t count, fp8_pool_item item, void *user)
{
    if (count <= 0)
        return;
    if (inside_item) {
        for (int64_t i = 0; i < count; i++)
            item(user, i);
        return;
    }
    struct loop loop = { .item = item, .user = user, .count = count };
    inside_item = true;
    if (pool == NULL || pool->workers == 0 || count == 1)
        draw(&loop);
    else
        run_shared(pool, &loop);
    inside_item = false;
}
