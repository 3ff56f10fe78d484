/*
 * rig.h - ranks for tests: threads of this process, each with a context and a communicator.
 */
#ifndef RANKS_RIG_H
#define RANKS_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/fp8_comm.h"
#include "runtime/fp8_primitives.h"
#include "runtime/fp8_device.h"

/* One rank of a run. A body must not use cmocka's asserts, which belong to the main thread; it
 * reports with rank_check, whose first failure ranks_run fails with. */
struct rank {
    int32_t rank, ranks;
    fp8_context *context;
    fp8_comm *comm;
    void *user;
    char fault[512];
};
typedef void (*rank_body)(struct rank *rank);

/* Runs the body on `ranks` threads with host contexts of one thread each. */
void ranks_run(int32_t ranks, double timeout, rank_body body, void *user);
/* The same with rank r on GPU r. */
void ranks_run_gpus(int32_t ranks, double timeout, rank_body body, void *user);
/* GPUs that this process can use; the reason why not more is fp8_last_error(). */
int ranks_gpus(void);

#define rank_check(rank, condition)                                                                \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            rank_fault(rank, __FILE__, __LINE__, #condition);                                      \
            return;                                                                                \
        }                                                                                          \
    } while (0)
void rank_fault(struct rank *rank, const char *file, int line, const char *condition);

/* Builds a bundle from the text of a spec, for an arch ("sm_90a") or without kernels ("none"); main
 * thread. */
void ranks_bundle(const char *spec, const char *arch, char path[256]);
void ranks_bundle_drop(const char *path);

/* Text of this thread's last error contains all words (NULL ends the list). */
int says(const char *first, ...);

#endif
