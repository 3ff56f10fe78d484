/*
 * comm_group.c - the group in which threads of one process meet: its seats, and who takes them.
 *
 * In: a number of ranks, then each rank's context. Out: for the host the communicators of
 * comm_local.c, for GPUs those of comm_nccl.c, whose id the group hands on. A rank waits until all
 * have joined; who does not come, or comes with a context of the other kind, is named to all.
 */
#include <errno.h>
#include <stdio.h>

#include "runtime/comm_local.h"

/* ---- the group ---- */

fp8_status fp8_group_fail(struct fp8_comm_group *group, fp8_status status, const char *why)
{
    if (group->failed == FP8_OK) {
        group->failed = status;
        snprintf(group->why, sizeof group->why, "%s", why);
        pthread_cond_broadcast(&group->change);
    }
    return group->failed;
}

fp8_status fp8_comm_group_create(int32_t ranks, double timeout_seconds, fp8_comm_group **group)
{
    if (!group)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_group_create: group is NULL");
    *group = NULL;
    if (ranks < 1 || ranks > 65536)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_group_create: ranks is %d, not in 1..65536", ranks);
    FP8_TRY(fp8_comm_check_timeout("comm_group_create", timeout_seconds));
    size_t bytes = sizeof **group + (size_t)ranks * sizeof(struct seat);
    struct fp8_comm_group *made = fp8_allocate(bytes);
    if (!made)
        return fp8_fail_memory("a group of ranks", bytes);
    made->ranks = ranks;
    made->timeout = timeout_seconds > 0 ? timeout_seconds : FP8_COMM_DEFAULT_TIMEOUT;
    pthread_mutex_init(&made->lock, NULL);
    fp8_condition_init(&made->change);
    *group = made;
    return FP8_OK;
}

void fp8_comm_group_destroy(fp8_comm_group *group)
{
    if (!group)
        return;
    pthread_cond_destroy(&group->change);
    pthread_mutex_destroy(&group->lock);
    fp8_release(group);
}

/* ---- joining ---- */

/* Waits until every rank has a seat; the lock is held. */
static fp8_status sit_down(fp8_comm_group *group, int32_t rank, bool is_host, const char *name)
{
    char why[FP8_COMM_SENTENCE];
    if (group->seats[rank].joined)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_join: rank %d of %d has joined already", rank,
                        group->ranks);
    group->seats[rank].joined = true;
    group->seats[rank].is_host = is_host;
    group->joined++;
    pthread_cond_broadcast(&group->change);
    const struct timespec deadline = fp8_deadline(group->timeout);
    while (group->joined < group->ranks && group->failed == FP8_OK) {
        if (pthread_cond_timedwait(&group->change, &group->lock, &deadline) != ETIMEDOUT ||
            group->joined == group->ranks || group->failed != FP8_OK)
            continue;
        int at = snprintf(why, sizeof why, "comm_join: rank %d of %d ('%s') waited %.3g s for rank",
                          rank, group->ranks, name, group->timeout);
        for (int32_t i = 0; i < group->ranks && at < (int)sizeof why - 16; i++) {
            if (!group->seats[i].joined)
                at += snprintf(why + at, sizeof why - (size_t)at, " %d", i);
        }
        (void)fp8_group_fail(group, FP8_ERR_TIMEOUT, why);
    }
    if (group->joined < group->ranks)
        return fp8_fail(group->failed, "%s", group->why);
    for (int32_t i = 0; i < group->ranks; i++) {
        if (group->seats[i].is_host == is_host)
            continue;
        (void)fp8_group_fail(group, FP8_ERR_ARGUMENT, "comm_join: ranks of both kinds");
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "comm_join: rank %d is on %s and rank %d is not; give all ranks contexts of "
            "one kind",
            rank, is_host ? "the host" : "a GPU", i);
    }
    return FP8_OK; /* a failure after that is an error of the collectives */
}

static fp8_status join_gpu(fp8_comm_group *group, fp8_context *context, int32_t rank,
                           const char *name, fp8_comm **comm)
{
    pthread_mutex_lock(&group->lock);
    fp8_status status =
        group->failed == FP8_OK ? FP8_OK : fp8_fail(group->failed, "%s", group->why);
    if (status == FP8_OK && !group->has_id) {
        status = fp8_comm_id_create(&group->id);
        group->has_id = status == FP8_OK;
        if (status != FP8_OK)
            (void)fp8_group_fail(group, status, fp8_last_error());
    }
    fp8_comm_id id = group->id;
    pthread_mutex_unlock(&group->lock);
    if (status != FP8_OK)
        return status;
    fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
    options.rank = rank;
    options.ranks = group->ranks;
    options.timeout_seconds = group->timeout;
    options.name = name;
    return fp8_comm_create_nccl(context, &options, &id, comm);
}

fp8_status fp8_comm_join(fp8_comm_group *group, fp8_context *context, int32_t rank,
                         const char *name, fp8_comm **comm)
{
    if (!comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_join: comm is NULL");
    *comm = NULL;
    if (!group || !context)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_join: %s is NULL", group ? "context" : "group");
    if (rank < 0 || rank >= group->ranks)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_join: rank is %d of %d ranks; it counts from 0",
                        rank, group->ranks);
    struct local *local = NULL;
    bool is_nccl = !context->is_host && group->ranks > 1;
    fp8_status status = is_nccl ? FP8_OK : fp8_local_create(group, context, rank, name, &local);
    pthread_mutex_lock(&group->lock);
    if (status == FP8_OK)
        status = sit_down(group, rank, context->is_host, name ? name : "fsdp");
    else
        (void)fp8_group_fail(group, status, fp8_last_error());
    pthread_mutex_unlock(&group->lock);
    if (status == FP8_OK && is_nccl)
        return fp8_report(context, join_gpu(group, context, rank, name, comm));
    if (status == FP8_OK) {
        *comm = &local->comm;
        return FP8_OK;
    }
    if (local) {
        local->group = NULL;
        fp8_local_destroy(&local->comm);
    }
    return fp8_report(context, status);
}
