/*
 * primitives.c - quantize, amax, transpose, dequantize and gemm: the parts of the passes, for
 * callers of their own.
 *
 * They run the same steps of the same plan as the passes: quantize those before the gemm, gemm that
 * one alone, amax the cast of a given amax without a target. transpose and dequantize are no steps;
 * their arguments are made here.
 */
#include "runtime/host.h"
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

/* The source of a role; sets M, in the check too. */
static fp8_status check_source(struct fp8_check *check, fp8_role role, const fp8_tensor *source,
                               int64_t *tokens)
{
    if (!source)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: source is NULL", check->call);
    if (role != FP8_ROLE_W) {
        *tokens = source->rows;
        FP8_TRY(fp8_check_tokens(check, "source->rows", *tokens));
        check->tokens = *tokens;
    }
    return fp8_check_tensor(check, quantizes[role].slot, source);
}

static fp8_pass quantize_pass(const fp8_quantize_args *args)
{
    return args->amax ? fp8_given_pass(args->role) : quantizes[args->role].pass;
}

static fp8_status check_quantize(const fp8_layer *layer, const fp8_quantize_args *args,
                                 uint32_t *copies, int64_t *tokens)
{
    const char *call = "quantize";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(check_role(call, args->role));
    *copies = args->copies;
    FP8_TRY(fp8_check_copies(&check, args->role, copies));
    if (*copies == 0)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "%s: layer '%s' (%s) has no such copy of %s; quantise with another layer",
                        call, layer->plan->name, fp8_plan_recipe_name(layer->plan),
                        fp8_role_names[args->role]);
    FP8_TRY(check_source(&check, args->role, args->source, tokens));
    FP8_TRY(fp8_check_target(&check, "operand", args->role, *copies, args->operand));
    FP8_TRY(fp8_check_word(call, "found_inf", args->found_inf));
    FP8_TRY(fp8_check_amax(&check, args->role, args->amax));
    FP8_TRY(fp8_check_state(&check, quantize_pass(args), &args->call));
    return fp8_check_call(&check, layer, &args->call);
}

fp8_status fp8_quantize(const fp8_layer *layer, const fp8_quantize_args *args)
{
    uint32_t copies = 0;
    int64_t tokens = 0;
    fp8_status status = check_quantize(layer, args, &copies, &tokens);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_pass pass = quantize_pass(args);
    fp8_operand filled = *args->operand;
    fp8_operand_clear(args->operand);
    fp8_operand_fill(&filled, layer->plan, args->role, tokens, copies, 0);
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    fp8_frame_tensor(&frame, quantizes[args->role].slot, args->source);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_address(&frame, FP8_SLOT_AMAX, (void *)args->amax);
    fp8_frame_state(&frame, args->role, &args->call);
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

/* ---- amax ---- */

static fp8_status check_amax(const fp8_layer *layer, const fp8_amax_args *args, int64_t *tokens)
{
    const char *call = "amax";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(check_role(call, args->role));
    if (!args->amax)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: amax is NULL; pass a float of the device", call);
    FP8_TRY(fp8_check_amax(&check, args->role, args->amax));
    FP8_TRY(check_source(&check, args->role, args->source, tokens));
    FP8_TRY(fp8_check_flag(call, "accumulate", args->accumulate));
    FP8_TRY(fp8_check_word(call, "found_inf", args->found_inf));
    return fp8_check_call(&check, layer, &args->call);
}

/* The cast of a given amax, with no copy to write: what remains is the running maximum. Its scale
 * is taken from that same number and goes to scratch. */
static fp8_status run_amax(const struct fp8_frame *frame, const struct fp8_step *cast,
                           const fp8_amax_args *args)
{
    fp8_value values[FP8_OP_MAX_ARGS];
    fp8_frame_evaluate(frame, cast, values);
    values[FP8_CAST_known].p = args->amax;
    values[FP8_CAST_amax].p = args->amax;
    values[FP8_CAST_fresh].p = NULL;
    values[FP8_CAST_row].p = NULL;
    values[FP8_CAST_transposed].p = NULL;
    values[FP8_CAST_dbias_partials].p = NULL;
    if (!args->accumulate)
        FP8_TRY(fp8_fill_words(frame->layer->context, args->amax, 0, 1, frame->stream));
    if (values[FP8_CAST_rows].i == 0 || values[FP8_CAST_cols].i == 0)
        return FP8_OK;
    return fp8_kernel_run(frame->layer->context, cast->kernel, values, frame->stream, frame->sms);
}

fp8_status fp8_amax(const fp8_layer *layer, const fp8_amax_args *args)
{
    int64_t tokens = 0;
    fp8_status status = check_amax(layer, args, &tokens);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_pass pass = fp8_given_pass(args->role);
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    const struct fp8_step *cast = &steps->steps[0];
    if (cast->op != FP8_OP_CAST)
        return fp8_report(layer->context, fp8_fail(FP8_ERR_INTERNAL,
                                                   "amax: the steps for a given amax of layer '%s' "
                                                   "do not begin with a cast",
                                                   layer->plan->name));
    struct fp8_frame frame;
    fp8_frame_init(&frame, layer, &args->call, tokens);
    fp8_frame_tensor(&frame, quantizes[args->role].slot, args->source);
    fp8_frame_address(&frame, FP8_SLOT_FOUND_INF, args->found_inf);
    fp8_frame_workspace(&frame, pass, args->call.workspace, false);
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed);
    if (status == FP8_OK)
        status = run_amax(&frame, cast, args);
    fp8_context_leave(layer->context, pushed);
    return fp8_report(layer->context, status);
}

/* ---- transpose ---- */

/* A filled operand of whichever role, of whose rows M is taken; its copies are for the caller. */
static fp8_status check_any_operand(struct fp8_check *check, const fp8_operand *operand)
{
    FP8_TRY(fp8_check_quantises(check));
    FP8_TRY(fp8_check_operand_struct(check->call, "operand", operand));
    if (operand->role == FP8_ROLE_NONE)
        return fp8_fail(FP8_ERR_OPERAND, "%s: operand is not filled", check->call);
    FP8_TRY(check_role(check->call, operand->role));
    check->tokens = operand->rows;
    return operand->role == FP8_ROLE_W ? FP8_OK
                                       : fp8_check_tokens(check, "operand->rows", operand->rows);
}

static fp8_status check_transpose(const fp8_layer *layer, const fp8_transpose_args *args)
{
    const char *call = "transpose";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(check_any_operand(&check, args->operand));
    if (!layer->plan->transpose || !fp8_plan_transposes(layer->plan, args->operand->role))
        return fp8_fail(
            FP8_ERR_UNSUPPORTED,
            "%s: the copies of %s have scales of their own in layer '%s' (%s); quantise "
            "both from the tensor",
            call, fp8_role_names[args->operand->role], layer->plan->name,
            fp8_recipe_names[layer->plan->recipe.kind]);
    FP8_TRY(fp8_check_filled(&check, "operand", args->operand->role, FP8_COPY_ROW, args->operand));
    FP8_TRY(fp8_check_target(&check, "operand", args->operand->role, FP8_COPY_BOTH, args->operand));
    return fp8_check_stream(call, &args->call);
}

fp8_status fp8_transpose_operand(const fp8_layer *layer, const fp8_operand *operand,
                                 const fp8_call *call)
{
    fp8_operand_view view;
    fp8_operand_layout(operand, &view);
    const fp8_value values[FP8_TRANSPOSE_ARG_COUNT] = {
        [FP8_TRANSPOSE_source].p = view.row,
        [FP8_TRANSPOSE_source_ld].i = view.row_ld,
        [FP8_TRANSPOSE_rows].i = operand->rows,
        [FP8_TRANSPOSE_cols].i = operand->cols,
        [FP8_TRANSPOSE_transposed].p = view.transposed,
        [FP8_TRANSPOSE_transposed_ld].i = view.transposed_ld,
        [FP8_TRANSPOSE_transposed_rows].i = fp8_round_up(operand->cols, FP8_PAD_ROWS),
        [FP8_TRANSPOSE_scales].p = view.row_scales,
        [FP8_TRANSPOSE_scales_ld].i =
            operand->row_scaling == FP8_SCALING_ROW ? 0 : view.row_scales_ld,
        [FP8_TRANSPOSE_transposed_scales].p = view.transposed_scales,
        [FP8_TRANSPOSE_transposed_scales_ld].i = view.transposed_scales_ld,
    };
    if (operand->rows == 0)
        return FP8_OK;
    if (layer->context->is_host)
        return fp8_host_run(layer->context->pool, FP8_OP_TRANSPOSE, NULL, values);
    if (layer->plan->transpose)
        return fp8_kernel_run(layer->context, layer->plan->transpose, values, call->stream,
                              fp8_sms_of_call(layer->context, call->max_sms));
    return fp8_fail(FP8_ERR_UNSUPPORTED,
                    "the bundle has no kernel that transposes the weight of layer '%s'; rebuild it",
                    layer->plan->name);
}

fp8_status fp8_transpose(const fp8_layer *layer, const fp8_transpose_args *args)
{
    fp8_status status = check_transpose(layer, args);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    if (args->operand->copies & FP8_COPY_TRANSPOSED)
        return FP8_OK;
    fp8_operand filled = *args->operand;
    filled.copies = FP8_COPY_BOTH;
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed);
    if (status == FP8_OK)
        status = fp8_transpose_operand(layer, &filled, &args->call);
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
    FP8_TRY(check_any_operand(&check, args->operand));
    FP8_TRY(fp8_check_filled(&check, "operand", args->operand->role, 0, args->operand));
    if (args->operand->copies == 0)
        return fp8_fail(FP8_ERR_OPERAND, "%s: operand has no copy; fill it with one", call);
    FP8_TRY(fp8_check_matrix(&check, "target", args->target, args->operand->rows,
                             args->operand->cols, FP8_DTYPE_FP32));
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
    const struct fp8_kernel *kernel = fp8_dequantize_kernel(
        layer->plan, operand->dtype, view.row ? operand->row_scaling : operand->transposed_scaling);
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
        [FP8_DEQUANTIZE_e5m2].i = kernel->semantics.source_dtype == FP8_DTYPE_E5M2,
    };
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
    if ((fp8_operand_copies(layer->plan, gemms[args->pass].a) & gemms[args->pass].a_copy) == 0)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "gemm: %s of layer '%s' multiplies tensors, not operands; call the pass",
                        fp8_pass_name(args->pass), layer->plan->name);
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
