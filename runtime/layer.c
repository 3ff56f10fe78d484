/*
 * layer.c - layers: creation, sizes, description, and the query of what a pass would run.
 *
 * A layer is its plan of the bundle and, on CUDA, the algorithms of its products. After creation it
 * never changes but for one atomic per algorithm list, so any number of threads may use it.
 * Creation is the last time that memory is allocated for it.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/internal.h"

/* ---- creation ---- */

static fp8_status no_layer(const struct fp8_bundle *bundle, const char *name)
{
    char list[512] = "";
    size_t at = 0;
    for (int i = 0; i < bundle->manifest.layer_count && at + 1 < sizeof list; i++) {
        int length = snprintf(list + at, sizeof list - at, "%s'%s'", i ? ", " : "",
                              bundle->manifest.layers[i].name);
        at += length > 0 ? (size_t)length : 0;
    }
    return fp8_fail(FP8_ERR_NOT_FOUND,
                    "layer_create: there is no layer '%s' in the bundle %s; it has %s", name,
                    bundle->path, list);
}

/* What fp8_layer_dispatch says of the passes that have no gemm. */
static void describe_quantize(struct fp8_layer *layer, fp8_pass pass)
{
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    char *names = layer->kernels[pass], *dtypes = layer->dtypes[pass];
    size_t at = 0, size = sizeof layer->kernels[pass];
    snprintf(names, size, "none");
    snprintf(dtypes, sizeof layer->dtypes[pass], "none");
    for (int i = 0; i < steps->gemm; i++) {
        const struct fp8_semantics *how = &steps->steps[i].semantics;
        int length = at < size ? snprintf(names + at, size - at, "%s%s", i ? ", " : "",
                                          steps->steps[i].kernel->name)
                               : 0;
        at += length > 0 ? (size_t)length : 0;
        if (how->target_dtype == FP8_DTYPE_E4M3 || how->target_dtype == FP8_DTYPE_E5M2)
            snprintf(dtypes, sizeof layer->dtypes[pass], "%s -> %s",
                     fp8_dtype_name(how->source_dtype), fp8_dtype_name(how->target_dtype));
    }
}

static size_t workspace_bytes(const struct fp8_layer *layer, int64_t tokens)
{
    size_t most = 0;
    for (int pass = 0; pass < FP8_PLAN_COUNT; pass++) {
        size_t bytes = fp8_frame_workspace_bytes(layer, (fp8_pass)pass, tokens);
        if (bytes > most)
            most = bytes;
    }
    return most;
}

/* tokens and bytes in one word, so that threads need no lock: 24 bits of M, 40 of whole 256 bytes
 * beyond the slack. What does not fit is worked out each time. */
size_t fp8_layer_workspace(const struct fp8_layer *layer, int64_t tokens)
{
    enum { TOKEN_BITS = 24, SLACK = FP8_PART_ALIGN - 1 };
    _Atomic uint64_t *memo = &((struct fp8_layer *)layer)->workspace_memo;
    uint64_t known = atomic_load_explicit(memo, memory_order_relaxed);
    if (known && (int64_t)(known & ((1u << TOKEN_BITS) - 1)) == tokens)
        return (size_t)(known >> TOKEN_BITS) * FP8_PART_ALIGN + SLACK;
    size_t bytes = workspace_bytes(layer, tokens), units = (bytes - SLACK) / FP8_PART_ALIGN;
    if (tokens < 1 << TOKEN_BITS && units * FP8_PART_ALIGN + SLACK == bytes &&
        units >> (64 - TOKEN_BITS) == 0)
        atomic_store_explicit(memo, (uint64_t)units << TOKEN_BITS | (uint64_t)tokens,
                              memory_order_relaxed);
    return bytes;
}

static fp8_status create_gemms(struct fp8_layer *layer)
{
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
        if (steps->gemm == steps->step_count) {
            describe_quantize(layer, (fp8_pass)pass);
            continue;
        }
        bool needed = false;
        if (!layer->context->is_host) {
            FP8_TRY(fp8_gemm_plan_create(layer->context, layer->plan, (fp8_pass)pass,
                                         &layer->gemms[pass]));
            needed = fp8_gemm_needs_buffers(layer->gemms[pass]);
        }
        if (!needed)
            layer->unused[pass] = steps->gemm_buffers;
    }
    return FP8_OK;
}

fp8_status fp8_layer_create(fp8_bundle *bundle, const char *name, fp8_layer **layer)
{
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_create: layer is NULL");
    *layer = NULL;
    if (!bundle || !name)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_create: %s is NULL", bundle ? "name" : "bundle");
    const struct fp8_layer_plan *plan = NULL;
    for (int i = 0; i < bundle->manifest.layer_count && !plan; i++) {
        if (strcmp(bundle->manifest.layers[i].name, name) == 0)
            plan = &bundle->manifest.layers[i];
    }
    if (!plan)
        return fp8_report(bundle->context, no_layer(bundle, name));
    const double start = fp8_clock();
    struct fp8_layer *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_report(bundle->context, fp8_fail_memory("a layer", sizeof *made));
    made->bundle = bundle;
    made->context = bundle->context;
    made->plan = plan;
    struct fp8_uncaptured entered;
    fp8_status status = fp8_uncaptured_enter(made->context, "layer_create", NULL, &entered);
    if (status == FP8_OK) {
        status = create_gemms(made);
        fp8_uncaptured_leave(made->context, &entered);
    }
    if (status != FP8_OK) {
        fp8_layer_destroy(made);
        return fp8_report(bundle->context, status);
    }
    made->workspace_bytes = workspace_bytes(made, plan->max_tokens);
    fp8_log_write(&made->context->log, FP8_LOG_INFO, "layer '%s' made in %.2f ms", plan->name,
                  1e3 * (fp8_clock() - start));
    *layer = made;
    return FP8_OK;
}

void fp8_layer_destroy(fp8_layer *layer)
{
    if (!layer)
        return;
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++)
        fp8_gemm_plan_destroy(layer->gemms[pass]);
    fp8_release(layer);
}

/* ---- description ---- */

fp8_status fp8_layer_describe(const fp8_layer *layer, fp8_layer_info *info)
{
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_describe: layer is NULL");
    FP8_TRY(fp8_check_answer("layer_describe", "info", info, sizeof *info));
    const struct fp8_layer_plan *plan = layer->plan;
    *info = (fp8_layer_info){
        .size = sizeof *info,
        .has_bias = plan->has_bias,
        .in_features = plan->in_features,
        .out_features = plan->out_features,
        .tokens = plan->tokens,
        .max_tokens = plan->max_tokens,
        .x_dtype = fp8_slot_dtype(plan, FP8_SLOT_X),
        .w_dtype = fp8_slot_dtype(plan, FP8_SLOT_W),
        .y_dtype = fp8_slot_dtype(plan, FP8_SLOT_Y),
        .dy_dtype = fp8_slot_dtype(plan, FP8_SLOT_DY),
        .dx_dtype = fp8_slot_dtype(plan, FP8_SLOT_DX),
        .dw_dtype = fp8_slot_dtype(plan, FP8_SLOT_DW),
        .bias_dtype = fp8_slot_dtype(plan, FP8_SLOT_BIAS),
        .dbias_dtype = fp8_slot_dtype(plan, FP8_SLOT_DBIAS),
        .x_format = plan->formats[FP8_ROLE_X],
        .w_format = plan->formats[FP8_ROLE_W],
        .dy_format = plan->formats[FP8_ROLE_DY],
        .name = plan->name,
        .recipe = fp8_recipe_names[plan->recipe.kind],
    };
    return FP8_OK;
}

fp8_status fp8_layer_bytes(const fp8_layer *layer, int64_t tokens, fp8_bytes which, size_t *bytes)
{
    if (!bytes)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_bytes: bytes is NULL");
    *bytes = 0;
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_bytes: layer is NULL");
    const struct fp8_layer_plan *plan = layer->plan;
    const struct fp8_check check = { .call = "layer_bytes", .plan = plan };
    FP8_TRY(fp8_check_tokens(&check, "tokens", tokens));
    static const struct {
        fp8_role role;
        uint32_t copies;
    } operands[] = {
        [FP8_BYTES_X] = { FP8_ROLE_X, FP8_COPY_BOTH },
        [FP8_BYTES_SAVED] = { FP8_ROLE_X, FP8_COPY_TRANSPOSED },
        [FP8_BYTES_WEIGHT] = { FP8_ROLE_W, FP8_COPY_BOTH },
        [FP8_BYTES_WEIGHT_ROW] = { FP8_ROLE_W, FP8_COPY_ROW },
        [FP8_BYTES_GRAD] = { FP8_ROLE_DY, FP8_COPY_BOTH },
        [FP8_BYTES_GRAD_ROW] = { FP8_ROLE_DY, FP8_COPY_ROW },
        [FP8_BYTES_GRAD_TRANSPOSED] = { FP8_ROLE_DY, FP8_COPY_TRANSPOSED },
    };
    if (which == FP8_BYTES_WORKSPACE) {
        *bytes = fp8_layer_workspace(layer, tokens);
        return FP8_OK;
    }
    if ((unsigned)which >= sizeof operands / sizeof operands[0])
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_bytes: which is %d; pass FP8_BYTES_*", (int)which);
    const struct fp8_shape shape =
        fp8_operand_shape(plan, operands[which].role, tokens, operands[which].copies);
    *bytes = shape.copies ? (size_t)fp8_operand_bytes(&shape) : 0;
    return FP8_OK;
}

/* ---- dispatch ---- */

/* Kernels that run before the gemm for tensors that are not empty. */
static uint32_t quantize_launches(const struct fp8_layer *layer, fp8_pass pass, int64_t tokens)
{
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    int32_t sms = fp8_sms_of_call(layer->context, 0);
    uint32_t launches = 0;
    if (tokens == 0 && pass != FP8_PASS_WEIGHT)
        return 0;
    for (int i = 0; i < steps->gemm; i++) {
        launches++;
        if (fp8_step_alternative(layer, &steps->steps[i], tokens, sms))
            i++; /* it stands for the quantize step, too */
    }
    return launches;
}

static const char *quantize_reason(const struct fp8_layer_plan *plan)
{
    static const char *const reasons[FP8_RECIPE_COUNT] = {
        [FP8_RECIPE_CURRENT] = "quantises one operand: its amax first, then one read and both "
                               "copies",
        [FP8_RECIPE_DELAYED] =
            "quantises one operand with the scale of its history: one read, both "
            "copies, and the amax for the next step",
        [FP8_RECIPE_ROWWISE] = "quantises one operand with a scale a row, then with a scale a "
                               "column",
        [FP8_RECIPE_ROWWISE_HP_WGRAD] = "quantises one operand with a scale a row; w also for the "
                                        "whole tensor",
        [FP8_RECIPE_BLOCK] = "quantises one operand with a scale for each block: one read, both "
                             "copies",
    };
    return plan->is_bf16 ? "this layer computes in bf16: nothing is quantised"
                         : reasons[plan->recipe.kind];
}

static void dispatch_gemm(const struct fp8_layer *layer, fp8_pass pass, int64_t tokens,
                          fp8_dispatch *dispatch)
{
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    if (!layer->context->is_host) {
        fp8_gemm_describe(layer->gemms[pass], tokens, dispatch);
        return;
    }
    const struct fp8_gemm_step *gemm = steps->steps[steps->gemm].gemm;
    dispatch->dtype = gemm->ranges[fp8_range_at(gemm, tokens)].dtype;
    dispatch->backend = "host";
    dispatch->kernel = "gemm";
    dispatch->reason = "this context is the host: every pass runs on the CPU";
    dispatch->launches += tokens > 0;
}

fp8_status fp8_layer_dispatch(const fp8_layer *layer, fp8_pass pass, int64_t tokens,
                              fp8_dispatch *dispatch)
{
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_dispatch: layer is NULL");
    FP8_TRY(fp8_check_answer("layer_dispatch", "dispatch", dispatch, sizeof *dispatch));
    if ((unsigned)pass >= FP8_PASS_COUNT)
        return fp8_fail(FP8_ERR_ARGUMENT, "layer_dispatch: pass is %d; pass FP8_PASS_*", (int)pass);
    const struct fp8_check check = { .call = "layer_dispatch", .plan = layer->plan };
    FP8_TRY(fp8_check_tokens(&check, "tokens", tokens));
    *dispatch = (fp8_dispatch){
        .size = sizeof *dispatch,
        .launches = quantize_launches(layer, pass, tokens),
        .backend = "quantize",
        .kernel = layer->kernels[pass],
        .dtype = layer->dtypes[pass],
        .reason = quantize_reason(layer->plan),
    };
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    if (steps->gemm < steps->step_count)
        dispatch_gemm(layer, pass, tokens, dispatch);
    return FP8_OK;
}
