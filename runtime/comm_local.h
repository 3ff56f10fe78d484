/*
 * comm_local.h - threads of one process as ranks: the group in which they meet, and one of them.
 * Not public.
 *
 * comm_group.c makes groups and gives seats, comm_local.c runs the collectives of those on the
 * host.
 */
#ifndef FP8_COMM_LOCAL_H
#define FP8_COMM_LOCAL_H

#include "runtime/comm.h"

/* What a rank brings to a meeting. Alive until the second meeting has ended. */
struct visit {
    enum fp8_collective kind;
    const char *label;
    size_t count; /* parts, or values */
    const fp8_gather_part *gather;
    const fp8_exchange_part *exchange;
    const fp8_reduce_part *reduce;
    float *values;
};

struct seat {
    const struct visit *visit; /* NULL: not here */
    bool joined, left;
    bool is_host;
};

struct fp8_comm_group {
    pthread_mutex_t lock;
    pthread_cond_t change;
    int32_t ranks;
    double timeout;
    int32_t arrived;   /* at the first meeting */
    int32_t inside;    /* between the two */
    uint64_t meetings; /* first ones that came about */
    fp8_status failed;
    char why[FP8_COMM_SENTENCE];
    fp8_comm_id id; /* ranks on GPUs */
    bool has_id;
    int32_t joined;
    struct seat seats[];
};

struct local {
    fp8_comm comm;
    struct fp8_comm_group *group;
    bool owns_group;
};

/* comm_group.c: the first failure of a group, kept, and whoever waits is woken; the lock is
 * held. */
fp8_status fp8_group_fail(struct fp8_comm_group *group, fp8_status status, const char *why);

/* comm_local.c: a rank of a group, on the host or alone. */
fp8_status fp8_local_create(fp8_comm_group *group, fp8_context *context, int32_t rank,
                            const char *name, struct local **local);
void fp8_local_destroy(fp8_comm *comm);

#endif
