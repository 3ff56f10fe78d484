/*
 * comm_local.c - communicators of threads of one process: their collectives.
 *
 * In: collectives on host memory. Out: their results, bitwise the same in every run: each rank sums
 * its own part over the ranks in ascending order. A collective has two meetings. At the first every
 * rank shows what it wants to do; the last to come compares, and any difference fails the group
 * with both sides named. Between the meetings all read each other's memory; at the second they wait
 * until nobody does any more, which always ends, so that a failure never frees memory that is being
 * read.
 *
 * A group of one rank also serves CUDA contexts: there is nobody to meet, bytes are copied in the
 * stream.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "runtime/comm_local.h"
#include "runtime/host.h"

/* ---- meetings ---- */

/* "rank 1 of 4 ('fsdp'): all_gather of w of layer 'qkv' (fprop)" */
static int begin_sentence(char *text, size_t size, const fp8_comm *comm)
{
    int at = snprintf(text, size, "rank %d of %d ('%s'): %s", comm->rank, comm->ranks, comm->name,
                      comm->label);
    return at < 0 ? 0 : at < (int)size ? at : (int)size - 1;
}

static bool is_alike(const struct visit *a, const struct visit *b)
{
    if (a->kind != b->kind || a->count != b->count || strcmp(a->label, b->label) != 0)
        return false;
    for (size_t i = 0; i < a->count; i++) {
        if (a->gather && a->gather[i].bytes != b->gather[i].bytes)
            return false;
        if (a->exchange && a->exchange[i].bytes != b->exchange[i].bytes)
            return false;
        if (a->reduce &&
            (a->reduce[i].count != b->reduce[i].count || a->reduce[i].dtype != b->reduce[i].dtype ||
             a->reduce[i].average != b->reduce[i].average))
            return false;
    }
    return true;
}

static size_t bytes_of_visit(const struct visit *visit)
{
    size_t bytes = visit->kind == FP8_COLLECTIVE_ALL_REDUCE_MAX ? visit->count * sizeof(float) : 0;
    for (size_t i = 0; i < visit->count; i++) {
        if (visit->gather)
            bytes += visit->gather[i].bytes;
        if (visit->exchange)
            bytes += visit->exchange[i].bytes;
        if (visit->reduce)
            bytes += visit->reduce[i].count * fp8_dtype_bytes(visit->reduce[i].dtype);
    }
    return bytes;
}

/* All are here: do they want the same? */
static void compare(struct fp8_comm_group *group, const fp8_comm *comm)
{
    const struct visit *first = group->seats[0].visit;
    for (int32_t rank = 1; rank < group->ranks; rank++) {
        const struct visit *other = group->seats[rank].visit;
        if (is_alike(first, other))
            continue;
        char why[FP8_COMM_SENTENCE];
        snprintf(
            why, sizeof why,
            "the ranks of '%s' call different collectives: rank 0 %s (%zu bytes a rank), rank %d "
            "%s (%zu bytes a rank); all ranks must run the same passes in the same order",
            comm->name, first->label, bytes_of_visit(first), rank, other->label,
            bytes_of_visit(other));
        (void)fp8_group_fail(group, FP8_ERR_COMM, why);
        return;
    }
}

/* Who is not here, for the sentence of a timeout. */
static void name_missing(const struct fp8_comm_group *group, const fp8_comm *comm, char *why,
                         size_t size)
{
    int at = begin_sentence(why, size, comm);
    at += snprintf(why + at, size - (size_t)at, " waited %.3g s for rank", group->timeout);
    for (int32_t rank = 0; rank < group->ranks && at < (int)size - 16; rank++) {
        if (!group->seats[rank].visit)
            at += snprintf(why + at, size - (size_t)at, " %d", rank);
    }
}

/* The first meeting; the lock is held. */
static fp8_status arrive(struct local *local, const struct visit *visit)
{
    struct fp8_comm_group *group = local->group;
    const fp8_comm *comm = &local->comm;
    char why[FP8_COMM_SENTENCE];
    for (int32_t rank = 0; rank < group->ranks && group->failed == FP8_OK; rank++) {
        if (group->seats[rank].left) {
            int at = begin_sentence(why, sizeof why, comm);
            snprintf(why + at, sizeof why - (size_t)at, ": rank %d has left", rank);
            (void)fp8_group_fail(group, FP8_ERR_COMM, why);
        }
    }
    if (group->failed != FP8_OK)
        return group->failed;
    group->seats[comm->rank].visit = visit;
    if (++group->arrived == group->ranks) {
        compare(group, comm);
        group->arrived = 0;
        if (group->failed == FP8_OK)
            group->inside = group->ranks;
        group->meetings++;
        pthread_cond_broadcast(&group->change);
        return group->failed;
    }
    const uint64_t before = group->meetings;
    const struct timespec deadline = fp8_deadline(group->timeout);
    while (group->meetings == before && group->failed == FP8_OK) {
        if (pthread_cond_timedwait(&group->change, &group->lock, &deadline) == ETIMEDOUT &&
            group->meetings == before && group->failed == FP8_OK) {
            name_missing(group, comm, why, sizeof why);
            return fp8_group_fail(group, FP8_ERR_TIMEOUT, why);
        }
    }
    return group->meetings == before ? group->failed : FP8_OK;
}

/* The second; the lock is held. */
static void part(struct local *local)
{
    struct fp8_comm_group *group = local->group;
    if (--group->inside == 0) {
        for (int32_t rank = 0; rank < group->ranks; rank++)
            group->seats[rank].visit = NULL;
        pthread_cond_broadcast(&group->change);
    }
    const uint64_t meeting = group->meetings;
    while (group->inside > 0 && group->meetings == meeting)
        pthread_cond_wait(&group->change, &group->lock);
}

/* The group's failure as this communicator's and this thread's error. */
static fp8_status give_failure(struct local *local)
{
    struct fp8_comm_group *group = local->group;
    char why[FP8_COMM_SENTENCE];
    pthread_mutex_lock(&group->lock);
    fp8_status status = group->failed;
    snprintf(why, sizeof why, "%s", group->why);
    pthread_mutex_unlock(&group->lock);
    if (status == FP8_OK)
        return FP8_OK;
    pthread_mutex_lock(&local->comm.lock);
    status = fp8_comm_fail_locked(&local->comm, status, why);
    pthread_mutex_unlock(&local->comm.lock);
    return status;
}

typedef void (*work)(struct local *local, const struct visit *mine);

static fp8_status meet(struct local *local, const struct visit *visit, work do_it)
{
    struct fp8_comm_group *group = local->group;
    pthread_mutex_lock(&group->lock);
    fp8_status status = arrive(local, visit);
    bool inside = status == FP8_OK && group->inside > 0;
    pthread_mutex_unlock(&group->lock);
    if (!inside)
        return give_failure(local);
    do_it(local, visit);
    pthread_mutex_lock(&group->lock);
    part(local);
    pthread_mutex_unlock(&group->lock);
    return FP8_OK;
}

/* ---- the work between the meetings ---- */

static void gather(struct local *local, const struct visit *mine)
{
    const struct fp8_comm_group *group = local->group;
    for (size_t i = 0; i < mine->count; i++) {
        size_t bytes = mine->gather[i].bytes;
        for (int32_t rank = 0; rank < group->ranks && bytes; rank++) {
            const void *send = group->seats[rank].visit->gather[i].send;
            char *to = (char *)mine->gather[i].recv + (size_t)rank * bytes;
            if (to != send)
                memcpy(to, send, bytes);
        }
    }
}

static void exchange(struct local *local, const struct visit *mine)
{
    const struct fp8_comm_group *group = local->group;
    for (size_t i = 0; i < mine->count; i++) {
        const size_t bytes = mine->exchange[i].bytes, from = (size_t)local->comm.rank * bytes;
        for (int32_t rank = 0; rank < group->ranks && bytes; rank++) {
            const char *send = group->seats[rank].visit->exchange[i].send;
            memcpy((char *)mine->exchange[i].recv + (size_t)rank * bytes, send + from, bytes);
        }
    }
}

static void reduce(struct local *local, const struct visit *mine)
{
    enum { PIECE = 1024 };
    const struct fp8_comm_group *group = local->group;
    for (size_t i = 0; i < mine->count; i++) {
        const fp8_reduce_part *part_ = &mine->reduce[i];
        const size_t offset = (size_t)local->comm.rank * part_->count;
        const float share = part_->average ? 1.0f / (float)group->ranks : 1.0f;
        for (size_t at = 0; at < part_->count; at += PIECE) {
            float sums[PIECE];
            size_t count = part_->count - at < PIECE ? part_->count - at : PIECE;
            for (int32_t rank = 0; rank < group->ranks; rank++) {
                const void *send = group->seats[rank].visit->reduce[i].send;
                for (size_t j = 0; j < count; j++) {
                    const int64_t index = (int64_t)(offset + at + j);
                    float value =
                        fp8_host_load(fp8_host_at(send, part_->dtype, 0, 0, index), part_->dtype);
                    sums[j] = rank == 0 ? value : sums[j] + value;
                }
            }
            for (size_t j = 0; j < count; j++)
                fp8_host_store(fp8_host_at(part_->recv, part_->dtype, 0, 0, (int64_t)(at + j)),
                               part_->dtype, sums[j] * share);
        }
    }
}

/* Each rank finds the maxima of its share and writes them into everyone's values. */
static void maximum(struct local *local, const struct visit *mine)
{
    const struct fp8_comm_group *group = local->group;
    size_t share = mine->count / (size_t)group->ranks + 1;
    size_t first = (size_t)local->comm.rank * share;
    for (size_t i = first; i < mine->count && i < first + share; i++) {
        float most = group->seats[0].visit->values[i];
        for (int32_t rank = 1; rank < group->ranks; rank++) {
            float value = group->seats[rank].visit->values[i];
            most = !(most >= value) && value == value ? value : most;
        }
        for (int32_t rank = 0; rank < group->ranks; rank++)
            group->seats[rank].visit->values[i] = most;
    }
}

/* ---- the transport ---- */

static fp8_status local_all_gather(fp8_comm *comm, const fp8_gather_part *parts, size_t count,
                                   fp8_stream stream)
{
    if (comm->ranks == 1) {
        for (size_t i = 0; i < count; i++) {
            if (parts[i].recv != parts[i].send)
                FP8_TRY(fp8_copy_bytes(comm->context, parts[i].recv, parts[i].send, parts[i].bytes,
                                       stream));
        }
        return FP8_OK;
    }
    const struct visit visit = {
        .kind = FP8_COLLECTIVE_ALL_GATHER, .label = comm->label, .count = count, .gather = parts
    };
    return meet((struct local *)comm, &visit, gather);
}

static fp8_status local_all_to_all(fp8_comm *comm, const fp8_exchange_part *parts, size_t count,
                                   fp8_stream stream)
{
    if (comm->ranks == 1) {
        for (size_t i = 0; i < count; i++)
            FP8_TRY(fp8_copy_bytes(comm->context, parts[i].recv, parts[i].send, parts[i].bytes,
                                   stream));
        return FP8_OK;
    }
    const struct visit visit = {
        .kind = FP8_COLLECTIVE_ALL_TO_ALL, .label = comm->label, .count = count, .exchange = parts
    };
    return meet((struct local *)comm, &visit, exchange);
}

static fp8_status local_reduce_scatter(fp8_comm *comm, const fp8_reduce_part *parts, size_t count,
                                       fp8_stream stream)
{
    if (comm->ranks == 1) {
        for (size_t i = 0; i < count; i++) {
            if (parts[i].recv != parts[i].send)
                FP8_TRY(fp8_copy_bytes(comm->context, parts[i].recv, parts[i].send,
                                       parts[i].count * fp8_dtype_bytes(parts[i].dtype), stream));
        }
        return FP8_OK;
    }
    const struct visit visit = {
        .kind = FP8_COLLECTIVE_REDUCE_SCATTER, .label = comm->label, .count = count, .reduce = parts
    };
    return meet((struct local *)comm, &visit, reduce);
}

static fp8_status local_all_reduce_max(fp8_comm *comm, float *values, size_t count,
                                       fp8_stream stream)
{
    (void)stream;
    if (comm->ranks == 1)
        return FP8_OK;
    const struct visit visit = { .kind = FP8_COLLECTIVE_ALL_REDUCE_MAX,
                                 .label = comm->label,
                                 .count = count,
                                 .values = values };
    return meet((struct local *)comm, &visit, maximum);
}

static fp8_status local_poll(fp8_comm *comm)
{
    return give_failure((struct local *)comm);
}

static fp8_status local_wait(fp8_comm *comm, fp8_stream stream)
{
    FP8_TRY(local_poll(comm));
    return fp8_stream_synchronize(comm->context, stream);
}

static void local_abort(fp8_comm *comm, const char *why)
{
    struct fp8_comm_group *group = ((struct local *)comm)->group;
    char text[FP8_COMM_SENTENCE];
    pthread_mutex_lock(&comm->lock); /* over the label: any thread may abort */
    snprintf(text, sizeof text, "rank %d of %d ('%s') gave up after %s: %.300s", comm->rank,
             comm->ranks, comm->name, comm->label, why);
    pthread_mutex_unlock(&comm->lock);
    pthread_mutex_lock(&group->lock);
    (void)fp8_group_fail(group, FP8_ERR_COMM, text);
    pthread_mutex_unlock(&group->lock);
}

void fp8_local_destroy(fp8_comm *comm)
{
    struct local *local = (struct local *)comm;
    struct fp8_comm_group *group = local->group;
    if (group) {
        pthread_mutex_lock(&group->lock);
        group->seats[comm->rank].left = true;
        if (group->arrived > 0) {
            char why[FP8_COMM_SENTENCE];
            snprintf(why, sizeof why,
                     "rank %d of %d ('%s') has left while others wait: its last was %s", comm->rank,
                     comm->ranks, comm->name, comm->label);
            (void)fp8_group_fail(group, FP8_ERR_COMM, why);
        }
        pthread_mutex_unlock(&group->lock);
        if (local->owns_group)
            fp8_comm_group_destroy(group);
    }
    pthread_mutex_destroy(&comm->lock);
    fp8_release(local);
}

static const struct fp8_transport local_transport = {
    .name = "local",
    .all_gather = local_all_gather,
    .all_to_all = local_all_to_all,
    .reduce_scatter = local_reduce_scatter,
    .all_reduce_max = local_all_reduce_max,
    .poll = local_poll,
    .wait = local_wait,
    .abort = local_abort,
    .destroy = fp8_local_destroy,
};

/* ---- creation ---- */

fp8_status fp8_local_create(fp8_comm_group *group, fp8_context *context, int32_t rank,
                            const char *name, struct local **local)
{
    *local = fp8_allocate(sizeof **local);
    if (!*local)
        return fp8_fail_memory("a rank of a group", sizeof **local);
    fp8_comm_setup(&(*local)->comm, &local_transport, context, rank, group->ranks, group->timeout,
                   name);
    (*local)->group = group;
    return FP8_OK;
}

fp8_status fp8_comm_create_alone(fp8_context *context, const fp8_comm_options *options,
                                 fp8_comm **comm)
{
    struct fp8_comm_group *group = NULL;
    struct local *local = NULL;
    FP8_TRY(fp8_comm_group_create(1, options->timeout_seconds, &group));
    fp8_status status = fp8_local_create(group, context, 0, options->name, &local);
    if (status != FP8_OK) {
        fp8_comm_group_destroy(group);
        return status;
    }
    local->owns_group = true;
    *comm = &local->comm;
    return FP8_OK;
}
