/*
 * process_rig.h - ranks as real processes, each with a context on the fake GPU and the fake NCCL.
 */
#ifndef PROCESS_RIG_H
#define PROCESS_RIG_H

#include "tests/bundle/bundle_rig.h"

#include "runtime/fp8_comm.h"
#include "tests/bundle/fake/fake_nccl.h"

struct process {
    int rank, ranks;
    double timeout;
    uint32_t flags;
    const char *folder; /* of the bundle, and of the file of the id */
    fp8_context *context;
    fp8_comm *comm;
    int variant, stage; /* stages of a pipeline find each other apart */
};
typedef int (*process_body)(struct process *); /* 0: good */

/* In a body: cmocka's asserts belong to the parent. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: rank %d of %d: %s (last error: %s)\n", __FILE__, __LINE__,     \
                    p->rank, p->ranks, #condition, fp8_last_error());                              \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

struct fake_nccl *fake_nccl(void);
bool process_says(const char *word); /* the last error */
fp8_status process_join(struct process *p);
void process_leave(struct process *p);
double process_now(void);
/* Runs the body on all ranks; a rank in `missing` (bits) is not started. Every process must end
 * within 20 seconds with code 0, but for those in `killed`. */
void process_run(int ranks, struct process start, process_body body, unsigned missing,
                 unsigned killed);

#endif
