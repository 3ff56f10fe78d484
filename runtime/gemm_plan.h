/*
 * gemm_plan.h - how a layer's product is run, between the rooms that share it.
 *
 *   gemm_plan.c       takes a choice for each range of tokens, sends a call to it, describes it
 *   gemm_generated.c  a kernel of the bundle: its tensor maps and its launch
 *   gemm_cublaslt.c   cuBLASLt: algorithms, in place or through the stage
 *
 * What is chosen at creation stays: a call never goes from one backend to another.
 */
#ifndef FP8_GEMM_PLAN_H
#define FP8_GEMM_PLAN_H

#include "runtime/internal.h"

struct fp8_lt_range; /* of gemm_cublaslt.c */

struct fp8_gemm_range {
    const struct fp8_choice *choice;
    struct fp8_lt_range *lt; /* NULL: generated */
};

struct fp8_gemm_plan {
    const struct fp8_context *context;
    const struct fp8_layer_plan *layer;
    const struct fp8_step *step;
    fp8_pass pass;
    bool has_bias;
    struct fp8_gemm_range ranges[]; /* as the step's dispatch */
};

/* The value of an integer argument for some M, with packed caller's tensors. */
int64_t fp8_gemm_extent(const struct fp8_gemm_plan *plan, int arg, int64_t tokens);

/* ---- gemm_generated.c ---- */

/* Why the choice cannot be run for the range, NULL if it can. */
const char *fp8_generated_refusal(const struct fp8_gemm_plan *plan, const struct fp8_range *range,
                                  const struct fp8_choice *choice);
fp8_status fp8_generated_run(const struct fp8_context *context, const struct fp8_choice *choice,
                             const struct fp8_frame *frame, const fp8_value *args);

/* ---- gemm_cublaslt.c ---- */

/* Asks for the range's algorithms; *made is set even on failure: destroy it. */
fp8_status fp8_lt_range_create(const struct fp8_gemm_plan *plan, int range,
                               struct fp8_lt_range **made);
void fp8_lt_range_destroy(struct fp8_lt_range *range);
fp8_status fp8_lt_range_run(const struct fp8_gemm_plan *plan, int range,
                            const struct fp8_frame *frame, const fp8_value *args);
/* The algorithm that runs first, and the launches for an output that is contiguous and aligned. */
const char *fp8_lt_range_describe(const struct fp8_gemm_plan *plan, int range, int64_t tokens,
                                  uint32_t *launches);

#endif
