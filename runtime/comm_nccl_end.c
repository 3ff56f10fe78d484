/*
 * comm_nccl_end.c - how communicators over NCCL end: aborted after a failure, or at their owner's
 * wish.
 *
 * NCCL's kernels look at a flag that an abort sets, and leave. A copy engine that waits for a rank
 * does not: an abort then frees memory, which waits for the device, and never comes back. So it
 * runs on a thread of its own and is waited for a little while only. From then on the context is
 * stuck: what an abort may still use stays as it is, and so does all whose release waits for the
 * device (memory, modules, the primary context), until the process ends.
 */
#include <signal.h>
#include <time.h>

#include "runtime/comm_nccl.h"

/* An abort under way; whoever of the two comes last releases it. */
struct ending {
    const struct fp8_nccl *table;
    fp8_nccl_comm handle;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_done, is_left;
};

static void release_ending(struct ending *ending)
{
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
    if (is_last)
        release_ending(ending);
    return NULL;
}

static bool start_abort(struct ending *ending)
{
    pthread_t thread;
    sigset_t all, old; /* the program's signals belong to its own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const bool started = pthread_create(&thread, NULL, run_abort, ending) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (started)
        pthread_detach(thread);
    return started;
}

void fp8_nccl_abort(struct nccl *nccl, fp8_nccl_comm handle, double seconds)
{
    struct ending *ending = fp8_allocate(sizeof *ending);
    if (!ending) {
        (void)nccl->table->abort(handle);
        return;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&ending->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&ending->lock, NULL);
    ending->table = nccl->table;
    ending->handle = handle;
    if (!start_abort(ending)) {
        (void)nccl->table->abort(handle);
        release_ending(ending);
        return;
    }
    const double end = fp8_clock() + seconds;
    const struct timespec until = { (time_t)end, (long)((end - (double)(time_t)end) * 1e9) };
    pthread_mutex_lock(&ending->lock);
    int error = 0;
    while (!ending->is_done && error == 0)
        error = pthread_cond_timedwait(&ending->ended, &ending->lock, &until);
    const bool is_done = ending->is_done;
    ending->is_left = true;
    pthread_mutex_unlock(&ending->lock);
    if (is_done)
        release_ending(ending);
    else
        nccl->comm.context->is_stuck = true;
}

void fp8_nccl_destroy(fp8_comm *comm)
{
    struct nccl *nccl = (struct nccl *)comm;
    bool pushed = false;
    pthread_mutex_lock(&nccl->watch_lock);
    nccl->stop = true;
    pthread_cond_broadcast(&nccl->stopping);
    pthread_mutex_unlock(&nccl->watch_lock);
    if (nccl->watching)
        pthread_join(nccl->watcher, NULL);
    if (fp8_context_enter(comm->context, &pushed) == FP8_OK) {
        /* Abort, not finalise: that would wait for ranks which may never come. */
        if (nccl->handle && comm->is_owned && !nccl->is_late)
            fp8_nccl_abort(nccl, nccl->handle, comm->timeout);
        for (int i = 0; i < PENDING && nccl->events[i]; i++)
            (void)comm->context->driver->event_destroy(nccl->events[i]);
        fp8_context_leave(comm->context, pushed);
    }
    pthread_cond_destroy(&nccl->stopping);
    pthread_mutex_destroy(&nccl->watch_lock);
    pthread_mutex_destroy(&comm->lock);
    fp8_release(nccl);
}
