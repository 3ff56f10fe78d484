/*
 * plan_check.h - what the files of the plan's checks share: where a check stands, what a pointer
 * must cover, and which tensors and operands a pass has.
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

/* The value of an argument that is a number, at these tokens. */
int64_t fp8_plan_value(const struct fp8_checker *c, int arg);

enum { FP8_NO_LD = -1 };

/* What one pointer argument must cover. */
struct fp8_need {
    int pointer;
    int ld; /* an argument, or FP8_NO_LD where rows is 1 */
    bool optional;
    fp8_dtype dtype;
    int64_t rows;
    int64_t cols;
};

fp8_status fp8_plan_needs(const struct fp8_checker *c, const struct fp8_need *needs, size_t count);

#define FP8_NEEDS(c, ...)                                                                          \
    do {                                                                                           \
        const struct fp8_need needs_[] = { __VA_ARGS__ };                                          \
        FP8_TRY(fp8_plan_needs(c, needs_, sizeof needs_ / sizeof needs_[0]));                      \
    } while (0)

struct fp8_belongings {
    uint32_t slots, roles; /* bit = fp8_slot, fp8_role */
    fp8_role filled;       /* operand that the pass may write */
};
/* Of a pass, or of the steps for a given amax. */
struct fp8_belongings fp8_plan_belongings(const struct fp8_layer_plan *plan, int pass);

fp8_status fp8_plan_flow(struct fp8_checker *c);
/* The step of this pass that multiplies. */
fp8_status fp8_plan_check_gemm(const struct fp8_checker *c);

#endif
