/*
 * comm_nccl_end.c - how communicators over NCCL end: aborted after a failure, or at their owner's
 * wish.
 *
 * NCCL's kernels look at a flag that an abort sets, and leave. A copy engine that waits for a rank
 * does not: an abort then frees memory, which waits for the device, and never comes back; behind
 * long work of other streams it comes back late. So it runs on a thread of its own and is waited
 * for a little while only. From then until it ends the device is stuck for this process: what an
 * abort may still use stays as it is, calls on any context of the device are refused, and nothing
 * of it is released; what was to be released meanwhile is never.
 */
#include "runtime/comm_nccl.h"

/* An abort, at first of the communicator; under way, whoever of the two comes last releases it. */
struct ending {
    const struct fp8_nccl *table; /* never released: of an owned communicator */
    fp8_nccl_comm handle;
    int32_t device;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_done, is_left;
};

static void release_ending(struct ending *ending)
{
    if (!ending)
        return;
    pthread_cond_destroy(&ending->ended);
    pthread_mutex_destroy(&ending->lock);
    fp8_release(ending);
}

static void *run_abort(void *user)
{
    struct ending *ending = user;
    (void)ending->table->abort(ending->handle);
    pthread_mutex_lock(&ending->lock);
    ending->is_done = true;
    const bool is_last = ending->is_left;
    pthread_cond_signal(&ending->ended);
    pthread_mutex_unlock(&ending->lock);
    if (is_last) {
        fp8_device_let_go(ending->device);
        release_ending(ending);
    }
    return NULL;
}

static bool start_abort(struct ending *ending)
{
    pthread_t thread;
    const bool started = fp8_thread_start(&thread, run_abort, ending) == 0;
    if (started)
        pthread_detach(thread);
    return started;
}

fp8_status fp8_nccl_ready_abort(struct nccl *nccl)
{
    struct ending *ending = fp8_allocate(sizeof *ending);
    if (!ending)
        return fp8_fail_memory("a communicator", sizeof *ending);
    fp8_condition_init(&ending->ended);
    pthread_mutex_init(&ending->lock, NULL);
    ending->table = nccl->table;
    ending->device = nccl->comm.context->device;
    nccl->ending = ending;
    return FP8_OK;
}

/* Whether it has ended in time; the device is held before run_abort can let it go. */
static bool wait_for_abort(struct ending *ending, double seconds)
{
    const struct timespec until = fp8_deadline(seconds);
    pthread_mutex_lock(&ending->lock);
    int error = 0;
    while (!ending->is_done && error == 0)
        error = pthread_cond_timedwait(&ending->ended, &ending->lock, &until);
    const bool is_done = ending->is_done;
    if (!is_done)
        fp8_device_hold(ending->device);
    ending->is_left = !is_done;
    pthread_mutex_unlock(&ending->lock);
    return is_done;
}

void fp8_nccl_abort(struct nccl *nccl, double seconds)
{
    struct ending *ending = nccl->ending;
    if (fp8_context_is_stuck(nccl->comm.context)) /* the abort before it may wait for this one */
        seconds = 0;
    nccl->ending = NULL;
    ending->handle = nccl->handle;
    if (!start_abort(ending)) {
        fp8_device_hold(ending->device); /* what waits in its streams, nothing ends */
        release_ending(ending);
    } else if (wait_for_abort(ending, seconds)) {
        release_ending(ending);
    }
}

void fp8_nccl_destroy(fp8_comm *comm)
{
    struct nccl *nccl = (struct nccl *)comm;
    struct fp8_uncaptured entered;
    pthread_mutex_lock(&nccl->watch_lock);
    nccl->stop = true;
    pthread_cond_broadcast(&nccl->stopping);
    pthread_mutex_unlock(&nccl->watch_lock);
    if (nccl->watching)
        pthread_join(nccl->watcher, NULL);
    if (fp8_release_enter(comm->context, &entered)) {
        /* Abort, not finalise: that would wait for ranks which may never come. */
        if (nccl->handle && comm->is_owned)
            fp8_nccl_abort(nccl, comm->timeout);
        for (int i = 0; i < PENDING && nccl->events[i]; i++)
            (void)comm->context->driver->event_destroy(nccl->events[i]);
        fp8_uncaptured_leave(comm->context, &entered);
    }
    release_ending(nccl->ending);
    pthread_cond_destroy(&nccl->stopping);
    pthread_mutex_destroy(&nccl->watch_lock);
    pthread_mutex_destroy(&comm->lock);
    fp8_release(nccl);
}
