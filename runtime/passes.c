/*
 * passes.c - the passes of forward: weight_update and fprop. Those of backward are in backward.c.
 *
 * Each pass has a check, which refuses before anything is enqueued, and a run that fills a frame
 * and runs the steps. An operand that a call fills is cleared first and set last, so that after an
 * error its fields never claim more than its bytes hold.
 */
#include "runtime/internal.h"

/* ---- weight ---- */

static bool is_evaluation(const fp8_weight_args *args)
{
    return args->call.flags & FP8_CALL_EVALUATE;
}

/* What an evaluation left is current for evaluations alone: its amax was not noted. */
static bool is_current(const struct fp8_layer_plan *plan, uint32_t copies,
                       const fp8_weight_args *args)
{
    const fp8_operand *weight = args->weight;
    return weight->role == FP8_ROLE_W && weight->version == args->version &&
           (!weight->evaluated || is_evaluation(args)) && (weight->copies & copies) == copies &&
           weight->rows == plan->out_features && weight->cols == plan->in_features &&
           weight->dtype == plan->formats[FP8_ROLE_W];
}

static fp8_status check_refresh(const struct fp8_check *check, const uint32_t *refresh)
{
    if (refresh && check->plan->slots[FP8_SLOT_WHEN] < 0)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "%s: refresh is given, but the weight steps of layer '%s' do not take it; "
                        "rebuild the bundle, or pass NULL",
                        check->call, check->plan->name);
    return fp8_check_word(check->call, "refresh", refresh);
}

static fp8_pass weight_pass(const fp8_weight_args *args)
{
    return args->amax ? fp8_given_pass(FP8_ROLE_W) : FP8_PASS_WEIGHT;
}

/* found_inf, amax and refresh. */
static fp8_status check_weight_words(const struct fp8_check *check, const fp8_weight_args *args)
{
    FP8_TRY(fp8_check_amax(check, FP8_ROLE_W, args->amax));
    FP8_TRY(fp8_check_found_inf(check, weight_pass(args), args->found_inf));
    return check_refresh(check, args->refresh);
}

static fp8_status check_weight(const fp8_layer *layer, const fp8_weight_args *args,
                               uint32_t *copies)
{
    const char *call = "weight_update";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL, 0));
    const struct fp8_check check = { .call = call, .plan = layer->plan };
    *copies = args->copies;
    FP8_TRY(fp8_check_copies(&check, FP8_ROLE_W, copies));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_W, args->w));
    FP8_TRY(fp8_check_target(&check, "weight", FP8_ROLE_W, *copies, args->weight));
    if (args->version == 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: version is 0, which means unknown; count from 1, another after each "
                        "optimizer step and for each weight that shares the operand",
                        call);
    FP8_TRY(check_weight_words(&check, args));
    FP8_TRY(fp8_check_state(&check, weight_pass(args), &args->call));
    return fp8_check_call(&check, layer, &args->call);
}

fp8_status fp8_weight_update(const fp8_layer *layer, const fp8_weight_args *args)
{
    uint32_t copies;
    fp8_status status = check_weight(layer, args, &copies);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    if (!args->refresh && is_current(layer->plan, copies, args))
        return FP8_OK;
    fp8_operand filled = *args->weight;
    fp8_operand_clear(args->weight);
    fp8_operand_fill(&filled, layer->plan, FP8_ROLE_W, 0, copies, args->version);
    filled.evaluated = is_evaluation(args) && args->call.state;
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, 0);
    fp8_frame_tensor(&frame, FP8_SLOT_W, args->w);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_address(&frame, FP8_SLOT_AMAX, (void *)args->amax);
    fp8_frame_address(&frame, FP8_SLOT_WHEN, (void *)args->refresh);
    fp8_frame_state(&frame, FP8_ROLE_W, &args->call);
    fp8_frame_operand(&frame, FP8_ROLE_W, &filled);
    fp8_frame_workspace(&frame, weight_pass(args), args->call.workspace, false);
    status = fp8_frame_enqueue(&frame, weight_pass(args), 0);
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
    if (check->plan->is_bf16)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: x_quantized is given, but layer '%s' computes in bf16; give x",
                        check->call, check->plan->name);
    uint32_t copies = args->saved ? FP8_COPY_BOTH : FP8_COPY_ROW;
    copies &= fp8_operand_copies(check->plan, FP8_ROLE_X);
    FP8_TRY(fp8_check_filled(check, "x_quantized", FP8_ROLE_X, copies, args->x_quantized));
    if (args->found_inf)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: found_inf is given with x_quantized, but x was looked at when it was "
                        "quantised; give found_inf to fp8_quantize and pass NULL here",
                        check->call);
    return args->saved ? fp8_check_operand_struct(check->call, "saved", args->saved) : FP8_OK;
}

/* Whether the weight's bytes are made in this call. */
static bool makes_weight(const struct fp8_layer_plan *plan, const fp8_fprop_args *args)
{
    return args->w && !plan->is_bf16;
}

static fp8_status check_factor(const struct fp8_check *check, const fp8_fprop_args *args)
{
    if (!makes_weight(check->plan, args))
        return fp8_check_factor(check, FP8_ROLE_W, FP8_COPY_ROW, "weight", args->weight, args->w);
    FP8_TRY(fp8_check_filled(check, "weight", FP8_ROLE_W, FP8_COPY_ROW, args->weight));
    if (args->weight->version || args->weight->scales)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: w is given and weight->version is %llu, weight->scales %p; what the "
                        "bytes are made of here has no version and its scales with it: pass 0 and "
                        "NULL, or use fp8_weight_update and pass no w",
                        check->call, (unsigned long long)args->weight->version,
                        (const void *)args->weight->scales);
    FP8_TRY(fp8_check_tensor(check, FP8_SLOT_W, args->w));
    return fp8_check_state(check, FP8_PASS_WEIGHT, &args->call);
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
    FP8_TRY(check_factor(&check, args));
    if (layer->plan->has_bias != (args->bias != NULL))
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: bias is %s, but layer '%s' has %s bias", call,
                        args->bias ? "given" : "NULL", layer->plan->name,
                        layer->plan->has_bias ? "a" : "no");
    if (args->bias)
        FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_BIAS, args->bias));
    FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_Y, args->y));
    FP8_TRY(fp8_check_found_inf(&check, FP8_PASS_FPROP, args->found_inf));
    if (args->x) /* else nothing is quantised */
        FP8_TRY(fp8_check_state(&check, FP8_PASS_FPROP, &args->call));
    return fp8_check_call(&check, layer, &args->call);
}

static fp8_status make_weight(const fp8_layer *layer, const fp8_fprop_args *args)
{
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, 0);
    fp8_frame_tensor(&frame, FP8_SLOT_W, args->w);
    fp8_frame_state(&frame, FP8_ROLE_W, &args->call);
    fp8_frame_operand(&frame, FP8_ROLE_W, args->weight);
    fp8_frame_workspace(&frame, FP8_PASS_WEIGHT, args->call.workspace, false);
    return fp8_frame_enqueue(&frame, FP8_PASS_WEIGHT, 0);
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
    fp8_frame_tensor(&frame, FP8_SLOT_W, args->w);
    if (args->x)
        fp8_frame_state(&frame, FP8_ROLE_X, &args->call);
    if (args->weight)
        fp8_frame_operand(&frame, FP8_ROLE_W, args->weight);
    if (x)
        fp8_frame_operand(&frame, FP8_ROLE_X, x);
    fp8_frame_workspace(&frame, FP8_PASS_FPROP, args->call.workspace, true);
    return fp8_frame_enqueue(&frame, FP8_PASS_FPROP,
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
    uint64_t version = args->weight ? args->weight->version : 0;
    if (args->x_quantized) {
        filled = *args->x_quantized;
        filled.version = version;
        x = &filled;
    } else if (args->saved) {
        filled = *args->saved;
        fp8_operand_fill(&filled, layer->plan, FP8_ROLE_X, tokens, FP8_COPY_TRANSPOSED, version);
        x = &filled;
    }
    if (args->saved)
        fp8_operand_clear(args->saved);
    if (makes_weight(layer->plan, args))
        status = make_weight(layer, args);
    if (status == FP8_OK)
        status = run_fprop(layer, args, tokens, x);
    if (status == FP8_OK && args->saved)
        *args->saved = filled;
    return fp8_report(layer->context, status);
}
