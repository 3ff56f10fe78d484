/*
 * tensor.c - argument checks of every call, before anything is enqueued.
 *
 * Each refusal is one sentence that names the call, the argument, its value, the rule and the
 * remedy. The checks are pure arithmetic on the caller's structs: no memory is read through data
 * pointers and the driver is not asked, so a pass of a dozen checks costs well under a microsecond.
 */
#include <stdio.h>

#include "runtime/internal.h"

const char *const fp8_role_names[FP8_ROLE_COUNT] = { "none", "x", "w", "dy" };

static const char *copies_name(uint32_t copies)
{
    static const char *const names[] = { "no", "the row", "the transposed",
                                         "the row and transposed" };
    return names[copies & FP8_COPY_BOTH];
}

fp8_status fp8_check_args(const char *call, const struct fp8_layer *layer, const void *args,
                          size_t size, const uint64_t *reserved, uint32_t reserved0)
{
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: layer is NULL", call);
    if (!args)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: args is NULL", call);
    uint32_t given = *(const uint32_t *)args;
    if (given != size)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: args->size is %u, this library's is %zu; start from the _INIT of the "
                        "same header",
                        call, given, size);
    if (reserved0 || (reserved[0] | reserved[1] | reserved[2] | reserved[3]))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: args->reserved%s is not 0; start from the _INIT of the header", call,
                        reserved0 ? "0" : "");
    return FP8_OK;
}

fp8_status fp8_check_answer(const char *call, const char *name, const void *answer, size_t size)
{
    if (!answer)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL", call, name);
    uint32_t given = *(const uint32_t *)answer;
    if (given != size)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: %s->size is %u, this library's is %zu; set it before the call", call,
                        name, given, size);
    return FP8_OK;
}

fp8_status fp8_check_tokens(const struct fp8_check *check, const char *what, int64_t tokens)
{
    if (tokens < 0)
        return fp8_fail(FP8_ERR_SHAPE, "%s: %s is %lld; rows may not be negative", check->call,
                        what, (long long)tokens);
    if (tokens > check->plan->max_tokens)
        return fp8_fail(FP8_ERR_TOKENS,
                        "%s: %s is %lld tokens, but layer '%s' was built for max_tokens = %lld",
                        check->call, what, (long long)tokens, check->plan->name,
                        (long long)check->plan->max_tokens);
    return FP8_OK;
}

/* The far end of the tensor in bytes must be a number that pointer arithmetic can hold. */
static bool extent_fits(const fp8_tensor *tensor)
{
    int64_t end;
    if (tensor->rows <= 1)
        return true;
    if (__builtin_mul_overflow(tensor->rows, tensor->ld, &end))
        return false;
    return end <= INT64_MAX / 8;
}

fp8_status fp8_check_matrix(const struct fp8_check *check, const char *name,
                            const fp8_tensor *tensor, int64_t rows, int64_t cols, fp8_dtype dtype)
{
    const char *call = check->call;
    if (!tensor)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL; pass a tensor of %lld x %lld %s", call,
                        name, (long long)rows, (long long)cols, fp8_dtype_name(dtype));
    if (tensor->rows != rows || tensor->cols != cols)
        return fp8_fail(FP8_ERR_SHAPE,
                        "%s: %s is %lld x %lld, but layer '%s' takes %lld x %lld here", call, name,
                        (long long)tensor->rows, (long long)tensor->cols, check->plan->name,
                        (long long)rows, (long long)cols);
    if (tensor->dtype != dtype)
        return fp8_fail(FP8_ERR_DTYPE,
                        "%s: %s is %s, but layer '%s' takes %s; pass %s, or change the spec and "
                        "rebuild",
                        call, name, fp8_dtype_name(tensor->dtype), check->plan->name,
                        fp8_dtype_name(dtype), fp8_dtype_name(dtype));
    if (tensor->reserved)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s->reserved is not 0", call, name);
    if (rows == 0 || cols == 0)
        return FP8_OK;
    if (rows > 1 && tensor->ld < cols)
        return fp8_fail(FP8_ERR_SHAPE,
                        "%s: %s has a row stride (ld) of %lld elements, but its rows have %lld; ld "
                        "must be at least cols, so copy an expanded or overlapping tensor first",
                        call, name, (long long)tensor->ld, (long long)cols);
    if (!extent_fits(tensor))
        return fp8_fail(FP8_ERR_SHAPE, "%s: %s with ld %lld goes beyond the address space", call,
                        name, (long long)tensor->ld);
    if (!tensor->data)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s->data is NULL, but it has %lld x %lld elements",
                        call, name, (long long)rows, (long long)cols);
    size_t bytes = fp8_dtype_bytes(dtype);
    if ((uintptr_t)tensor->data % bytes)
        return fp8_fail(FP8_ERR_ALIGNMENT,
                        "%s: %s->data is %p, which is not a multiple of %zu, the size of a %s "
                        "element",
                        call, name, tensor->data, bytes, fp8_dtype_name(dtype));
    return FP8_OK;
}

fp8_status fp8_check_tensor(const struct fp8_check *check, enum fp8_slot slot,
                            const fp8_tensor *tensor)
{
    const struct fp8_buffer *buffer = &check->plan->buffers[check->plan->slots[slot]];
    return fp8_check_matrix(check, buffer->name, tensor, fp8_dim_at(&buffer->rows, check->tokens),
                            fp8_dim_at(&buffer->cols, check->tokens), buffer->dtype);
}

/* ---- operands ---- */

fp8_status fp8_check_operand_struct(const char *call, const char *name, const fp8_operand *operand)
{
    if (!operand)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL", call, name);
    if (operand->size != sizeof *operand)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: %s->size is %u, this library's is %zu; start from FP8_OPERAND_INIT",
                        call, name, operand->size, sizeof *operand);
    if (operand->reserved[0] | operand->reserved[1])
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s->reserved is not 0; start from FP8_OPERAND_INIT",
                        call, name);
    return FP8_OK;
}

static fp8_status check_operand_memory(const char *call, const char *name,
                                       const struct fp8_shape *shape, const fp8_operand *operand)
{
    if (shape->copies == 0) /* it holds what its fields say, and no bytes */
        return FP8_OK;
    int64_t bytes = fp8_operand_bytes(shape);
    if (!operand->data)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: %s->data is NULL; give it %lld bytes (fp8_layer_bytes)", call, name,
                        (long long)bytes);
    if ((uintptr_t)operand->data % FP8_PART_ALIGN)
        return fp8_fail(FP8_ERR_ALIGNMENT, "%s: %s->data is %p, which is not a multiple of %d",
                        call, name, operand->data, FP8_PART_ALIGN);
    if (bytes < 0 || operand->bytes < (uint64_t)bytes)
        return fp8_fail(
            FP8_ERR_OPERAND,
            "%s: %s has %zu bytes, but %lld x %lld with %s cop%s takes %lld; size it with "
            "fp8_layer_bytes",
            call, name, operand->bytes, (long long)shape->rows, (long long)shape->cols,
            copies_name(shape->copies), shape->copies == FP8_COPY_BOTH ? "ies" : "y",
            (long long)bytes);
    return FP8_OK;
}

static const char *scaling_name(fp8_scaling scaling)
{
    return (unsigned)scaling <= FP8_SCALING_NONE ? fp8_scaling_names[scaling] : "(unknown)";
}

static const char *filled_by(fp8_role role)
{
    switch (role) {
    case FP8_ROLE_X:
        return "fprop (saved) or quantize";
    case FP8_ROLE_W:
        return "weight_update or quantize";
    case FP8_ROLE_DY:
        return "quantize_dy or quantize";
    case FP8_ROLE_NONE:
        break;
    }
    return "nothing";
}

fp8_status fp8_check_operand_role(const char *call, const char *name, fp8_role role,
                                  const fp8_operand *operand)
{
    FP8_TRY(fp8_check_operand_struct(call, name, operand));
    if (operand->role == FP8_ROLE_NONE)
        return fp8_fail(FP8_ERR_OPERAND, "%s: %s is not filled; %s fills it", call, name,
                        filled_by(role));
    if (operand->role != role)
        return fp8_fail(FP8_ERR_OPERAND, "%s: %s holds a quantised %s, but %s is wanted here", call,
                        name,
                        (unsigned)operand->role < FP8_ROLE_COUNT ? fp8_role_names[operand->role]
                                                                 : "(unknown role)",
                        fp8_role_names[role]);
    return FP8_OK;
}

fp8_status fp8_check_filled(const struct fp8_check *check, const char *name, fp8_role role,
                            uint32_t copies, const fp8_operand *operand)
{
    const char *call = check->call;
    const struct fp8_layer_plan *plan = check->plan;
    FP8_TRY(fp8_check_operand_role(call, name, role, operand));
    const struct fp8_shape shape = fp8_operand_shape(plan, role, check->tokens, operand->copies);
    if (operand->rows != shape.rows || operand->cols != shape.cols)
        return fp8_fail(FP8_ERR_SHAPE,
                        "%s: %s was filled from %lld x %lld, but layer '%s' takes %lld x %lld here",
                        call, name, (long long)operand->rows, (long long)operand->cols, plan->name,
                        (long long)shape.rows, (long long)shape.cols);
    if (operand->dtype != plan->formats[role])
        return fp8_fail(FP8_ERR_DTYPE, "%s: %s is %s, but layer '%s' takes %s", call, name,
                        fp8_dtype_name(operand->dtype), plan->name,
                        fp8_dtype_name(plan->formats[role]));
    if ((operand->copies & copies) != copies || operand->copies & ~(uint32_t)FP8_COPY_BOTH)
        return fp8_fail(FP8_ERR_OPERAND,
                        "%s: %s has %s copy, but %s copy is needed; fill it with that copy (%s)",
                        call, name, copies_name(operand->copies), copies_name(copies),
                        filled_by(role));
    if (operand->row_scaling != shape.scalings[FP8_ROW_COPY] ||
        operand->transposed_scaling != shape.scalings[FP8_TRANSPOSED_COPY])
        return fp8_fail(
            FP8_ERR_OPERAND,
            "%s: %s is scaled by %s and %s, but layer '%s' (recipe %s) takes %s and %s; "
            "fill it with this layer",
            call, name, scaling_name(operand->row_scaling),
            scaling_name(operand->transposed_scaling), plan->name,
            fp8_recipe_names[plan->recipe.kind], scaling_name(shape.scalings[FP8_ROW_COPY]),
            scaling_name(shape.scalings[FP8_TRANSPOSED_COPY]));
    if (operand->copies != shape.copies)
        return fp8_fail(FP8_ERR_OPERAND,
                        "%s: %s has %s copy, but of these layer '%s' makes %s copy of %s; fill it "
                        "with this layer",
                        call, name, copies_name(operand->copies), plan->name,
                        copies_name(shape.copies), fp8_role_names[role]);
    return check_operand_memory(call, name, &shape, operand);
}

fp8_status fp8_check_target(const struct fp8_check *check, const char *name, fp8_role role,
                            uint32_t copies, const fp8_operand *operand)
{
    const struct fp8_shape shape = fp8_operand_shape(check->plan, role, check->tokens, copies);
    FP8_TRY(fp8_check_operand_struct(check->call, name, operand));
    return check_operand_memory(check->call, name, &shape, operand);
}

fp8_status fp8_check_rows(const char *call, const char *name, fp8_role role,
                          const fp8_operand *operand, int64_t *tokens)
{
    FP8_TRY(fp8_check_operand_role(call, name, role, operand));
    *tokens = operand->rows;
    return FP8_OK;
}

fp8_status fp8_check_copies(const struct fp8_check *check, fp8_role role, uint32_t *copies)
{
    if (*copies & ~(uint32_t)FP8_COPY_BOTH)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: copies is %u; pass FP8_COPY_ROW, FP8_COPY_TRANSPOSED, both, or 0 for both",
            check->call, *copies);
    if (*copies == 0)
        *copies = FP8_COPY_BOTH;
    *copies &= fp8_operand_copies(check->plan, role);
    return FP8_OK;
}

/* ---- factors of products: operands, or the caller's own tensors ---- */

fp8_status fp8_check_quantises(const struct fp8_check *check)
{
    if (!check->plan->is_bf16)
        return FP8_OK;
    return fp8_fail(FP8_ERR_UNSUPPORTED,
                    "%s: layer '%s' computes in bf16 (compute = \"bf16\"): it has no operands of "
                    "FP8; give the passes its tensors",
                    check->call, check->plan->name);
}

fp8_status fp8_check_factor(const struct fp8_check *check, fp8_role role, uint32_t copy,
                            const char *name, const fp8_operand *operand, const fp8_tensor *tensor)
{
    static const enum fp8_slot slots[FP8_ROLE_COUNT] = {
        [FP8_ROLE_X] = FP8_SLOT_X, [FP8_ROLE_W] = FP8_SLOT_W, [FP8_ROLE_DY] = FP8_SLOT_DY
    };
    const struct fp8_layer_plan *plan = check->plan;
    if (fp8_operand_copies(plan, role) & copy) {
        if (tensor)
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "%s: the tensor %s is given, but layer '%s' (%s) multiplies the "
                            "quantised one here; pass NULL",
                            check->call, fp8_role_names[role], plan->name,
                            fp8_plan_recipe_name(plan));
        return fp8_check_filled(check, name, role, copy, operand);
    }
    if (!tensor)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: the tensor %s is NULL, but layer '%s' (%s) multiplies it here; pass it",
            check->call, fp8_role_names[role], plan->name, fp8_plan_recipe_name(plan));
    FP8_TRY(fp8_check_tensor(check, slots[role], tensor));
    return operand ? fp8_check_filled(check, name, role, 0, operand) : FP8_OK;
}

/* ---- the rest of a call ---- */

fp8_status fp8_check_word(const char *call, const char *name, const void *word)
{
    if ((uintptr_t)word % sizeof(uint32_t))
        return fp8_fail(FP8_ERR_ALIGNMENT, "%s: %s is %p, which is not a multiple of 4", call, name,
                        word);
    return FP8_OK;
}

fp8_status fp8_check_found_inf(const struct fp8_check *check, fp8_pass pass,
                               const uint32_t *found_inf)
{
    const struct fp8_pass_plan *steps = &check->plan->passes[pass];
    const int buffer = check->plan->slots[FP8_SLOT_FOUND_INF];
    bool is_written = false;
    if (!found_inf)
        return FP8_OK;
    for (int i = 0; i < steps->buffer_count; i++)
        is_written = is_written || steps->buffers[i] == buffer;
    if (!is_written)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: found_inf is given, but layer '%s' (%s) quantises nothing here, so "
                        "that nothing looks for inf; pass NULL",
                        check->call, check->plan->name, fp8_plan_recipe_name(check->plan));
    return fp8_check_word(check->call, "found_inf", found_inf);
}

fp8_status fp8_check_amax(const struct fp8_check *check, fp8_role role, const float *amax)
{
    if (!amax)
        return FP8_OK;
    if (check->plan->passes[fp8_given_pass(role)].step_count == 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: amax is given, but layer '%s' (%s) has no scale of the whole tensor; "
                        "pass NULL",
                        check->call, check->plan->name, fp8_plan_recipe_name(check->plan));
    return fp8_check_word(check->call, "amax", amax);
}

fp8_status fp8_check_state(const struct fp8_check *check, fp8_pass pass, const fp8_call *call)
{
    if (call->state || !check->plan->passes[pass].uses_state)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT,
                    "%s: call.state is NULL, but layer '%s' takes its scales from one; make it "
                    "with fp8_state_create",
                    check->call, check->plan->name);
}

fp8_status fp8_check_no_state(const char *call_name, const fp8_call *call)
{
    if (!call->state)
        return FP8_OK;
    return fp8_fail(
        FP8_ERR_ARGUMENT,
        "%s: call.state is given, but shards take their scale from the amax of the whole "
        "weight; pass NULL",
        call_name);
}

/* A state that is given is this layer's, whether or not the pass quantises. */
static fp8_status check_given_state(const struct fp8_check *check, const struct fp8_layer *layer,
                                    const fp8_call *call)
{
    const struct fp8_layer_plan *plan = check->plan;
    const struct fp8_state *state = call->state;
    if (plan->places[FP8_PLACE_SCALE] < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: call.state is given, but layer '%s' (%s) keeps none; pass NULL",
                        check->call, plan->name, fp8_plan_recipe_name(plan));
    if (call->state_layer < 0 || call->state_layer >= state->layer_count)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: call.state_layer is %d, but the state was made for %d layers",
                        check->call, call->state_layer, state->layer_count);
    if (state->layers[call->state_layer] != layer)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: call.state_layer is %d, where the state was made for another layer "
                        "than '%s'",
                        check->call, call->state_layer, plan->name);
    return FP8_OK;
}

fp8_status fp8_check_flag(const char *call, const char *name, uint32_t flag)
{
    if (flag > 1)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is %d; pass 0 or 1", call, name, (int32_t)flag);
    return FP8_OK;
}

fp8_status fp8_check_stream(const char *call_name, const fp8_call *call)
{
    if (call->max_sms < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: call.max_sms is %d; pass a bound on the SMs, or 0 for the context's",
                        call_name, call->max_sms);
    if (call->flags & ~(uint32_t)FP8_CALL_EVALUATE)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: call.flags is %u; pass FP8_CALL_EVALUATE or 0",
                        call_name, call->flags);
    if (call->reserved)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: call.reserved is not 0", call_name);
    return FP8_OK;
}

fp8_status fp8_check_call(const struct fp8_check *check, const struct fp8_layer *layer,
                          const fp8_call *call)
{
    FP8_TRY(fp8_check_stream(check->call, call));
    if (call->state)
        FP8_TRY(check_given_state(check, layer, call));
    if (call->workspace && call->workspace_bytes >= layer->workspace_bytes)
        return FP8_OK;
    size_t bytes = fp8_layer_workspace(layer, check->tokens);
    if (!call->workspace || call->workspace_bytes < bytes)
        return fp8_fail(
            FP8_ERR_WORKSPACE,
            "%s: the workspace has %zu bytes at %p, but %lld tokens take %zu; size it with "
            "fp8_layer_bytes(FP8_BYTES_WORKSPACE)",
            check->call, call->workspace_bytes, call->workspace, (long long)check->tokens, bytes);
    return FP8_OK;
}
