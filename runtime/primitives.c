/*
 * primitives.c - quantize, dequantize and gemm: the parts of the passes, for callers of their own.
 *
 * They run the same steps of the same plan as the passes: quantize those before the gemm, gemm that
 * one alone. Only dequantize is no step; its arguments are made here.
 */
#include "runtime/internal.h"

static fp8_status check_role(const char *call, fp8_role role)
{
    if (role == FP8_ROLE_X || role == FP8_ROLE_W || role == FP8_ROLE_DY)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT, "%s: role is %d; pass FP8_ROLE_X, FP8_ROLE_W or FP8_ROLE_DY",
                    call, (int)role);
}

/* ---- quantize ---- */

static const struct {
    fp8_pass pass;
    enum fp8_slot slot;
} quantizes[FP8_ROLE_COUNT] = {
    [FP8_ROLE_X] = { FP8_PASS_FPROP, FP8_SLOT_X },
    [FP8_ROLE_W] = { FP8_PASS_WEIGHT, FP8_SLOT_W },
    [FP8_ROLE_DY] = { FP8_PASS_QUANTIZE_DY, FP8_SLOT_DY },
};

static fp8_status check_quantize(const fp8_layer *layer, const fp8_quantize_args *args,
                                 uint32_t *copies, int64_t *tokens)
{
    const char *call = "quantize";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(check_role(call, args->role));
    *copies = args->copies;
    FP8_TRY(fp8_check_copies(call, copies));
    if (!args->source)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: source is NULL", call);
    if (args->role != FP8_ROLE_W) {
        *tokens = args->source->rows;
        FP8_TRY(fp8_check_tokens(&check, "source->rows", *tokens));
        check.tokens = *tokens;
    }
    FP8_TRY(fp8_check_tensor(&check, quantizes[args->role].slot, args->source));
    FP8_TRY(fp8_check_target(&check, "operand", args->role, *copies, args->operand));
    FP8_TRY(fp8_check_found_inf(call, args->found_inf));
    return fp8_check_call(&check, layer, &args->call);
}

fp8_status fp8_quantize(const fp8_layer *layer, const fp8_quantize_args *args)
{
    uint32_t copies = 0;
    int64_t tokens = 0;
    fp8_status status = check_quantize(layer, args, &copies, &tokens);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_pass pass = quantizes[args->role].pass;
    fp8_operand filled = *args->operand;
    fp8_operand_clear(args->operand);
    fp8_operand_fill(&filled, layer->plan, args->role, tokens, copies, 0);
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    fp8_frame_tensor(&frame, quantizes[args->role].slot, args->source);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_operand(&frame, args->role, &filled);
    fp8_frame_workspace(&frame, pass, args->call.workspace, false);
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed);
    if (status == FP8_OK)
        status = fp8_frame_run(&frame, pass, 0, layer->plan->passes[pass].gemm);
    fp8_context_leave(layer->context, pushed);
    if (status == FP8_OK)
        *args->operand = filled;
    return fp8_report(layer->context, status);
}

/* ---- dequantize ---- */

static fp8_status check_dequantize(const fp8_layer *layer, const fp8_dequantize_args *args)
{
    const char *call = "dequantize";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(fp8_check_operand_struct(call, "operand", args->operand));
    if (args->operand->role == FP8_ROLE_NONE)
        return fp8_fail(FP8_ERR_OPERAND, "%s: operand is not filled", call);
    FP8_TRY(check_role(call, args->operand->role));
    const int64_t rows = args->operand->rows;
    if (args->operand->role != FP8_ROLE_W) {
        FP8_TRY(fp8_check_tokens(&check, "operand->rows", rows));
        check.tokens = rows;
    }
    FP8_TRY(fp8_check_filled(&check, "operand", args->operand->role, 0, args->operand));
    if (args->operand->copies == 0)
        return fp8_fail(FP8_ERR_OPERAND, "%s: operand has no copy; fill it with one", call);
    FP8_TRY(fp8_check_matrix(&check, "target", args->target, rows, args->operand->cols,
                             FP8_DTYPE_FP32));
    return fp8_check_stream(call, &args->call);
}

fp8_status fp8_dequantize(const fp8_layer *layer, const fp8_dequantize_args *args)
{
    fp8_status status = check_dequantize(layer, args);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    const fp8_operand *operand = args->operand;
    const fp8_tensor *target = args->target;
    if (target->rows == 0)
        return FP8_OK;
    fp8_operand_view view;
    fp8_operand_layout(operand, &view);
    float *vector = view.row ? view.row_scales : view.transposed_scales;
    const fp8_value values[FP8_DEQUANTIZE_ARG_COUNT] = {
        [FP8_DEQUANTIZE_source].p = view.row ? view.row : view.transposed,
        [FP8_DEQUANTIZE_source_ld].i = view.row ? view.row_ld : view.transposed_ld,
        [FP8_DEQUANTIZE_scales].p = vector ? vector : view.scales,
        [FP8_DEQUANTIZE_scales_ld].i = view.row ? view.row_scales_ld : view.transposed_scales_ld,
        [FP8_DEQUANTIZE_target].p = target->data,
        [FP8_DEQUANTIZE_target_ld].i = target->rows > 1 ? target->ld : target->cols,
        [FP8_DEQUANTIZE_rows].i = target->rows,
        [FP8_DEQUANTIZE_cols].i = target->cols,
        [FP8_DEQUANTIZE_is_transposed].i = view.row == NULL,
    };
    const struct fp8_kernel *kernel = fp8_dequantize_kernel(
        layer->plan, operand->dtype, view.row ? operand->row_scaling : operand->transposed_scaling);
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed);
    if (status == FP8_OK)
        status = fp8_kernel_run(layer->context, kernel, values, args->call.stream,
                                fp8_sms_of_call(layer->context, args->call.max_sms));
    fp8_context_leave(layer->context, pushed);
    return fp8_report(layer->context, status);
}

/* ---- gemm ---- */

static const struct {
    fp8_role a, b;
    uint32_t a_copy, b_copy;
    enum fp8_slot out;
} gemms[FP8_PASS_COUNT] = {
    [FP8_PASS_FPROP] = { FP8_ROLE_X, FP8_ROLE_W, FP8_COPY_ROW, FP8_COPY_ROW, FP8_SLOT_Y },
    [FP8_PASS_WGRAD] = { FP8_ROLE_DY, FP8_ROLE_X, FP8_COPY_TRANSPOSED, FP8_COPY_TRANSPOSED,
                         FP8_SLOT_DW },
    [FP8_PASS_DGRAD] = { FP8_ROLE_DY, FP8_ROLE_W, FP8_COPY_ROW, FP8_COPY_TRANSPOSED, FP8_SLOT_DX },
};

static fp8_status check_gemm_flags(const struct fp8_layer_plan *plan, const fp8_gemm_args *args)
{
    if ((unsigned)args->pass >= FP8_PASS_COUNT || gemms[args->pass].a == FP8_ROLE_NONE)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "gemm: pass is %d; pass FP8_PASS_FPROP, FP8_PASS_WGRAD or FP8_PASS_DGRAD",
                        (int)args->pass);
    FP8_TRY(fp8_check_flag("gemm", "accumulate", args->accumulate));
    if (args->accumulate && args->pass != FP8_PASS_WGRAD)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "gemm: accumulate is 1, but only wgrad accumulates, not %s",
                        fp8_pass_name(args->pass));
    if (!args->bias)
        return FP8_OK;
    if (args->pass != FP8_PASS_FPROP)
        return fp8_fail(FP8_ERR_ARGUMENT, "gemm: bias is given, but only fprop has one, not %s",
                        fp8_pass_name(args->pass));
    if (!plan->has_bias)
        return fp8_fail(FP8_ERR_ARGUMENT, "gemm: bias is given, but layer '%s' has no bias",
                        plan->name);
    return FP8_OK;
}

static fp8_status check_gemm(const fp8_layer *layer, const fp8_gemm_args *args, int64_t *tokens)
{
    const char *call = "gemm";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(check_gemm_flags(layer->plan, args));
    FP8_TRY(fp8_check_rows(call, "a", gemms[args->pass].a, args->a, tokens));
    FP8_TRY(fp8_check_tokens(&check, "a->rows", *tokens));
    check.tokens = *tokens;
    FP8_TRY(fp8_check_filled(&check, "a", gemms[args->pass].a, gemms[args->pass].a_copy, args->a));
    FP8_TRY(fp8_check_filled(&check, "b", gemms[args->pass].b, gemms[args->pass].b_copy, args->b));
    if (args->bias)
        FP8_TRY(fp8_check_tensor(&check, FP8_SLOT_BIAS, args->bias));
    FP8_TRY(fp8_check_tensor(&check, gemms[args->pass].out, args->out));
    return fp8_check_call(&check, layer, &args->call);
}

fp8_status fp8_gemm(const fp8_layer *layer, const fp8_gemm_args *args)
{
    int64_t tokens = 0;
    fp8_status status = check_gemm(layer, args, &tokens);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_pass pass = args->pass;
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    frame.accumulate = args->accumulate;
    fp8_frame_operand(&frame, gemms[pass].a, args->a);
    fp8_frame_operand(&frame, gemms[pass].b, args->b);
    fp8_frame_tensor(&frame, FP8_SLOT_BIAS, args->bias);
    fp8_frame_tensor(&frame, gemms[pass].out, args->out);
    fp8_frame_workspace(&frame, pass, args->call.workspace, false);
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed);
    if (status == FP8_OK)
        status = fp8_frame_run(&frame, pass, steps->gemm, steps->step_count);
    fp8_context_leave(layer->context, pushed);
    return fp8_report(layer->context, status);
}
