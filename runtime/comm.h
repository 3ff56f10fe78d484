/*
 * comm.h - what the communicators' rooms share: the object, the table of a transport, its failure.
 *
 * comm.c checks arguments, keeps the label of the running collective and words errors; a transport
 * (comm_local.c: threads of one process; comm_nccl.c: GPUs) moves the bytes. A communicator that
 * failed remembers its sentence and gives it to every later call. Not public.
 */
#ifndef FP8_COMM_H
#define FP8_COMM_H

#include <pthread.h>
#include <stdatomic.h>

#include "runtime/fp8_comm.h"
#include "runtime/internal.h"

enum { FP8_COMM_LABEL = 160, FP8_COMM_SENTENCE = 640 };

enum fp8_collective {
    FP8_COLLECTIVE_ALL_GATHER,
    FP8_COLLECTIVE_ALL_TO_ALL,
    FP8_COLLECTIVE_REDUCE_SCATTER,
    FP8_COLLECTIVE_ALL_REDUCE_MAX,
};

struct fp8_vote;

struct fp8_transport {
    const char *name;
    /* Arguments are checked and nothing is empty; the context is entered. */
    fp8_status (*all_gather)(fp8_comm *, const fp8_gather_part *, size_t count, fp8_stream);
    fp8_status (*all_to_all)(fp8_comm *, const fp8_exchange_part *, size_t count, fp8_stream);
    fp8_status (*reduce_scatter)(fp8_comm *, const fp8_reduce_part *, size_t count, fp8_stream);
    fp8_status (*all_reduce_max)(fp8_comm *, float *values, size_t count, fp8_stream);
    fp8_status (*poll)(fp8_comm *);
    fp8_status (*wait)(fp8_comm *, fp8_stream);
    void (*abort)(fp8_comm *, const char *why);
    /* NULL: the context's memory. All ranks vote equally often, whatever happens on one. */
    fp8_status (*alloc)(fp8_comm *, const struct fp8_vote *, size_t bytes, void **memory);
    void (*free)(fp8_comm *, void *memory);
    void (*destroy)(fp8_comm *); /* also releases the object */
};

struct fp8_comm {
    const struct fp8_transport *transport;
    fp8_context *context;
    int32_t rank, ranks;
    bool is_owned;
    bool can_exchange; /* all_to_all without SMs in memory of fp8_comm_alloc: known beforehand */
    atomic_bool is_copy_engine;
    int32_t version;
    const char *path;
    double timeout; /* seconds */
    char name[64];
    char label[FP8_COMM_LABEL]; /* "all_gather of w of layer 'qkv'": the running collective */
    pthread_mutex_t lock;       /* over the failure, and a transport's own */
    fp8_status failed;
    char why[FP8_COMM_SENTENCE];
};

#define FP8_COMM_DEFAULT_TIMEOUT 120.0

/* Fields that all transports fill alike. */
void fp8_comm_setup(fp8_comm *comm, const struct fp8_transport *transport, fp8_context *context,
                    int32_t rank, int32_t ranks, double timeout, const char *name);
/* Remembers the first failure; the lock is held. Returns its status with its sentence. */
fp8_status fp8_comm_fail_locked(fp8_comm *comm, fp8_status status, const char *why);
/* The failure so far as an error of this thread; the lock is held. */
fp8_status fp8_comm_failure_locked(const fp8_comm *comm);
/* FP8_ERR_ARGUMENT; 0 stands for the default. */
fp8_status fp8_comm_check_timeout(const char *call, double timeout);

/* ---- texts and votes (comm_agree.c); all ranks make the same calls ---- */

/* fp8_comm_agree; *differ: it failed because the texts differ, on all ranks alike, and may be
 * followed by another. */
fp8_status fp8_comm_compare(fp8_comm *comm, const char *what, const char *text, bool *differ);

struct fp8_vote {
    fp8_comm *comm;
    fp8_stream stream;
    void *word; /* of the context */
};

/* What votes need: before anything that can fail on one rank alone. */
fp8_status fp8_vote_open(fp8_comm *comm, struct fp8_vote *vote);
void fp8_vote_close(struct fp8_vote *vote);
/* A rank for which `mine` is true, the highest; -1: there is none. */
fp8_status fp8_vote_any(const struct fp8_vote *vote, bool mine, int32_t *rank);
/* The same end of `what` on all ranks: `mine` where it is an error, FP8_ERR_COMM where that of
 * another is. */
fp8_status fp8_vote_same(const struct fp8_vote *vote, fp8_status mine, const char *what);

/* ---- transports ---- */

/* comm_local.c: the only rank of a communicator of its own. */
fp8_status fp8_comm_create_alone(fp8_context *context, const fp8_comm_options *options,
                                 fp8_comm **comm);
/* comm_nccl.c: rank of a communicator with this id. */
fp8_status fp8_comm_create_nccl(fp8_context *context, const fp8_comm_options *options,
                                const fp8_comm_id *id, fp8_comm **comm);
/* comm_file.c: rank 0 hands its id to all others through a file; id is read on rank 0, else
 * written. */
fp8_status fp8_comm_rendezvous(const fp8_comm_options *options, double timeout, fp8_comm_id *id);

#endif
