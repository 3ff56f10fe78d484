/*
 * gemm_plan.c - what computes a layer's product, for each range of tokens.
 *
 * In: the choices of the plan. At creation the first that this context can run is taken for every
 * range; calls look it up by M. cuBLASLt, the last choice, is asked for algorithms only where it is
 * the one taken, so a layer of generated kernels costs no heuristic. Knows neither tensor maps nor
 * algorithms.
 */
#include <stdio.h>

#include "runtime/gemm_plan.h"

/* ---- extents ---- */

int64_t fp8_gemm_extent(const struct fp8_gemm_plan *plan, int arg, int64_t tokens)
{
    const struct fp8_source *source = &plan->step->args[arg];
    const struct fp8_buffer *buffers = plan->layer->buffers;
    switch ((enum fp8_source_kind)source->kind) {
    case FP8_FROM_LITERAL:
        return source->literal;
    case FP8_FROM_TOKENS:
        return tokens;
    case FP8_FROM_LD:
        return fp8_dim_at(&buffers[source->buffer].cols, tokens);
    case FP8_FROM_ROWS:
        return fp8_dim_at(&buffers[source->buffer].rows, tokens);
    case FP8_FROM_ACCUMULATE:
    case FP8_FROM_ADDRESS:
    case FP8_FROM_EPOCH:
        break;
    }
    return 0;
}

/* ---- creation ---- */

static void log_choice(const struct fp8_gemm_plan *plan, const struct fp8_range *range,
                       const struct fp8_choice *choice, const char *refusal)
{
    const struct fp8_log *log = &plan->context->log;
    if (choice->backend == FP8_BACKEND_CUBLASLT || !fp8_log_wanted(log, FP8_LOG_DISPATCH))
        return;
    fp8_log_write(log, FP8_LOG_DISPATCH, "layer '%s', %s, M %lld..%lld: generated %s%s%s%s%s",
                  plan->layer->name, fp8_pass_name(plan->pass), (long long)range->min_tokens,
                  (long long)range->max_tokens, choice->overwrite->name,
                  choice->add ? ", accumulating " : "", choice->add ? choice->add->name : "",
                  refusal ? " passed over: " : ": ", refusal ? refusal : choice->reason);
}

static fp8_status choose(struct fp8_gemm_plan *plan, int index)
{
    const struct fp8_range *range = &plan->step->gemm->ranges[index];
    struct fp8_gemm_range *made = &plan->ranges[index];
    for (int i = 0; i < range->choice_count && !made->choice; i++) {
        const struct fp8_choice *choice = &range->choices[i];
        const char *refusal = NULL;
        if (choice->backend == FP8_BACKEND_GENERATED)
            refusal = fp8_generated_refusal(plan, range, choice);
        log_choice(plan, range, choice, refusal);
        if (!refusal)
            made->choice = choice;
    }
    if (made->choice->backend == FP8_BACKEND_CUBLASLT)
        return fp8_lt_range_create(plan, index, &made->lt);
    return FP8_OK;
}

fp8_status fp8_gemm_plan_create(const struct fp8_context *context,
                                const struct fp8_layer_plan *layer, fp8_pass pass,
                                struct fp8_gemm_plan **plan)
{
    const struct fp8_step *step = &layer->passes[pass].steps[layer->passes[pass].gemm];
    size_t bytes = sizeof **plan + (size_t)step->gemm->range_count * sizeof(struct fp8_gemm_range);
    struct fp8_gemm_plan *made = *plan = fp8_allocate(bytes);
    if (!made)
        return fp8_fail_memory("a layer's algorithms", bytes);
    made->context = context;
    made->layer = layer;
    made->step = step;
    made->pass = pass;
    made->has_bias = step->args[FP8_GEMM_bias].kind == FP8_FROM_ADDRESS;
    fp8_status status = FP8_OK;
    for (int i = 0; i < step->gemm->range_count && status == FP8_OK; i++)
        status = choose(made, i);
    if (status == FP8_OK)
        return FP8_OK;
    fp8_gemm_plan_destroy(made);
    *plan = NULL;
    return status;
}

void fp8_gemm_plan_destroy(struct fp8_gemm_plan *plan)
{
    for (int i = 0; plan && i < plan->step->gemm->range_count; i++)
        fp8_lt_range_destroy(plan->ranges[i].lt);
    fp8_release(plan);
}

/* ---- calls ---- */

fp8_status fp8_gemm_run(struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                        const fp8_value *args)
{
    int index = fp8_range_at(plan->step->gemm, frame->tokens);
    const struct fp8_gemm_range *range = &plan->ranges[index];
    if (range->lt)
        return fp8_lt_range_run(plan, index, frame, args);
    return fp8_generated_run(plan->context, range->choice, frame, args);
}

bool fp8_gemm_needs_buffers(const struct fp8_gemm_plan *plan)
{
    for (int i = 0; i < plan->step->gemm->range_count; i++) {
        if (plan->ranges[i].lt)
            return true;
    }
    return false;
}

void fp8_gemm_describe(const struct fp8_gemm_plan *plan, int64_t tokens, fp8_dispatch *dispatch)
{
    int index = fp8_range_at(plan->step->gemm, tokens);
    const struct fp8_gemm_range *range = &plan->ranges[index];
    uint32_t launches = 1;
    dispatch->dtype = plan->step->gemm->ranges[index].dtype;
    dispatch->reason = range->choice->reason;
    if (range->lt) {
        dispatch->backend = "cublaslt";
        dispatch->kernel = fp8_lt_range_describe(plan, index, tokens, &launches);
    } else {
        dispatch->backend = "generated";
        dispatch->kernel = range->choice->overwrite->name;
    }
    dispatch->launches += tokens > 0 ? launches : 0;
}
