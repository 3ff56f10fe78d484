/*
 * comm_nccl_create.c - communicators over NCCL: made with all other ranks, or adopted from the
 * caller.
 *
 * In: options that comm.c has checked, or the caller's ncclComm_t. Out: the object of comm_nccl.h
 * with its events and its thread. Communicators of ours are joined without blocking and ask for the
 * policy of no CTAs; multicast is switched off where NCCL can be told so. Of an adopted one only
 * rank, size and device are read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/comm_nccl.h"

/* ---- creation ---- */

static fp8_status make_events(struct nccl *nccl)
{
    const struct fp8_driver *driver = nccl->comm.context->driver;
    for (int i = 0; i < PENDING; i++) {
        CUresult result = driver->event_create(&nccl->events[i], CU_EVENT_DISABLE_TIMING);
        if (result != CUDA_SUCCESS)
            return fp8_fail_cuda(driver, result, "comm_create: an event");
        nccl->pending[i].event = nccl->events[i];
    }
    return FP8_OK;
}

static fp8_status start_watcher(struct nccl *nccl)
{
    if (nccl->flags & FP8_COMM_NO_WATCHDOG)
        return FP8_OK;
    int error = fp8_thread_start(&nccl->watcher, fp8_nccl_watch, nccl);
    if (error)
        return fp8_fail(FP8_ERR_MEMORY, "comm_create: the thread that watches does not start (%d)",
                        error);
    nccl->watching = true;
    return FP8_OK;
}

static struct nccl *make_object(fp8_context *context, int32_t rank, int32_t ranks, double timeout,
                                const char *name)
{
    struct nccl *nccl = fp8_allocate(sizeof *nccl);
    if (!nccl) {
        (void)fp8_fail_memory("a communicator", sizeof *nccl);
        return NULL;
    }
    fp8_comm_setup(&nccl->comm, &fp8_nccl_transport, context, rank, ranks, timeout, name);
    fp8_condition_init(&nccl->stopping);
    pthread_mutex_init(&nccl->watch_lock, NULL);
    return nccl;
}

static fp8_nccl_config configuration(const struct nccl *nccl, int blocking)
{
    const int none = FP8_NCCL_UNDEFINED, version = nccl->table->version;
    fp8_nccl_config config = {
        sizeof config, FP8_NCCL_MAGIC, (unsigned)version,
        none,          none,           none,
        none,          NULL,           none,
        none,          NULL,           none,
        none,          none,           none,
        none,          none,           none,
        none,          none,           none,
        none,          none,           none,
        none,          none,
    };
    if (version < NVLS_MODE_VERSION)
        config.size = offsetof(fp8_nccl_config, channels_per_net_peer);
    else
        config.nvls_host_mode = FP8_NCCL_NVLS_DISABLE;
    config.blocking = blocking;
    config.comm_name = nccl->comm.name;
    if (!fp8_nccl_no_window(nccl))
        config.cta_policy = FP8_NCCL_CTA_POLICY_ZERO;
    return config;
}

/* All ranks have come: a communicator of the same ranks whose calls launch before they return.
 * Without a thread that watches, a call that hangs could not be ended. */
static fp8_status split(struct nccl *nccl)
{
    fp8_comm *comm = &nccl->comm;
    fp8_nccl_config config = configuration(nccl, 1);
    fp8_nccl_comm first = nccl->handle, second = NULL;
    if (!nccl->table->split || nccl->flags & FP8_COMM_NO_WATCHDOG)
        return FP8_OK;
    int result = nccl->table->split(first, 0, comm->rank, &second, &config);
    FP8_TRY(fp8_nccl_settle(nccl, result, comm->label));
    nccl->handle = second;
    nccl->is_blocking = true;
    (void)nccl->table->destroy(first);
    return FP8_OK;
}

/* Waits until all ranks have come. */
static fp8_status init(struct nccl *nccl, const fp8_comm_id *id)
{
    fp8_comm *comm = &nccl->comm;
    fp8_nccl_config config = configuration(nccl, 0);
    fp8_nccl_id nccl_id;
    memcpy(&nccl_id, id, sizeof nccl_id);
    int result =
        nccl->table->init_rank_config(&nccl->handle, comm->ranks, nccl_id, comm->rank, &config);
    snprintf(comm->label, sizeof comm->label, "joining the communicator");
    pthread_mutex_lock(&comm->lock);
    fp8_status status = fp8_nccl_settle(nccl, result, comm->label);
    if (status == FP8_OK)
        status = split(nccl);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* The first collective of a kind connects the ranks, in the call: done while all are known to be
 * here, so that no later call waits for a rank that does not come. */
static fp8_status connect(struct nccl *nccl)
{
    enum { NUMBERS = 4 };
    fp8_comm *comm = &nccl->comm;
    const size_t bytes = NUMBERS * sizeof(float) * (size_t)comm->ranks;
    fp8_stream stream = NULL;
    void *memory = NULL;
    if (!nccl->is_blocking)
        return FP8_OK;
    fp8_status status = fp8_stream_create(comm->context, &stream);
    if (status == FP8_OK)
        status = fp8_memory_alloc(comm->context, bytes, &memory);
    if (status == FP8_OK)
        status = fp8_memory_fill(comm->context, memory, 0, bytes, stream);
    float *own = status == FP8_OK ? (float *)memory + comm->rank * NUMBERS : NULL;
    const fp8_reduce_part sum = { memory, own, NUMBERS, FP8_DTYPE_FP32, 0 };
    const fp8_gather_part gather = { own, memory, NUMBERS * sizeof(float) };
    if (status == FP8_OK)
        status = fp8_comm_all_reduce_max(comm, memory, NUMBERS, "the first numbers", stream);
    if (status == FP8_OK)
        status = fp8_comm_reduce_scatter(comm, &sum, 1, "the first numbers", stream);
    if (status == FP8_OK)
        status = fp8_comm_all_gather(comm, &gather, 1, "the first bytes", stream);
    if (status == FP8_OK)
        status = fp8_comm_wait(comm, stream);
    fp8_memory_free(comm->context, memory);
    fp8_stream_destroy(comm->context, stream);
    return status;
}

fp8_status fp8_comm_create_nccl(fp8_context *context, const fp8_comm_options *options,
                                const fp8_comm_id *id, fp8_comm **comm)
{
    const struct fp8_nccl *table;
    FP8_TRY(fp8_nccl_open(&table));
    /* Before 2.31 only the environment keeps multicast out; what the user says there goes first. */
    if (!(options->flags & FP8_COMM_NO_COPY_ENGINE))
        (void)setenv("NCCL_NVLS_ENABLE", "0", 0);
    struct nccl *nccl = make_object(context, options->rank, options->ranks,
                                    options->timeout_seconds, options->name);
    if (!nccl)
        return FP8_ERR_MEMORY;
    nccl->table = table;
    nccl->flags = options->flags;
    nccl->comm.version = table->version;
    nccl->comm.path = table->path;
    nccl->comm.can_exchange = !fp8_nccl_no_window(nccl) && table->all_to_all;
    struct fp8_uncaptured entered;
    fp8_status status = fp8_nccl_ready_abort(nccl);
    if (status == FP8_OK)
        status = fp8_uncaptured_enter(context, "comm_create", NULL, &entered);
    if (status == FP8_OK) {
        status = make_events(nccl);
        if (status == FP8_OK)
            status = init(nccl, id);
        fp8_uncaptured_leave(context, &entered);
    }
    if (status == FP8_OK)
        status = start_watcher(nccl);
    if (status == FP8_OK)
        status = connect(nccl);
    if (status != FP8_OK) {
        fp8_comm_destroy(&nccl->comm);
        return status;
    }
    fp8_log_write(&context->log, FP8_LOG_INFO, "'%s': rank %d of %d, NCCL %d at %s",
                  nccl->comm.name, options->rank, options->ranks, table->version, table->path);
    *comm = &nccl->comm;
    return FP8_OK;
}

/* ---- adoption ---- */

static fp8_status check_adopt(const fp8_context *context, const fp8_comm_adopt_args *args)
{
    const char *call = "comm_adopt";
    if (!context || !args)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL", call, context ? "args" : "context");
    if (args->size != sizeof *args)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: args->size is %u, this library's is %zu; start from "
                        "FP8_COMM_ADOPT_ARGS_INIT",
                        call, args->size, sizeof *args);
    if (context->is_host)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "%s: an ncclComm_t belongs to a GPU, but this context is the host", call);
    if (!args->nccl_comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: nccl_comm is NULL", call);
    if (args->flags & ~(FP8_COMM_NO_COPY_ENGINE | FP8_COMM_NO_WATCHDOG) || args->reserved0)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: flags is %u; pass FP8_COMM_*", call, args->flags);
    return fp8_comm_check_timeout(call, args->timeout_seconds);
}

static fp8_status adopt_table(struct nccl *nccl, const fp8_comm_adopt_args *args)
{
    if (args->symbol) {
        FP8_TRY(fp8_nccl_fill(&nccl->own_table, args->symbol, args->symbol_user, ""));
        nccl->table = &nccl->own_table;
    } else {
        FP8_TRY(fp8_nccl_open(&nccl->table));
    }
    if (args->nccl_version && args->nccl_version != nccl->table->version)
        return fp8_fail(
            FP8_ERR_LIBRARY,
            "comm_adopt: the communicator is of NCCL %d, but the NCCL in use is %d (%s); "
            "two copies must not share a communicator: pass its functions (symbol)",
            args->nccl_version, nccl->table->version,
            args->symbol ? "of symbol" : nccl->table->path);
    return FP8_OK;
}

static fp8_status read_adopted(struct nccl *nccl)
{
    fp8_comm *comm = &nccl->comm;
    int rank = 0, ranks = 0, device = 0;
    int result = nccl->table->user_rank(nccl->handle, &rank);
    if (result == FP8_NCCL_SUCCESS)
        result = nccl->table->count(nccl->handle, &ranks);
    if (result == FP8_NCCL_SUCCESS)
        result = nccl->table->cu_device(nccl->handle, &device);
    if (result != FP8_NCCL_SUCCESS)
        return fp8_fail(FP8_ERR_COMM, "comm_adopt: NCCL says '%s' (%d)",
                        nccl->table->error_string(result), result);
    if (device != comm->context->device)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "comm_adopt: the communicator is of device %d, the context of device %d",
                        device, comm->context->device);
    comm->rank = rank;
    comm->ranks = ranks;
    return FP8_OK;
}

fp8_status fp8_comm_adopt(fp8_context *context, const fp8_comm_adopt_args *args, fp8_comm **comm)
{
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_adopt: comm is NULL");
    *comm = NULL;
    FP8_TRY(check_adopt(context, args));
    struct nccl *nccl = make_object(context, 0, 1, args->timeout_seconds, args->name);
    if (!nccl)
        return FP8_ERR_MEMORY;
    nccl->comm.is_owned = false;
    nccl->handle = args->nccl_comm;
    nccl->flags = args->flags;
    bool pushed = false;
    fp8_status status = adopt_table(nccl, args);
    if (status == FP8_OK)
        status = read_adopted(nccl);
    if (status == FP8_OK && (status = fp8_context_enter(context, &pushed)) == FP8_OK) {
        status = make_events(nccl);
        fp8_context_leave(context, pushed);
    }
    if (status == FP8_OK)
        status = start_watcher(nccl);
    if (status != FP8_OK) {
        fp8_comm_destroy(&nccl->comm);
        return fp8_report(context, status);
    }
    nccl->comm.version = nccl->table->version;
    nccl->comm.path = nccl->table->path;
    *comm = &nccl->comm;
    return FP8_OK;
}
