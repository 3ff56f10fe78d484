/*
 * backward.c - quantize_dy, wgrad, dgrad, and the three as one call.
 *
 * As in passes.c, each has a check, which refuses before anything is enqueued, and a run. backward
 * composes the checks and then the runs of three passes.
 */
#include "runtime/internal.h"

static fp8_status check_version(const char *call, const char *name, uint64_t used, uint64_t given,
                                uint32_t stale_ok)
{
    if (used == given || used == 0 || given == 0 || stale_ok)
        return FP8_OK;
    return fp8_fail(
        FP8_ERR_VERSION,
        "%s: %s comes from a forward with weight version %llu, but the weight given has "
        "version %llu; run forward again with it, keep the old one for backward, or set "
        "stale_ok",
        call, name, (unsigned long long)used, (unsigned long long)given);
}

/* ---- quantize_dy ---- */

static fp8_status check_dbias(const struct fp8_check *check, const fp8_tensor *dbias)
{
    if (!dbias)
        return FP8_OK;
    if (check->plan->slots[FP8_SLOT_DBIAS] < 0)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: dbias is given, but layer '%s' has no bias; pass NULL, or set bias = true "
            "in the spec and rebuild",
            check->call, check->plan->name);
    return fp8_check_tensor(check, FP8_SLOT_DBIAS, dbias);
}

/* copies = 0: only dbias and found_inf are wanted; grad may then be NULL. */
static fp8_status check_quantize_dy(const char *call, const fp8_layer *layer,
                                    const fp8_quantize_dy_args *args, uint32_t copies,
                                    int64_t *tokens)
{
    struct fp8_check check = { .call = call, .plan = layer->plan };
    if (!args->dy)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: dy is NULL", call);
    *tokens = args->dy->rows;
    FP8_TRY(fp8_check_tokens(&check, "dy->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_DY, args->dy));
    if (args->saved)
        FP8_TRY(fp8_check_filled(&check, "saved", FP8_ROLE_X, 0, args->saved));
    if (copies || args->grad)
        FP8_TRY(fp8_check_target(&check, "grad", FP8_ROLE_DY, copies, args->grad));
    FP8_TRY(check_dbias(&check, args->dbias));
    FP8_TRY(fp8_check_flag(call, "accumulate_dbias", args->accumulate_dbias));
    FP8_TRY(fp8_check_found_inf(&check, FP8_PASS_QUANTIZE_DY, args->found_inf));
    FP8_TRY(fp8_check_state(&check, FP8_PASS_QUANTIZE_DY, &args->call));
    return fp8_check_call(&check, layer, &args->call);
}

/* grad: as it will be when filled, or NULL. */
static fp8_status run_quantize_dy(const fp8_layer *layer, const fp8_quantize_dy_args *args,
                                  int64_t tokens, const fp8_operand *grad)
{
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    frame.accumulate = args->accumulate_dbias;
    fp8_frame_tensor(&frame, FP8_SLOT_DY, args->dy);
    fp8_frame_tensor(&frame, FP8_SLOT_DBIAS, args->dbias);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_state(&frame, FP8_ROLE_DY, &args->call);
    if (grad)
        fp8_frame_operand(&frame, FP8_ROLE_DY, grad);
    fp8_frame_workspace(&frame, FP8_PASS_QUANTIZE_DY, args->call.workspace, false);
    return fp8_frame_enqueue(&frame, FP8_PASS_QUANTIZE_DY, 0);
}

static fp8_operand filled_grad(const fp8_layer *layer, const fp8_quantize_dy_args *args,
                               int64_t tokens, uint32_t copies)
{
    fp8_operand filled = FP8_OPERAND_INIT;
    if (args->grad)
        filled = *args->grad;
    fp8_operand_fill(&filled, layer->plan, FP8_ROLE_DY, tokens, copies,
                     args->saved ? args->saved->version : 0);
    return filled;
}

fp8_status fp8_layer_quantize_dy(const fp8_layer *layer, const fp8_quantize_dy_args *args)
{
    const char *call = "quantize_dy";
    int64_t tokens = 0;
    uint32_t copies = 0;
    fp8_status status = fp8_check_args(call, layer, args, sizeof *args,
                                       args ? args->reserved : NULL, args ? args->reserved0 : 0);
    if (status == FP8_OK) {
        const struct fp8_check check = { .call = call, .plan = layer->plan };
        copies = args->copies;
        status = fp8_check_copies(&check, FP8_ROLE_DY, &copies);
    }
    if (status == FP8_OK) /* for its version, also where the recipe has no copies */
        status = fp8_check_operand_struct(call, "grad", args->grad);
    if (status == FP8_OK)
        status = check_quantize_dy(call, layer, args, copies, &tokens);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_operand filled = filled_grad(layer, args, tokens, copies);
    fp8_operand_clear(args->grad);
    status = run_quantize_dy(layer, args, tokens, &filled);
    if (status == FP8_OK)
        *args->grad = filled;
    return fp8_report(layer->context, status);
}

/* ---- wgrad ---- */

static fp8_status check_wgrad(const char *call, const fp8_layer *layer, const fp8_wgrad_args *args,
                              int64_t *tokens)
{
    struct fp8_check check = { .call = call, .plan = layer->plan };
    bool by_tensor =
        args->x && !(fp8_operand_copies(layer->plan, FP8_ROLE_X) & FP8_COPY_TRANSPOSED);
    if (by_tensor)
        *tokens = args->x->rows;
    else if (args->saved || !args->x)
        FP8_TRY(fp8_check_rows(call, "saved", FP8_ROLE_X, args->saved, tokens));
    FP8_TRY(fp8_check_tokens(&check, by_tensor ? "x->rows" : "saved->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(
        fp8_check_factor(&check, FP8_ROLE_X, FP8_COPY_TRANSPOSED, "saved", args->saved, args->x));
    FP8_TRY(
        fp8_check_factor(&check, FP8_ROLE_DY, FP8_COPY_TRANSPOSED, "grad", args->grad, args->dy));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_DW, args->dw));
    FP8_TRY(fp8_check_flag(call, "accumulate", args->accumulate));
    return fp8_check_call(&check, layer, &args->call);
}

static fp8_status run_wgrad(const fp8_layer *layer, const fp8_wgrad_args *args, int64_t tokens)
{
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    frame.accumulate = args->accumulate;
    fp8_frame_tensor(&frame, FP8_SLOT_DW, args->dw);
    fp8_frame_tensor(&frame, FP8_SLOT_X, args->x);
    fp8_frame_tensor(&frame, FP8_SLOT_DY, args->dy);
    if (args->saved)
        fp8_frame_operand(&frame, FP8_ROLE_X, args->saved);
    if (args->grad)
        fp8_frame_operand(&frame, FP8_ROLE_DY, args->grad);
    fp8_frame_workspace(&frame, FP8_PASS_WGRAD, args->call.workspace, false);
    return fp8_frame_enqueue(&frame, FP8_PASS_WGRAD, 0);
}

fp8_status fp8_layer_wgrad(const fp8_layer *layer, const fp8_wgrad_args *args)
{
    int64_t tokens = 0;
    fp8_status status =
        fp8_check_args("wgrad", layer, args, sizeof *args, args ? args->reserved : NULL, 0);
    if (status == FP8_OK)
        status = check_wgrad("wgrad", layer, args, &tokens);
    if (status == FP8_OK)
        status = run_wgrad(layer, args, tokens);
    return layer ? fp8_report(layer->context, status) : status;
}

/* ---- dgrad ---- */

static fp8_status check_dgrad(const char *call, const fp8_layer *layer, const fp8_dgrad_args *args,
                              int64_t *tokens)
{
    struct fp8_check check = { .call = call, .plan = layer->plan };
    bool by_tensor = args->dy && layer->plan->is_bf16;
    if (by_tensor)
        *tokens = args->dy->rows;
    else if (args->grad || !args->dy)
        FP8_TRY(fp8_check_rows(call, "grad", FP8_ROLE_DY, args->grad, tokens));
    FP8_TRY(fp8_check_tokens(&check, by_tensor ? "dy->rows" : "grad->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(fp8_check_factor(&check, FP8_ROLE_DY, FP8_COPY_ROW, "grad", args->grad, args->dy));
    FP8_TRY(
        fp8_check_factor(&check, FP8_ROLE_W, FP8_COPY_TRANSPOSED, "weight", args->weight, args->w));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_DX, args->dx));
    FP8_TRY(fp8_check_flag(call, "stale_ok", args->stale_ok));
    if (args->grad && args->weight)
        FP8_TRY(check_version(call, "grad", args->grad->version, args->weight->version,
                              args->stale_ok));
    return fp8_check_call(&check, layer, &args->call);
}

static fp8_status run_dgrad(const fp8_layer *layer, const fp8_dgrad_args *args, int64_t tokens)
{
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    fp8_frame_tensor(&frame, FP8_SLOT_DX, args->dx);
    fp8_frame_tensor(&frame, FP8_SLOT_DY, args->dy);
    fp8_frame_tensor(&frame, FP8_SLOT_W, args->w);
    if (args->grad)
        fp8_frame_operand(&frame, FP8_ROLE_DY, args->grad);
    if (args->weight)
        fp8_frame_operand(&frame, FP8_ROLE_W, args->weight);
    fp8_frame_workspace(&frame, FP8_PASS_DGRAD, args->call.workspace, false);
    return fp8_frame_enqueue(&frame, FP8_PASS_DGRAD, 0);
}

fp8_status fp8_layer_dgrad(const fp8_layer *layer, const fp8_dgrad_args *args)
{
    int64_t tokens = 0;
    fp8_status status =
        fp8_check_args("dgrad", layer, args, sizeof *args, args ? args->reserved : NULL, 0);
    if (status == FP8_OK)
        status = check_dgrad("dgrad", layer, args, &tokens);
    if (status == FP8_OK)
        status = run_dgrad(layer, args, tokens);
    return layer ? fp8_report(layer->context, status) : status;
}

/* ---- backward ---- */

/* The three passes of a backward, as their own args. grad is what quantize_dy will leave. */
struct backward {
    uint32_t copies;
    int64_t tokens;
    fp8_operand grad;
    fp8_quantize_dy_args quantize_dy;
    fp8_wgrad_args wgrad;
    fp8_dgrad_args dgrad;
};

static void split_backward(const struct fp8_layer_plan *plan, const fp8_backward_args *args,
                           struct backward *b)
{
    b->copies = (args->dx ? FP8_COPY_ROW : 0u) | (args->dw ? FP8_COPY_TRANSPOSED : 0u);
    b->copies &= fp8_operand_copies(plan, FP8_ROLE_DY);
    bool wgrad_of_dy = !(fp8_operand_copies(plan, FP8_ROLE_DY) & FP8_COPY_TRANSPOSED);
    b->quantize_dy = (fp8_quantize_dy_args){
        .size = sizeof b->quantize_dy,
        .dy = args->dy,
        .saved = args->saved,
        .grad = args->grad,
        .dbias = args->dbias,
        .accumulate_dbias = args->accumulate_dbias,
        .found_inf = args->found_inf,
        .call = args->call,
    };
    b->wgrad = (fp8_wgrad_args){
        .size = sizeof b->wgrad,
        .accumulate = args->accumulate_dw,
        .saved = args->saved,
        .grad = &b->grad,
        .dw = args->dw,
        .x = args->x,
        .dy = wgrad_of_dy ? args->dy : NULL,
        .call = args->call,
    };
    b->dgrad = (fp8_dgrad_args){
        .size = sizeof b->dgrad,
        .stale_ok = args->stale_ok,
        .grad = &b->grad,
        .weight = args->weight,
        .dx = args->dx,
        .dy = plan->is_bf16 ? args->dy : NULL,
        .w = args->w,
        .call = args->call,
    };
}

static fp8_status check_backward(const fp8_layer *layer, const fp8_backward_args *args,
                                 struct backward *b)
{
    const char *call = "backward";
    int64_t tokens = 0;
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL, 0));
    FP8_TRY(fp8_check_flag(call, "accumulate_dw", args->accumulate_dw));
    split_backward(layer->plan, args, b);
    FP8_TRY(check_quantize_dy(call, layer, &b->quantize_dy, b->copies, &b->tokens));
    b->grad = filled_grad(layer, &b->quantize_dy, b->tokens, b->copies);
    const struct fp8_check check = { .call = call, .plan = layer->plan, .tokens = b->tokens };
    if (args->dw) {
        /* before the pass takes M from saved or x: here it is dy's */
        FP8_TRY(fp8_check_factor(&check, FP8_ROLE_X, FP8_COPY_TRANSPOSED, "saved", args->saved,
                                 args->x));
        FP8_TRY(check_wgrad(call, layer, &b->wgrad, &tokens));
    }
    return args->dx ? check_dgrad(call, layer, &b->dgrad, &tokens) : FP8_OK;
}

static fp8_status run_backward(const fp8_layer *layer, const fp8_backward_args *args,
                               struct backward *b)
{
    if (b->copies || args->dbias || args->found_inf)
        FP8_TRY(run_quantize_dy(layer, &b->quantize_dy, b->tokens, args->grad ? &b->grad : NULL));
    if (args->dw)
        FP8_TRY(run_wgrad(layer, &b->wgrad, b->tokens));
    return args->dx ? run_dgrad(layer, &b->dgrad, b->tokens) : FP8_OK;
}

fp8_status fp8_layer_backward(const fp8_layer *layer, const fp8_backward_args *args)
{
    struct backward b;
    fp8_status status = check_backward(layer, args, &b);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    if (args->grad)
        fp8_operand_clear(args->grad);
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed); /* once for all three */
    if (status == FP8_OK) {
        status = run_backward(layer, args, &b);
        fp8_context_leave(layer->context, pushed);
    }
    if (status == FP8_OK && args->grad)
        *args->grad = b.grad;
    return fp8_report(layer->context, status);
}
