/*
 * plan_check.h - what the two files of the plan's checks share: where a check stands, and which
 * tensors and operands a pass has.
 */
#ifndef FP8_PLAN_CHECK_H
#define FP8_PLAN_CHECK_H

#include "runtime/internal.h"

struct fp8_checker {
    const char *path; /* of the manifest */
    const struct fp8_layer_plan *plan;
    fp8_pass pass;
    const struct fp8_step *step;
    int64_t tokens;
};

/* The sentence about an argument of the step; FP8_ERR_BUNDLE. */
fp8_status fp8_plan_bad(const struct fp8_checker *c, int arg, const char *rule);

static inline bool fp8_is_given(const struct fp8_checker *c, int arg)
{
    return c->step->args[arg].kind == FP8_FROM_ADDRESS;
}

struct fp8_belongings {
    uint32_t slots, roles; /* bit = fp8_slot, fp8_role */
    fp8_role filled;       /* operand that the pass may write */
};
/* Of a pass, or of the steps for a given amax. */
struct fp8_belongings fp8_plan_belongings(const struct fp8_layer_plan *plan, int pass);

fp8_status fp8_plan_flow(struct fp8_checker *c);

#endif
