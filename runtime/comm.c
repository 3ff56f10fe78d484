/*
 * comm.c - the public calls of communicators: arguments checked, labels kept, transports called.
 *
 * In: collectives as fp8_model.h describes them. Out: the same calls on a transport with nothing
 * left to check, or an error that names rank, communicator and collective. Knows no NCCL and no
 * thread.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/comm.h"

static const char *const collective_names[] = { "all_gather", "all_to_all", "reduce_scatter",
                                                "all_reduce_max" };

/* ---- for the transports ---- */

void fp8_comm_setup(fp8_comm *comm, const struct fp8_transport *transport, fp8_context *context,
                    int32_t rank, int32_t ranks, double timeout, const char *name)
{
    comm->transport = transport;
    comm->context = context;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->is_owned = true;
    comm->path = "";
    comm->timeout = timeout > 0 ? timeout : FP8_COMM_DEFAULT_TIMEOUT;
    snprintf(comm->name, sizeof comm->name, "%s", name && *name ? name : "fsdp");
    snprintf(comm->label, sizeof comm->label, "no collective so far");
    pthread_mutex_init(&comm->lock, NULL);
}

fp8_status fp8_comm_failure_locked(const fp8_comm *comm)
{
    return comm->failed == FP8_OK ? FP8_OK : fp8_fail(comm->failed, "%s", comm->why);
}

fp8_status fp8_comm_fail_locked(fp8_comm *comm, fp8_status status, const char *why)
{
    if (comm->failed == FP8_OK) {
        comm->failed = status;
        snprintf(comm->why, sizeof comm->why, "%s", why);
    }
    return fp8_comm_failure_locked(comm);
}

/* ---- checks ---- */

fp8_status fp8_comm_check_timeout(const char *call, double timeout)
{
    if (isfinite(timeout) && timeout >= 0 && timeout <= 1e6)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT,
                    "%s: timeout_seconds is %g; pass 0 (for %g) or up to a million seconds", call,
                    timeout, FP8_COMM_DEFAULT_TIMEOUT);
}

static fp8_status check_options(const fp8_context *context, const fp8_comm_options *options)
{
    const char *call = "comm_create";
    if (!context || !options)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL", call, context ? "options" : "context");
    if (options->size != sizeof *options)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: options->size is %u, this library's is %zu; start from "
                        "FP8_COMM_OPTIONS_INIT",
                        call, options->size, sizeof *options);
    if (options->ranks < 1 || options->rank < 0 || options->rank >= options->ranks)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: rank is %d of %d ranks; it counts from 0", call,
                        options->rank, options->ranks);
    if (options->flags & ~(FP8_COMM_NO_COPY_ENGINE | FP8_COMM_NO_WATCHDOG))
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: flags is %u; pass FP8_COMM_*", call, options->flags);
    for (int i = 0; i < 4; i++) {
        if (options->reserved[i])
            return fp8_fail(FP8_ERR_ARGUMENT, "%s: reserved fields must be 0", call);
    }
    if (options->ranks > 1 && !options->id == !options->file)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: give id or file, %s", call,
                        options->id ? "not both" : "neither is given");
    return fp8_comm_check_timeout(call, options->timeout_seconds);
}

fp8_status fp8_comm_create(fp8_context *context, const fp8_comm_options *options, fp8_comm **comm)
{
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_create: comm is NULL");
    *comm = NULL;
    FP8_TRY(check_options(context, options));
    if (options->ranks == 1)
        return fp8_report(context, fp8_comm_create_alone(context, options, comm));
    if (context->is_host)
        return fp8_fail(
            FP8_ERR_UNSUPPORTED,
            "comm_create: %d ranks over NCCL need GPUs, but this context is the host; on "
            "the host ranks are threads of one process: fp8_comm_join",
            options->ranks);
    double timeout =
        options->timeout_seconds > 0 ? options->timeout_seconds : FP8_COMM_DEFAULT_TIMEOUT;
    fp8_comm_id id;
    fp8_status status = FP8_OK;
    if (options->id)
        id = *options->id;
    else if (options->rank == 0)
        status = fp8_comm_id_create(&id);
    if (status == FP8_OK && options->file)
        status = fp8_comm_rendezvous(options, timeout, &id);
    if (status == FP8_OK)
        status = fp8_comm_create_nccl(context, options, &id, comm);
    return fp8_report(context, status);
}

void fp8_comm_destroy(fp8_comm *comm)
{
    if (comm)
        comm->transport->destroy(comm);
}

fp8_status fp8_comm_describe(const fp8_comm *comm, fp8_comm_info *info)
{
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_describe: comm is NULL");
    FP8_TRY(fp8_check_answer("comm_describe", "info", info, sizeof *info));
    *info = (fp8_comm_info){
        .size = sizeof *info,
        .rank = comm->rank,
        .ranks = comm->ranks,
        .is_owned = comm->is_owned,
        .is_copy_engine = atomic_load(&comm->is_copy_engine),
        .version = comm->version,
        .transport = comm->transport->name,
        .path = comm->path,
        .name = comm->name,
    };
    return FP8_OK;
}

/* ---- collectives ---- */

static fp8_status check_parts(const fp8_comm *comm, enum fp8_collective kind, const void *parts,
                              size_t count)
{
    const char *call = collective_names[kind];
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: comm is NULL", call);
    if (count && !parts)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: parts is NULL, but part_count is %zu", call, count);
    return FP8_OK;
}

/* Two memories of a part: `many`, a piece for every rank, and `one`. */
struct memories {
    const char *many_name, *one_name;
    const void *many, *one;
    size_t bytes; /* of a piece */
};

/* They may overlap only so that `one` is this rank's piece of `many`; not even so if
 * never_in_place. */
static fp8_status check_apart(const fp8_comm *comm, enum fp8_collective kind, const char *label,
                              size_t index, const struct memories *m, bool never_in_place)
{
    const char *call = collective_names[kind], *what = label ? label : "?";
    const size_t one_bytes = never_in_place ? m->bytes * (size_t)comm->ranks : m->bytes;
    const uintptr_t many = (uintptr_t)m->many, one = (uintptr_t)m->one;
    size_t all;
    if (m->bytes == 0)
        return FP8_OK;
    if (!m->many || !m->one)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s of %s: %s of part %zu is NULL, but it has %zu bytes",
                        call, what, m->many ? m->one_name : m->many_name, index, m->bytes);
    if (__builtin_mul_overflow(m->bytes, (size_t)comm->ranks, &all) || all > PTRDIFF_MAX)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s of %s: part %zu has %zu bytes for each of %d ranks, more than memory has", call,
            what, index, m->bytes, comm->ranks);
    if (many >= one + one_bytes || one >= many + all)
        return FP8_OK;
    if (never_in_place)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s of %s: %s and %s of part %zu are %p and %p; pass two pieces of %zu bytes "
            "that do not overlap",
            call, what, m->many_name, m->one_name, index, m->many, m->one, all);
    if (one == many + (size_t)comm->rank * m->bytes)
        return FP8_OK;
    return fp8_fail(
        FP8_ERR_ARGUMENT,
        "%s of %s: %s and %s of part %zu, %p with %zu bytes and %p with %zu, overlap; in "
        "place %s is %s + rank * %zu, else pass memory apart",
        call, what, m->many_name, m->one_name, index, m->many, all, m->one, m->bytes, m->one_name,
        m->many_name, m->bytes);
}

/* Sets the label, enters the context; end() leaves it. */
static fp8_status begin(fp8_comm *comm, enum fp8_collective kind, const char *label, bool *pushed)
{
    *pushed = false;
    pthread_mutex_lock(&comm->lock);
    snprintf(comm->label, sizeof comm->label, "%s of %s", collective_names[kind],
             label && *label ? label : "a caller's own data");
    fp8_status status = fp8_comm_failure_locked(comm);
    /* under the lock, under which an abort that sticks fails its communicator */
    if (status == FP8_OK)
        status = fp8_context_enter(comm->context, pushed);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static fp8_status end(fp8_comm *comm, bool pushed, fp8_status status)
{
    fp8_context_leave(comm->context, pushed);
    return fp8_report(comm->context, status);
}

fp8_status fp8_comm_all_gather(fp8_comm *comm, const fp8_gather_part *parts, size_t part_count,
                               const char *label, fp8_stream stream)
{
    FP8_TRY(check_parts(comm, FP8_COLLECTIVE_ALL_GATHER, parts, part_count));
    for (size_t i = 0; i < part_count; i++) {
        const struct memories m = { "recv", "send", parts[i].recv, parts[i].send, parts[i].bytes };
        FP8_TRY(check_apart(comm, FP8_COLLECTIVE_ALL_GATHER, label, i, &m, false));
    }
    bool pushed;
    fp8_status status = begin(comm, FP8_COLLECTIVE_ALL_GATHER, label, &pushed);
    if (status == FP8_OK)
        status = comm->transport->all_gather(comm, parts, part_count, stream);
    return end(comm, pushed, status);
}

fp8_status fp8_comm_all_to_all(fp8_comm *comm, const fp8_exchange_part *parts, size_t part_count,
                               const char *label, fp8_stream stream)
{
    FP8_TRY(check_parts(comm, FP8_COLLECTIVE_ALL_TO_ALL, parts, part_count));
    for (size_t i = 0; i < part_count; i++) {
        const struct memories m = { "send", "recv", parts[i].send, parts[i].recv, parts[i].bytes };
        FP8_TRY(check_apart(comm, FP8_COLLECTIVE_ALL_TO_ALL, label, i, &m, true));
    }
    bool pushed;
    fp8_status status = begin(comm, FP8_COLLECTIVE_ALL_TO_ALL, label, &pushed);
    if (status == FP8_OK)
        status = comm->transport->all_to_all(comm, parts, part_count, stream);
    return end(comm, pushed, status);
}

static fp8_status check_reduce(const fp8_comm *comm, const fp8_reduce_part *part, size_t index,
                               const char *label)
{
    const char *what = label ? label : "?";
    if (part->dtype == FP8_DTYPE_E4M3 || part->dtype == FP8_DTYPE_E5M2 ||
        part->dtype == FP8_DTYPE_UINT8)
        return fp8_fail(FP8_ERR_DTYPE,
                        "reduce_scatter of %s: part %zu is %s; a sum of FP8 numbers loses what it "
                        "adds: reduce gradients in bf16 or fp32",
                        what, index, fp8_dtype_name(part->dtype));
    if (part->dtype != FP8_DTYPE_BF16 && part->dtype != FP8_DTYPE_FP16 &&
        part->dtype != FP8_DTYPE_FP32)
        return fp8_fail(FP8_ERR_DTYPE,
                        "reduce_scatter of %s: part %zu is %s; pass bf16, fp16 or fp32", what,
                        index, fp8_dtype_name(part->dtype));
    if (part->average > 1)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "reduce_scatter of %s: average of part %zu is %d; pass 0 or 1", what, index,
                        (int32_t)part->average);
    struct memories m = { "send", "recv", part->send, part->recv, 0 };
    if (__builtin_mul_overflow(part->count, fp8_dtype_bytes(part->dtype), &m.bytes))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "reduce_scatter of %s: count of part %zu is %zu, more than memory has",
                        what, index, part->count);
    return check_apart(comm, FP8_COLLECTIVE_REDUCE_SCATTER, label, index, &m, false);
}

fp8_status fp8_comm_reduce_scatter(fp8_comm *comm, const fp8_reduce_part *parts, size_t part_count,
                                   const char *label, fp8_stream stream)
{
    FP8_TRY(check_parts(comm, FP8_COLLECTIVE_REDUCE_SCATTER, parts, part_count));
    for (size_t i = 0; i < part_count; i++)
        FP8_TRY(check_reduce(comm, &parts[i], i, label));
    bool pushed;
    fp8_status status = begin(comm, FP8_COLLECTIVE_REDUCE_SCATTER, label, &pushed);
    if (status == FP8_OK)
        status = comm->transport->reduce_scatter(comm, parts, part_count, stream);
    return end(comm, pushed, status);
}

fp8_status fp8_comm_all_reduce_max(fp8_comm *comm, float *values, size_t count, const char *label,
                                   fp8_stream stream)
{
    if (!comm || (count && !values))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "all_reduce_max of %s: %s is NULL; pass the memory of %zu "
                        "numbers",
                        label ? label : "?", comm ? "values" : "comm", count);
    bool pushed;
    fp8_status status = begin(comm, FP8_COLLECTIVE_ALL_REDUCE_MAX, label, &pushed);
    if (status == FP8_OK)
        status = comm->transport->all_reduce_max(comm, values, count, stream);
    return end(comm, pushed, status);
}

/* ---- health ---- */

fp8_status fp8_comm_poll(fp8_comm *comm)
{
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_poll: comm is NULL");
    return comm->transport->poll(comm);
}

fp8_status fp8_comm_wait(fp8_comm *comm, fp8_stream stream)
{
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_wait: comm is NULL");
    struct fp8_uncaptured entered;
    pthread_mutex_lock(&comm->lock);
    fp8_status status = fp8_comm_failure_locked(comm);
    if (status == FP8_OK) /* as in begin() */
        status = fp8_uncaptured_enter(comm->context, "comm_wait", stream, &entered);
    pthread_mutex_unlock(&comm->lock);
    if (status == FP8_OK) {
        status = comm->transport->wait(comm, stream);
        fp8_uncaptured_leave(comm->context, &entered);
    }
    return fp8_report(comm->context, status);
}

void fp8_comm_abort(fp8_comm *comm, const char *why)
{
    if (comm)
        comm->transport->abort(comm, why && *why ? why : "no reason was given");
}

/* ---- memory ---- */

static fp8_status alloc_alike(fp8_comm *comm, size_t bytes, void **memory)
{
    struct fp8_vote vote;
    FP8_TRY(fp8_vote_open(comm, &vote));
    fp8_status status = comm->transport->alloc ? comm->transport->alloc(comm, &vote, bytes, memory)
                                               : fp8_memory_alloc(comm->context, bytes, memory);
    status = fp8_vote_same(&vote, status, "comm_alloc");
    fp8_vote_close(&vote);
    return status;
}

fp8_status fp8_comm_alloc(fp8_comm *comm, size_t bytes, void **memory)
{
    if (!memory)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_alloc: memory is NULL");
    *memory = NULL;
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_alloc: comm is NULL");
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(comm->context, "comm_alloc", NULL, &entered));
    fp8_status status = alloc_alike(comm, bytes ? bytes : 1, memory);
    if (status != FP8_OK) {
        fp8_comm_free(comm, *memory);
        *memory = NULL;
    }
    fp8_uncaptured_leave(comm->context, &entered);
    return fp8_report(comm->context, status);
}

void fp8_comm_free(fp8_comm *comm, void *memory)
{
    if (!comm || !memory)
        return;
    struct fp8_uncaptured entered;
    if (!comm->transport->free)
        fp8_memory_free(comm->context, memory);
    else if (fp8_release_enter(comm->context, &entered)) {
        comm->transport->free(comm, memory);
        fp8_uncaptured_leave(comm->context, &entered);
    }
}
