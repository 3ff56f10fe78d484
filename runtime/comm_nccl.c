/*
 * comm_nccl.c - communicators over NCCL: opened at run time, non-blocking, watched.
 *
 * In: checked collectives with the context entered. Out: one NCCL operation (a group where there
 * are several parts) on the caller's stream, and an event behind it. Joining never blocks; what has
 * joined is split into a communicator whose calls do, since a call that does not costs a thread of
 * NCCL's. A thread looks at these events and at NCCL's asynchronous error; on an error, or where a
 * collective takes longer than the timeout, it aborts a communicator of ours, whereupon NCCL's
 * kernels leave the streams and the program goes on to an error that names rank and collective. An
 * adopted communicator is left to its owner.
 */
#include <sched.h>
#include <stdio.h>

#include "runtime/comm_nccl.h"

/* ---- failure; the lock is held ---- */

/* The first failure ends our own communicator: NCCL's kernels leave the streams. */
static fp8_status fail(struct nccl *nccl, fp8_status status, const char *what)
{
    fp8_comm *comm = &nccl->comm;
    char why[FP8_COMM_SENTENCE];
    const char *more = "";
    if (comm->failed != FP8_OK)
        return fp8_comm_failure_locked(comm);
    if (comm->is_owned && nccl->handle)
        fp8_nccl_abort(nccl, ABORT_SECONDS);
    if (!comm->is_owned)
        more = "; the communicator is the caller's, who must abort it so that its streams go on";
    else if (fp8_context_is_stuck(comm->context))
        more = "; NCCL's abort has not ended and holds the device: other work on it delays that, "
               "or a copy engine that waits for ever: then end this process, which frees it";
    nccl->handle = comm->is_owned ? NULL : nccl->handle;
    snprintf(why, sizeof why, "rank %d of %d ('%s'): %s%s", comm->rank, comm->ranks, comm->name,
             what, more);
    (void)fp8_comm_fail_locked(comm, status, why);
    fp8_log_write(&comm->context->log, FP8_LOG_ERROR, "%s", why);
    return fp8_comm_failure_locked(comm);
}

static fp8_status fail_nccl(struct nccl *nccl, int result, const char *what)
{
    char text[FP8_COMM_SENTENCE];
    const char *more = nccl->table->last_error ? nccl->table->last_error(nccl->handle) : NULL;
    snprintf(text, sizeof text, "%s: NCCL says '%s' (%d)%s%.200s", what,
             nccl->table->error_string(result), result, more && *more ? ": " : "",
             more ? more : "");
    return fail(nccl, FP8_ERR_COMM, text);
}

static fp8_status fail_late(struct nccl *nccl, const char *what)
{
    char text[FP8_COMM_SENTENCE];
    snprintf(text, sizeof text,
             "%s is not done after %.3g s: another rank has ended, is stuck or calls other "
             "collectives",
             what, nccl->comm.timeout);
    return fail(nccl, FP8_ERR_TIMEOUT, text);
}

/* The program's own wish. */
static fp8_status fail_given_up(struct nccl *nccl, const char *what, const char *why)
{
    char text[FP8_COMM_SENTENCE];
    snprintf(text, sizeof text, "gave up after %s: %.300s", what, why);
    return fail(nccl, FP8_ERR_COMM, text);
}

/* A call on a non-blocking communicator may still be under way when it returns: a thread of NCCL's
 * launches a collective within some 10 us, less than a sleep takes, so the first millisecond only
 * yields. */
fp8_status fp8_nccl_settle(struct nccl *nccl, int result, const char *what)
{
    const double start = fp8_clock();
    /* Some calls on a non-blocking communicator say success and are still under way. */
    if (result == FP8_NCCL_SUCCESS && nccl->comm.is_owned && !nccl->is_blocking)
        result = FP8_NCCL_IN_PROGRESS;
    while (result == FP8_NCCL_IN_PROGRESS) {
        int state = FP8_NCCL_SUCCESS;
        result = nccl->table->get_async_error(nccl->handle, &state);
        if (result == FP8_NCCL_SUCCESS)
            result = state;
        if (result != FP8_NCCL_IN_PROGRESS)
            break;
        const double waited = fp8_clock() - start;
        if (waited > nccl->comm.timeout)
            return fail_late(nccl, what);
        if (waited < 1e-3)
            sched_yield();
        else
            fp8_sleep(waited < 1e-1 ? 2e-5 : 1e-3);
    }
    return result == FP8_NCCL_SUCCESS ? FP8_OK : fail_nccl(nccl, result, what);
}

void fp8_nccl_begin_call(struct nccl *nccl)
{
    atomic_store(&nccl->calling, (int64_t)(fp8_clock() * 1e6) + 1);
}

fp8_status fp8_nccl_end_call(struct nccl *nccl, const char *what)
{
    if (atomic_exchange(&nccl->calling, 0) != FP8_NCCL_TAKEN)
        return FP8_OK;
    pthread_mutex_lock(&nccl->watch_lock); /* who took it holds it until then */
    nccl->handle = NULL;
    pthread_mutex_unlock(&nccl->watch_lock);
    return *nccl->why ? fail_given_up(nccl, what, nccl->why) : fail_late(nccl, what);
}

/* ---- what is under way; the lock is held, the context entered ---- */

static fp8_status poll_events(struct nccl *nccl)
{
    fp8_comm *comm = &nccl->comm;
    const struct fp8_driver *driver = comm->context->driver;
    while (nccl->count > 0) {
        CUresult query = driver->event_query(nccl->pending[nccl->head].event);
        if (query == CUDA_ERROR_NOT_READY) {
            if (fp8_clock() - nccl->head_since > comm->timeout)
                return fail_late(nccl, nccl->pending[nccl->head].label);
            return FP8_OK;
        }
        if (query != CUDA_SUCCESS) {
            (void)fp8_fail_cuda(driver, query, "%s", nccl->pending[nccl->head].label);
            return fail(nccl, FP8_ERR_COMM, fp8_last_error());
        }
        nccl->head = (nccl->head + 1) % PENDING;
        nccl->count--;
        nccl->head_since = fp8_clock();
    }
    return FP8_OK;
}

/* To ask for an event would break a capture of this thread, unless it is in the relaxed mode. */
static fp8_status poll_locked(struct nccl *nccl)
{
    fp8_comm *comm = &nccl->comm;
    const struct fp8_driver *driver = comm->context->driver;
    FP8_TRY(fp8_comm_failure_locked(comm));
    int state = FP8_NCCL_SUCCESS;
    int result = nccl->table->get_async_error(nccl->handle, &state);
    if (result == FP8_NCCL_SUCCESS && state != FP8_NCCL_IN_PROGRESS)
        result = state;
    if (result != FP8_NCCL_SUCCESS) {
        const char *label = nccl->count ? nccl->pending[nccl->head].label : comm->label;
        return fail_nccl(nccl, result, label);
    }
    if (nccl->count == 0)
        return FP8_OK;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)driver->exchange_capture_mode(&mode);
    fp8_status status = poll_events(nccl);
    (void)driver->exchange_capture_mode(&mode);
    return status;
}

/* An event behind the collective just enqueued. Captured into a graph, it cannot be watched. */
static fp8_status remember(struct nccl *nccl, fp8_stream stream)
{
    const struct fp8_driver *driver = nccl->comm.context->driver;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = driver->stream_is_capturing(stream, &capture);
    if (result == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE) {
        nccl->captured = true;
        return FP8_OK;
    }
    if (nccl->count == PENDING) /* the newest is recorded anew: it stands for both */
        nccl->count--;
    if (nccl->count == 0)
        nccl->head_since = fp8_clock();
    struct pending *pending = &nccl->pending[(nccl->head + nccl->count) % PENDING];
    snprintf(pending->label, sizeof pending->label, "%s", nccl->comm.label);
    if (result == CUDA_SUCCESS)
        result = driver->event_record(pending->event, stream);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(driver, result, "%s: recording an event", nccl->comm.label);
    nccl->count++;
    return FP8_OK;
}

/* The end of a call that has lasted so long, if the communicator is ours and the same call, which
 * began at `since`, has it still; watch_lock is held. why: "" if it is late. */
static bool take(struct nccl *nccl, int64_t since, double seconds, const char *why)
{
    if (since <= 0 || !nccl->comm.is_owned || fp8_clock() - (double)since * 1e-6 <= seconds ||
        !atomic_compare_exchange_strong(&nccl->calling, &since, FP8_NCCL_TAKEN))
        return false;
    snprintf(nccl->why, sizeof nccl->why, "%s", why);
    fp8_nccl_abort(nccl, ABORT_SECONDS);
    return true;
}

/* Between calls: a look at what is under way. In a call that does not come back: the end of it.
 * False: there is nothing left to watch. */
static bool look(struct nccl *nccl)
{
    int64_t since = atomic_load(&nccl->calling);
    if (pthread_mutex_trylock(&nccl->comm.lock) == 0) {
        if (nccl->comm.failed == FP8_OK)
            (void)poll_locked(nccl);
        pthread_mutex_unlock(&nccl->comm.lock);
        return true;
    }
    return since != FP8_NCCL_TAKEN && !take(nccl, since, nccl->comm.timeout, "");
}

void *fp8_nccl_watch(void *user)
{
    struct nccl *nccl = user;
    fp8_comm *comm = &nccl->comm;
    bool pushed;
    if (fp8_context_enter(comm->context, &pushed) != FP8_OK)
        return NULL;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)comm->context->driver->exchange_capture_mode(&mode);
    const double step = comm->timeout < 1.0 ? comm->timeout / 10 : 0.1;
    pthread_mutex_lock(&nccl->watch_lock);
    for (bool more = true; more && !nccl->stop;) {
        const struct timespec until = fp8_deadline(step);
        (void)pthread_cond_timedwait(&nccl->stopping, &nccl->watch_lock, &until);
        more = nccl->stop || look(nccl);
    }
    pthread_mutex_unlock(&nccl->watch_lock);
    fp8_context_leave(comm->context, pushed);
    return NULL;
}

/* ---- collectives ---- */

static int dtype_of(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_BF16   ? FP8_NCCL_BFLOAT16
           : dtype == FP8_DTYPE_FP16 ? FP8_NCCL_FLOAT16
                                     : FP8_NCCL_FLOAT32;
}

/* Runs `enqueue` for all parts as one operation. */
struct job {
    const fp8_gather_part *gather;
    const fp8_exchange_part *exchange;
    const fp8_reduce_part *reduce;
    float *values;
    size_t count;
    fp8_stream stream;
};

static int enqueue(struct nccl *nccl, const struct job *job, size_t i)
{
    const struct fp8_nccl *table = nccl->table;
    if (job->gather)
        return table->all_gather(job->gather[i].send, job->gather[i].recv, job->gather[i].bytes,
                                 FP8_NCCL_UINT8, nccl->handle, job->stream);
    if (job->exchange)
        return table->all_to_all(job->exchange[i].send, job->exchange[i].recv,
                                 job->exchange[i].bytes, FP8_NCCL_UINT8, nccl->handle, job->stream);
    if (job->reduce)
        return table->reduce_scatter(job->reduce[i].send, job->reduce[i].recv, job->reduce[i].count,
                                     dtype_of(job->reduce[i].dtype),
                                     job->reduce[i].average ? FP8_NCCL_AVG : FP8_NCCL_SUM,
                                     nccl->handle, job->stream);
    return table->all_reduce(job->values, job->values, job->count, FP8_NCCL_FLOAT32, FP8_NCCL_MAX,
                             nccl->handle, job->stream);
}

static bool is_empty(const struct job *job, size_t i)
{
    return job->gather     ? job->gather[i].bytes == 0
           : job->exchange ? job->exchange[i].bytes == 0
           : job->reduce   ? job->reduce[i].count == 0
                           : false;
}

static fp8_status run(struct nccl *nccl, const struct job *job)
{
    fp8_comm *comm = &nccl->comm;
    size_t parts = job->values ? 1 : job->count, wanted = 0;
    for (size_t i = 0; i < parts; i++)
        wanted += !is_empty(job, i);
    if (wanted == 0)
        return FP8_OK;
    pthread_mutex_lock(&comm->lock);
    fp8_status status = poll_locked(nccl);
    if (status == FP8_OK) {
        fp8_nccl_begin_call(nccl);
        int result = wanted > 1 ? nccl->table->group_start() : FP8_NCCL_SUCCESS;
        for (size_t i = 0;
             i < parts && (result == FP8_NCCL_SUCCESS || result == FP8_NCCL_IN_PROGRESS); i++) {
            if (!is_empty(job, i))
                result = enqueue(nccl, job, i);
        }
        if (wanted > 1) {
            int end = nccl->table->group_end();
            if (result == FP8_NCCL_SUCCESS || result == FP8_NCCL_IN_PROGRESS)
                result = end;
        }
        status = fp8_nccl_end_call(nccl, comm->label);
        if (status == FP8_OK)
            status = fp8_nccl_settle(nccl, result, comm->label);
    }
    if (status == FP8_OK)
        status = remember(nccl, job->stream);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static fp8_status nccl_all_gather(fp8_comm *comm, const fp8_gather_part *parts, size_t count,
                                  fp8_stream stream)
{
    const struct job job = { .gather = parts, .count = count, .stream = stream };
    return count ? run((struct nccl *)comm, &job) : FP8_OK;
}

static fp8_status nccl_all_to_all(fp8_comm *comm, const fp8_exchange_part *parts, size_t count,
                                  fp8_stream stream)
{
    struct nccl *nccl = (struct nccl *)comm;
    const struct job job = { .exchange = parts, .count = count, .stream = stream };
    if (!nccl->table->all_to_all)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "%s: NCCL %d has no all_to_all; use 2.28 or newer, or sum with "
                        "reduce_scatter",
                        comm->label, comm->version);
    return count ? run(nccl, &job) : FP8_OK;
}

/* Not in registered memory: each rank chooses its kernel by where its memory lies, other kernels
 * than the others' never end, and NCCL 2.28's own for registered memory leave out terms where a
 * group has two sums. */
static fp8_status nccl_reduce_scatter(fp8_comm *comm, const fp8_reduce_part *parts, size_t count,
                                      fp8_stream stream)
{
    const struct job job = { .reduce = parts, .count = count, .stream = stream };
    for (size_t i = 0; i < count; i++) {
        if (fp8_nccl_is_registered((struct nccl *)comm, parts[i].send) ||
            fp8_nccl_is_registered((struct nccl *)comm, parts[i].recv))
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "%s: part %zu is in memory of fp8_comm_alloc, which is for gathers and "
                            "exchanges; take its send and recv from fp8_memory_alloc",
                            comm->label, i);
    }
    return count ? run((struct nccl *)comm, &job) : FP8_OK;
}

static fp8_status nccl_all_reduce_max(fp8_comm *comm, float *values, size_t count,
                                      fp8_stream stream)
{
    const struct job job = { .values = values, .count = count, .stream = stream };
    return count ? run((struct nccl *)comm, &job) : FP8_OK;
}

/* ---- health ---- */

static fp8_status nccl_poll(fp8_comm *comm)
{
    bool pushed = false;
    pthread_mutex_lock(&comm->lock);
    fp8_status status = fp8_comm_failure_locked(comm);
    if (status == FP8_OK)
        status = fp8_context_enter(comm->context, &pushed);
    if (status == FP8_OK)
        status = poll_locked((struct nccl *)comm);
    fp8_context_leave(comm->context, pushed);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* A collective of a graph has no event that is looked at: who waits for the stream finds it
 * late. */
static fp8_status check_graphs(struct nccl *nccl, double start)
{
    fp8_comm *comm = &nccl->comm;
    if (!nccl->captured || fp8_clock() - start <= comm->timeout)
        return FP8_OK;
    pthread_mutex_lock(&comm->lock);
    fp8_status status = fail_late(nccl, "a CUDA graph with collectives (or the stream it is on)");
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static fp8_status nccl_wait(fp8_comm *comm, fp8_stream stream)
{
    const struct fp8_driver *driver = comm->context->driver;
    const double start = fp8_clock();
    for (int tries = 0;; tries++) {
        CUresult query = driver->stream_query(stream);
        if (query != CUDA_SUCCESS && query != CUDA_ERROR_NOT_READY)
            return fp8_fail_cuda(driver, query, "rank %d of %d ('%s'): waiting after %s",
                                 comm->rank, comm->ranks, comm->name, comm->label);
        FP8_TRY(nccl_poll(comm));
        if (query == CUDA_SUCCESS)
            return FP8_OK;
        FP8_TRY(check_graphs((struct nccl *)comm, start));
        fp8_sleep(tries < 100 ? 1e-5 : 2e-4);
    }
}

/* The communicator's lock, or false: another thread's call had it, and is ended. A call that is
 * about to return keeps the handle. */
static bool lock_or_take(struct nccl *nccl, const char *why)
{
    static const double patience = 0.1;
    while (pthread_mutex_trylock(&nccl->comm.lock) != 0) {
        pthread_mutex_lock(&nccl->watch_lock);
        const int64_t since = atomic_load(&nccl->calling);
        const bool is_taken = since == FP8_NCCL_TAKEN || take(nccl, since, patience, why);
        pthread_mutex_unlock(&nccl->watch_lock);
        if (is_taken)
            return false;
        fp8_sleep(1e-3);
    }
    return true;
}

static void nccl_abort(fp8_comm *comm, const char *why)
{
    struct fp8_uncaptured entered;
    if (!lock_or_take((struct nccl *)comm, why))
        return;
    const bool may_enter = fp8_release_enter(comm->context, &entered); /* it fails in any case */
    (void)fail_given_up((struct nccl *)comm, comm->label, why);
    if (may_enter)
        fp8_uncaptured_leave(comm->context, &entered);
    pthread_mutex_unlock(&comm->lock);
}

const struct fp8_transport fp8_nccl_transport = {
    .name = "nccl",
    .all_gather = nccl_all_gather,
    .all_to_all = nccl_all_to_all,
    .reduce_scatter = nccl_reduce_scatter,
    .all_reduce_max = nccl_all_reduce_max,
    .poll = nccl_poll,
    .wait = nccl_wait,
    .abort = nccl_abort,
    .alloc = fp8_nccl_alloc,
    .free = fp8_nccl_free,
    .destroy = fp8_nccl_destroy,
};
