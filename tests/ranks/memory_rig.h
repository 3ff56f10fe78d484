/*
 * memory_rig.h - the device's memory while a model runs: eight layers of 1024 x 1024, three steps.
 */
#ifndef MEMORY_RIG_H
#define MEMORY_RIG_H

#include <pthread.h>

#include "tests/ranks/rig.h"

/* One layer "l" of 1024 x 1024 for MEMORY_TOKENS tokens; %d: ranks. */
#define MEMORY_SPEC                                                                                \
    "return model 'm' { mesh = { fsdp = %d }, tokens = 4096, grad_weight = 'bf16', layers = {\n"   \
    "linear 'l' { in_features = 1024, out_features = 1024 } } }"

struct memory_case {
    const char *bundle;
    pthread_barrier_t meet; /* of all ranks */
};

/* rank->user is a memory_case. Forward keeps no more memory for each layer than its input in bf16
 * takes, and the second and the third step have the same peak. */
void memory_body(struct rank *rank);

#endif
