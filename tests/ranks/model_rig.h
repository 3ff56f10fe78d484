/*
 * model_rig.h - steps of a model on every rank, compared bit by bit with unsharded layers.
 *
 * Each rank runs its own tokens through every layer of the bundle (each layer with inputs of its
 * own), twice per step, and then does the same with plain layers and whole weights: y and dx must
 * have the same bits, dw and dbias those of the sum over the ranks in ascending order.
 */
#ifndef MODEL_RIG_H
#define MODEL_RIG_H

#include "runtime/fp8_model.h"
#include "tests/ranks/rig.h"

struct model_case {
    const char *bundle;
    int64_t
        tokens; /* rank r has tokens - r of them, at least 0; -1: only the last rank has any (3) */
    int steps;
    uint32_t keep, average, no_prefetch;
    int32_t slots, comm_sms;
    fp8_model_reduce reduce_by;
    uint32_t transposed_shards;
    uint32_t group; /* of all layers */
    int with_hooks; /* odd layers get weights and gradients from hooks */
    int give_bias;  /* 1: bias by update; 0: by fprop */
    int caller_dw;  /* whole accumulators of the caller, reduced with the last micro-batch */
    int gathers;    /* of groups that a step makes; 0: not counted */
};

void model_body(struct rank *rank); /* rank->user is a model_case */

/* What each rank does now, for whoever finds that one hangs. */
enum { MODEL_RANKS = 16 };
extern char model_doing[MODEL_RANKS][96];

/* bf16 bits, deterministic; `what` separates tensors. */
uint16_t model_value(uint64_t what, int64_t index);

#endif
