/*
 * comm_nccl_window.c - memory of a communicator over NCCL: symmetric windows where all ranks have
 * them.
 *
 * In: bytes, and votes, for all ranks allocate alike. Out: NCCL's memory in a window, or ordinary
 * memory on every rank, and the reason in the log. Communicators of ours ask for the policy of no
 * CTAs: gathers between windows then run on copy engines.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/comm_nccl.h"

/* Why windows are not used, or NULL. */
const char *fp8_nccl_no_window(const struct nccl *nccl)
{
    if (nccl->flags & FP8_COMM_NO_COPY_ENGINE)
        return "FP8_COMM_NO_COPY_ENGINE";
    if (!nccl->comm.is_owned)
        return "the communicator is adopted, and its policy is the caller's";
    if (nccl->table->version < COPY_ENGINE_VERSION)
        return "NCCL is older than 2.28";
    const char *nvls = getenv("NCCL_NVLS_ENABLE");
    if (nccl->table->version < NVLS_MODE_VERSION && !(nvls && strcmp(nvls, "0") == 0))
        return "NCCL_NVLS_ENABLE asks for multicast, which windows before NCCL 2.31 would then use";
    if (!nccl->table->mem_alloc || !nccl->table->mem_free || !nccl->table->window_register ||
        !nccl->table->window_deregister)
        return "NCCL has no symmetric windows";
    return NULL;
}

static fp8_status register_window(struct nccl *nccl, struct window *window, size_t bytes)
{
    const char *what = "registering the gather pool";
    fp8_nccl_begin_call(nccl);
    int result = nccl->table->window_register(nccl->handle, window->memory, bytes, &window->window,
                                              FP8_NCCL_WIN_COLL_SYMMETRIC);
    FP8_TRY(fp8_nccl_end_call(nccl, what));
    if (result == FP8_NCCL_INVALID_ARGUMENT || result == FP8_NCCL_INVALID_USAGE) {
        window->window = NULL; /* refused before anything was done: ordinary memory */
        return FP8_OK;
    }
    return fp8_nccl_settle(nccl, result, what);
}

static fp8_status deregister_window(struct nccl *nccl, struct window *window)
{
    if (!window->window || !nccl->handle)
        return FP8_OK;
    const char *what = "deregistering memory";
    fp8_nccl_begin_call(nccl);
    int result = nccl->table->window_deregister(nccl->handle, window->window);
    window->window = NULL;
    FP8_TRY(fp8_nccl_end_call(nccl, what));
    return fp8_nccl_settle(nccl, result, what);
}

/* Whether all ranks have a window; a rank alone with one gives it up. */
static fp8_status make_windows(struct nccl *nccl, const struct fp8_vote *vote,
                               struct window *window, size_t bytes, const char **why)
{
    fp8_comm *comm = &nccl->comm;
    int32_t without;
    pthread_mutex_lock(&comm->lock);
    fp8_status status = fp8_comm_failure_locked(comm);
    if (status == FP8_OK)
        status = register_window(nccl, window, bytes);
    pthread_mutex_unlock(&comm->lock);
    FP8_TRY(status);
    if (!window->window)
        *why = "NCCL cannot make a symmetric window on this node";
    FP8_TRY(fp8_vote_any(vote, !window->window, &without));
    if (without >= 0 && window->window) {
        *why = "another rank has no symmetric window";
        pthread_mutex_lock(&comm->lock);
        status = fp8_comm_failure_locked(comm);
        if (status == FP8_OK)
            status = deregister_window(nccl, window);
        pthread_mutex_unlock(&comm->lock);
    }
    return status;
}

/* NCCL's memory, in a window on all ranks or on none; *why: why in none. Without memory of NCCL's
 * on any of them, no rank registers: the others would wait there. */
static fp8_status alloc_nccl(struct nccl *nccl, const struct fp8_vote *vote, struct window *window,
                             size_t bytes, const char **why)
{
    int32_t without;
    *why = fp8_nccl_no_window(nccl);
    if (!*why && nccl->table->mem_alloc(&window->memory, bytes) != FP8_NCCL_SUCCESS)
        *why = "ncclMemAlloc refuses", window->memory = NULL;
    window->is_nccl = window->memory != NULL;
    FP8_TRY(fp8_vote_any(vote, *why != NULL, &without));
    if (!*why && without >= 0)
        *why = "another rank has no memory of NCCL's";
    return *why ? FP8_OK : make_windows(nccl, vote, window, bytes, why);
}

static fp8_status alloc_window(struct nccl *nccl, const struct fp8_vote *vote,
                               struct window *window, size_t bytes)
{
    fp8_comm *comm = &nccl->comm;
    const char *why;
    window->bytes = bytes = fp8_align_up(bytes, FP8_NCCL_WINDOW_ALIGNMENT);
    FP8_TRY(alloc_nccl(nccl, vote, window, bytes, &why));
    if (!window->memory)
        FP8_TRY(fp8_memory_alloc(comm->context, bytes, &window->memory));
    atomic_store(&comm->is_copy_engine, why == NULL);
    if (why)
        fp8_log_write(&comm->context->log, FP8_LOG_DISPATCH,
                      "'%s': gathers of %zu bytes of memory by NCCL's kernels: %s", comm->name,
                      bytes, why);
    else
        fp8_log_write(
            &comm->context->log, FP8_LOG_DISPATCH,
            "'%s': gathers of %zu bytes of memory by copy engines (symmetric window, NCCL %d)",
            comm->name, bytes, nccl->table->version);
    return FP8_OK;
}

/* The first gather by copy engines makes ready what they need, in the call: now, while all are
 * here. */
static fp8_status try_window(fp8_comm *comm, const struct window *window, size_t bytes)
{
    const size_t piece = bytes / (size_t)comm->ranks < 16 ? bytes / (size_t)comm->ranks : 16;
    char *memory = window->memory;
    const fp8_gather_part part = { memory + (size_t)comm->rank * piece, memory, piece };
    fp8_stream stream = NULL;
    if (!window->window || !((struct nccl *)comm)->is_blocking)
        return FP8_OK;
    fp8_status status = fp8_stream_create(comm->context, &stream);
    if (status == FP8_OK)
        status = fp8_comm_all_gather(comm, &part, 1, "the first bytes of a pool", stream);
    if (status == FP8_OK)
        status = fp8_comm_wait(comm, stream);
    fp8_stream_destroy(comm->context, stream);
    return status;
}

static void drop_window(struct nccl *nccl, struct window *window)
{
    fp8_comm *comm = &nccl->comm;
    pthread_mutex_lock(&comm->lock);
    (void)deregister_window(nccl, window);
    pthread_mutex_unlock(&comm->lock);
    if (!window->is_nccl)
        fp8_memory_free(comm->context, window->memory);
    else if (!fp8_context_is_stuck(comm->context)) /* an abort that does not end still has it */
        (void)nccl->table->mem_free(window->memory);
    *window = (struct window){ .memory = NULL };
}

void fp8_nccl_free(fp8_comm *comm, void *memory)
{
    struct nccl *nccl = (struct nccl *)comm;
    for (int i = 0; i < WINDOWS; i++) {
        if (nccl->windows[i].memory == memory) {
            drop_window(nccl, &nccl->windows[i]);
            return;
        }
    }
}

fp8_status fp8_nccl_alloc(fp8_comm *comm, const struct fp8_vote *vote, size_t bytes, void **memory)
{
    struct nccl *nccl = (struct nccl *)comm;
    for (int i = 0; i < WINDOWS; i++) {
        struct window *window = &nccl->windows[i];
        if (window->memory)
            continue;
        *window = (struct window){ .memory = NULL };
        fp8_status status = alloc_window(nccl, vote, window, bytes);
        if (status == FP8_OK)
            status = try_window(comm, window, bytes);
        if (status != FP8_OK)
            drop_window(nccl, window);
        *memory = window->memory;
        return status;
    }
    return fp8_fail(FP8_ERR_ARGUMENT, "comm_alloc: a communicator has at most %d pieces of memory",
                    WINDOWS);
}

bool fp8_nccl_is_registered(const struct nccl *nccl, const void *memory)
{
    for (int i = 0; i < WINDOWS; i++) {
        const struct window *window = &nccl->windows[i];
        if (window->window && (uintptr_t)memory - (uintptr_t)window->memory < window->bytes)
            return true;
    }
    return false;
}
