/*
 * passes.c - the passes and backward: arguments checked, frame filled, steps run.
 *
 * Each pass has a check, which refuses before anything is enqueued, and a run. backward composes
 * the checks and then the runs of three passes. An operand that a call fills is cleared first and
 * set last, so that after an error its fields never claim more than its bytes hold.
 */
#include "runtime/internal.h"

/* Runs steps with the device current. */
static fp8_status enqueue(const struct fp8_frame *frame, fp8_pass pass, int first)
{
    const struct fp8_layer *layer = frame->layer;
    bool pushed;
    FP8_TRY(fp8_context_enter(layer->context, &pushed));
    fp8_status status = fp8_frame_run(frame, pass, first, layer->plan->passes[pass].step_count);
    fp8_context_leave(layer->context, pushed);
    return status;
}

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

/* ---- weight ---- */

static bool is_current(const fp8_operand *weight, const struct fp8_layer_plan *plan,
                       uint32_t copies, uint64_t version)
{
    return weight->role == FP8_ROLE_W && weight->version == version &&
           (weight->copies & copies) == copies && weight->rows == plan->out_features &&
           weight->cols == plan->in_features && weight->dtype == plan->formats[FP8_ROLE_W];
}

static fp8_status check_refresh(const struct fp8_check *check, const uint32_t *refresh)
{
    if (refresh && check->plan->slots[FP8_SLOT_WHEN] < 0)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "%s: refresh is given, but the weight steps of layer '%s' do not take it; "
                        "rebuild the bundle, or pass NULL",
                        check->call, check->plan->name);
    if ((uintptr_t)refresh % sizeof *refresh)
        return fp8_fail(FP8_ERR_ALIGNMENT, "%s: refresh is %p, which is not a multiple of 4",
                        check->call, (const void *)refresh);
    return FP8_OK;
}

static fp8_status check_weight(const fp8_layer *layer, const fp8_weight_args *args,
                               uint32_t *copies)
{
    const char *call = "weight_update";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL, 0));
    const struct fp8_check check = { .call = call, .plan = layer->plan };
    *copies = args->copies;
    FP8_TRY(fp8_check_copies(call, copies));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_W, args->w));
    FP8_TRY(fp8_check_target(&check, "weight", FP8_ROLE_W, *copies, args->weight));
    if (args->version == 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: version is 0, which means unknown; count from 1, another after each "
                        "optimizer step and for each weight that shares the operand",
                        call);
    FP8_TRY(fp8_check_found_inf(call, args->found_inf));
    FP8_TRY(check_refresh(&check, args->refresh));
    return fp8_check_call(&check, layer, &args->call);
}

fp8_status fp8_weight_update(const fp8_layer *layer, const fp8_weight_args *args)
{
    uint32_t copies;
    fp8_status status = check_weight(layer, args, &copies);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    if (!args->refresh && is_current(args->weight, layer->plan, copies, args->version))
        return FP8_OK;
    fp8_operand filled = *args->weight;
    fp8_operand_clear(args->weight);
    fp8_operand_fill(&filled, layer->plan, FP8_ROLE_W, 0, copies, args->version);
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, 0);
    fp8_frame_tensor(&frame, FP8_SLOT_W, args->w);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_address(&frame, FP8_SLOT_WHEN, (void *)args->refresh);
    fp8_frame_operand(&frame, FP8_ROLE_W, &filled);
    fp8_frame_workspace(&frame, FP8_PASS_WEIGHT, args->call.workspace, false);
    status = enqueue(&frame, FP8_PASS_WEIGHT, 0);
    if (status == FP8_OK)
        *args->weight = filled;
    return fp8_report(layer->context, status);
}

/* ---- fprop ---- */

static fp8_status check_x(const struct fp8_check *check, const fp8_fprop_args *args)
{
    if (args->x) {
        FP8_TRY(fp8_check_tensor(check, FP8_SLOT_X, args->x));
        if (!args->saved)
            return FP8_OK;
        return fp8_check_target(check, "saved", FP8_ROLE_X, FP8_COPY_TRANSPOSED, args->saved);
    }
    uint32_t copies = args->saved ? FP8_COPY_BOTH : FP8_COPY_ROW;
    FP8_TRY(fp8_check_filled(check, "x_quantized", FP8_ROLE_X, copies, args->x_quantized));
    return args->saved ? fp8_check_operand_struct(check->call, "saved", args->saved) : FP8_OK;
}

static fp8_status check_fprop(const fp8_layer *layer, const fp8_fprop_args *args, int64_t *tokens)
{
    const char *call = "fprop";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    if (!args->x == !args->x_quantized)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: give x or x_quantized, %s given", call,
                        args->x ? "not both: both are" : "neither is");
    if (args->x)
        *tokens = args->x->rows;
    else
        FP8_TRY(fp8_check_rows(call, "x_quantized", FP8_ROLE_X, args->x_quantized, tokens));
    FP8_TRY(fp8_check_tokens(&check, args->x ? "x->rows" : "x_quantized->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(check_x(&check, args));
    FP8_TRY(fp8_check_filled(&check, "weight", FP8_ROLE_W, FP8_COPY_ROW, args->weight));
    if (layer->plan->has_bias != (args->bias != NULL))
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: bias is %s, but layer '%s' has %s bias", call,
                        args->bias ? "given" : "NULL", layer->plan->name,
                        layer->plan->has_bias ? "a" : "no");
    if (args->bias)
        FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_BIAS, args->bias));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_Y, args->y));
    FP8_TRY(fp8_check_found_inf(call, args->found_inf));
    return fp8_check_call(&check, layer, &args->call);
}

static fp8_status run_fprop(const fp8_layer *layer, const fp8_fprop_args *args, int64_t tokens,
                            const fp8_operand *x)
{
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    fp8_frame_tensor(&frame, FP8_SLOT_X, args->x);
    fp8_frame_tensor(&frame, FP8_SLOT_BIAS, args->bias);
    fp8_frame_tensor(&frame, FP8_SLOT_Y, args->y);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_operand(&frame, FP8_ROLE_W, args->weight);
    if (x)
        fp8_frame_operand(&frame, FP8_ROLE_X, x);
    fp8_frame_workspace(&frame, FP8_PASS_FPROP, args->call.workspace, true);
    return enqueue(&frame, FP8_PASS_FPROP,
                   args->x_quantized ? layer->plan->passes[FP8_PASS_FPROP].gemm : 0);
}

fp8_status fp8_layer_fprop(const fp8_layer *layer, const fp8_fprop_args *args)
{
    int64_t tokens = 0;
    fp8_status status = check_fprop(layer, args, &tokens);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_operand filled = FP8_OPERAND_INIT;
    const fp8_operand *x = NULL;
    if (args->x_quantized) {
        filled = *args->x_quantized;
        filled.version = args->weight->version;
        x = &filled;
    } else if (args->saved) {
        filled = *args->saved;
        fp8_operand_fill(&filled, layer->plan, FP8_ROLE_X, tokens, FP8_COPY_TRANSPOSED,
                         args->weight->version);
        x = &filled;
    }
    if (args->saved)
        fp8_operand_clear(args->saved);
    status = run_fprop(layer, args, tokens, x);
    if (status == FP8_OK && args->saved)
        *args->saved = filled;
    return fp8_report(layer->context, status);
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

/* copies = 0: only dbias and found_inf are wanted, grad may then be NULL. */
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
    FP8_TRY(fp8_check_found_inf(call, args->found_inf));
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
    if (grad)
        fp8_frame_operand(&frame, FP8_ROLE_DY, grad);
    fp8_frame_workspace(&frame, FP8_PASS_QUANTIZE_DY, args->call.workspace, false);
    return enqueue(&frame, FP8_PASS_QUANTIZE_DY, 0);
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
        copies = args->copies;
        status = fp8_check_copies(call, &copies);
    }
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
    FP8_TRY(fp8_check_rows(call, "saved", FP8_ROLE_X, args->saved, tokens));
    FP8_TRY(fp8_check_tokens(&check, "saved->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(fp8_check_filled(&check, "saved", FP8_ROLE_X, FP8_COPY_TRANSPOSED, args->saved));
    FP8_TRY(fp8_check_filled(&check, "grad", FP8_ROLE_DY, FP8_COPY_TRANSPOSED, args->grad));
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
    fp8_frame_operand(&frame, FP8_ROLE_X, args->saved);
    fp8_frame_operand(&frame, FP8_ROLE_DY, args->grad);
    fp8_frame_workspace(&frame, FP8_PASS_WGRAD, args->call.workspace, false);
    return enqueue(&frame, FP8_PASS_WGRAD, 0);
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
    FP8_TRY(fp8_check_rows(call, "grad", FP8_ROLE_DY, args->grad, tokens));
    FP8_TRY(fp8_check_tokens(&check, "grad->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(fp8_check_filled(&check, "grad", FP8_ROLE_DY, FP8_COPY_ROW, args->grad));
    FP8_TRY(fp8_check_filled(&check, "weight", FP8_ROLE_W, FP8_COPY_TRANSPOSED, args->weight));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_DX, args->dx));
    FP8_TRY(fp8_check_flag(call, "stale_ok", args->stale_ok));
    FP8_TRY(
        check_version(call, "grad", args->grad->version, args->weight->version, args->stale_ok));
    return fp8_check_call(&check, layer, &args->call);
}

static fp8_status run_dgrad(const fp8_layer *layer, const fp8_dgrad_args *args, int64_t tokens)
{
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    fp8_frame_tensor(&frame, FP8_SLOT_DX, args->dx);
    fp8_frame_operand(&frame, FP8_ROLE_DY, args->grad);
    fp8_frame_operand(&frame, FP8_ROLE_W, args->weight);
    fp8_frame_workspace(&frame, FP8_PASS_DGRAD, args->call.workspace, false);
    return enqueue(&frame, FP8_PASS_DGRAD, 0);
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

static void split_backward(const fp8_backward_args *args, struct backward *b)
{
    b->copies = (args->dx ? FP8_COPY_ROW : 0u) | (args->dw ? FP8_COPY_TRANSPOSED : 0u);
    b->quantize_dy = (fp8_quantize_dy_args){
        .size = sizeof b->quantize_dy,
        .dy = args->dy,
        .saved = args->saved,
        .grad = args->grad,
        .dbias = args->dbias,
        .accumulate_dbias = args->accumulate,
        .found_inf = args->found_inf,
        .call = args->call,
    };
    b->wgrad = (fp8_wgrad_args){
        .size = sizeof b->wgrad,
        .accumulate = args->accumulate,
        .saved = args->saved,
        .grad = &b->grad,
        .dw = args->dw,
        .call = args->call,
    };
    b->dgrad = (fp8_dgrad_args){
        .size = sizeof b->dgrad,
        .stale_ok = args->stale_ok,
        .grad = &b->grad,
        .weight = args->weight,
        .dx = args->dx,
        .call = args->call,
    };
}

static fp8_status check_backward(const fp8_layer *layer, const fp8_backward_args *args,
                                 struct backward *b)
{
    const char *call = "backward";
    int64_t tokens;
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    FP8_TRY(fp8_check_flag(call, "accumulate", args->accumulate));
    split_backward(args, b);
    FP8_TRY(check_quantize_dy(call, layer, &b->quantize_dy, b->copies, &b->tokens));
    b->grad = filled_grad(layer, &b->quantize_dy, b->tokens, b->copies);
    const struct fp8_check check = { .call = call, .plan = layer->plan, .tokens = b->tokens };
    if (args->dw) {
        /* before the pass takes M from saved: here it is dy's */
        FP8_TRY(fp8_check_filled(&check, "saved", FP8_ROLE_X, FP8_COPY_TRANSPOSED, args->saved));
        FP8_TRY(check_wgrad(call, layer, &b->wgrad, &tokens));
    }
    return args->dx ? check_dgrad(call, layer, &b->dgrad, &tokens) : FP8_OK;
}

static fp8_status run_backward(const fp8_layer *layer, const fp8_backward_args *args,
                               struct backward *b)
{
    if (b->copies || args->dbias || args->found_inf || args->grad)
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
