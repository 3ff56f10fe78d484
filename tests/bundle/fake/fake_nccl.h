/*
 * fake_nccl.h - NCCL between processes of one machine, without GPUs: memory that they share.
 *
 * Collectives are done when the call returns, if all ranks come within `patience`. Else the call
 * returns all the same, as NCCL's do, and the stream hangs (busy) until the communicator is
 * aborted. Ranks that call different collectives hang as well: NCCL compares nothing.
 */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <stdbool.h>
#include <stdint.h>

struct fake_nccl {
    int version;            /* 23203 */
    double patience;        /* seconds, 5 */
    bool no_window;         /* windows cannot be made on this node */
    bool no_memory;         /* of its own */
    bool is_stuck;          /* an abort does not come back */
    int async_error;        /* an ncclResult_t that polls report */
    int (*call)(void);      /* calls of collectives do this instead, and give its ncclResult_t */
    void (*aborting)(void); /* an abort begins with this */
    bool (*busy)(void);
    /* as fake_cuda.record; NULL: collectives are done at once */
    bool (*record)(void *stream, void (*run)(void *data), const void *data, size_t bytes);
    int64_t collectives, groups, aborts, destroys, windows, allocations;
    int64_t live; /* communicators, windows and memory */
    int last_policy, last_blocking, last_nvls;
    uint64_t last_config_size;
};

typedef struct fake_nccl *(*fake_nccl_getter)(void); /* fake_nccl_state */

#endif
