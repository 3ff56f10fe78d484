/*
 * comm_nccl.h - the communicator over NCCL as its rooms share it: made in comm_nccl_create.c, used
 * in comm_nccl.c, its memory in comm_nccl_window.c, ended in comm_nccl_end.c; nccl_library.c opens
 * the library. Not public.
 */
#ifndef FP8_COMM_NCCL_H
#define FP8_COMM_NCCL_H

#include "runtime/comm.h"
#include "runtime/driver.h"
#include "runtime/nccl_abi.h"

enum {
    PENDING = 64,
    WINDOWS = 8,
    COPY_ENGINE_VERSION = 22800,
    NVLS_MODE_VERSION = 23100,
    ABORT_SECONDS = 2,
    WHY = 301,
    FP8_NCCL_TAKEN = -1
};

/* A collective that was enqueued. */
struct pending {
    CUevent event;
    char label[FP8_COMM_LABEL];
};

struct window {
    void *memory;
    size_t bytes;
    bool is_nccl; /* from ncclMemAlloc */
    fp8_nccl_window window;
};

struct nccl {
    fp8_comm comm;
    const struct fp8_nccl *table;
    struct fp8_nccl own_table; /* of an adopted communicator's NCCL */
    fp8_nccl_comm handle;      /* NULL: aborted */
    uint32_t flags;
    CUevent events[PENDING];
    struct pending pending[PENDING];
    int head, count;   /* of pending */
    double head_since; /* when the head became the oldest */
    bool captured;     /* graphs have collectives of this communicator, which nobody watches */
    struct window windows[WINDOWS];
    bool is_blocking; /* calls launch before they return; else a thread of NCCL's does, in 30 us */
    /* Whose the handle is: 0, that of whoever holds the communicator's lock; since when it has been
     * with a call of NCCL's (microseconds on the clock), after which it is the caller's again; or
     * FP8_NCCL_TAKEN: who has set this, under watch_lock, has it for good, and aborts it. */
    _Atomic int64_t calling;
    char why[WHY];         /* of who took it: the program's, or "" for the watcher; watch_lock */
    struct ending *ending; /* what an abort needs; who has the handle has it. NULL: aborted */
    pthread_t watcher;
    bool watching;
    bool stop;
    /* over stop, a look and an abort that takes: a call that hangs holds the communicator's */
    pthread_mutex_t watch_lock;
    pthread_cond_t stopping;
};

extern const struct fp8_transport fp8_nccl_transport;

/* A call on a non-blocking communicator may still be under way when it returns: waits for it.
 * `what` is for messages; the lock is held. */
fp8_status fp8_nccl_settle(struct nccl *nccl, int result, const char *what);
/* Around calls that can hang: between the two the handle may be taken, by the watcher once they
 * last longer than the timeout, by fp8_comm_abort. The lock is held. */
void fp8_nccl_begin_call(struct nccl *nccl);
/* FP8_ERR_TIMEOUT, FP8_ERR_COMM: it was taken, by the one or the other, whatever the call says, and
 * the abort has ended or is left to itself. */
fp8_status fp8_nccl_end_call(struct nccl *nccl, const char *what);
/* What fp8_nccl_abort needs, beforehand: an abort must not fail for want of memory.
 * FP8_ERR_MEMORY. */
fp8_status fp8_nccl_ready_abort(struct nccl *nccl);
/* Ends NCCL's part of it, once; whose the handle is, who therefore may call this, struct nccl says.
 * Not at its end after so many seconds: the device is stuck until it is. Without a thread for it
 * the handle stays, and the device is stuck for good. On a device that is stuck it is begun and not
 * waited for. */
void fp8_nccl_abort(struct nccl *nccl, double seconds);
void fp8_nccl_destroy(fp8_comm *comm);
/* The body of the thread that watches. */
void *fp8_nccl_watch(void *nccl);

/* ---- memory (comm_nccl_window.c) ---- */

/* Why gathers do not go through windows, or NULL. */
const char *fp8_nccl_no_window(const struct nccl *nccl);
/* As fp8_transport.alloc and free. */
fp8_status fp8_nccl_alloc(fp8_comm *comm, const struct fp8_vote *vote, size_t bytes, void **memory);
void fp8_nccl_free(fp8_comm *comm, void *memory);
bool fp8_nccl_is_registered(const struct nccl *nccl, const void *memory);

/* nccl_library.c: the process's NCCL, opened by the first call. FP8_ERR_LIBRARY. */
fp8_status fp8_nccl_open(const struct fp8_nccl **table);
/* Looks up all functions; path may be "". */
fp8_status fp8_nccl_fill(struct fp8_nccl *table, fp8_comm_symbol find, void *user,
                         const char *path);

#endif
