/*
 * model_hold.c - a weight for a pass: from its slot or from a hook, held until it was read.
 *
 * In: a layer and a pass. Out: the operand with the copy that the pass reads (or w itself, with
 * compute bf16), its slot held until release, and the bias for fprop. A transposed copy is made
 * behind the rows that have arrived, once a gather. A weight of a hook needs a slot only if the
 * hook gives it in high precision.
 */
#include "runtime/model.h"

/* ---- hooks ---- */

fp8_hook_request fp8_model_request(const fp8_model *model, int32_t layer, fp8_pass pass,
                                   fp8_dtype dtype, fp8_stream stream)
{
    fp8_hook_request request = { .size = sizeof request,
                                 .layer = layer,
                                 .name = model->weights[layer].name,
                                 .pass = pass,
                                 .dtype = dtype,
                                 .stream = stream };
    return request;
}

fp8_status fp8_model_hooked(const fp8_hook_request *request, const char *hook, fp8_status status)
{
    if (status == FP8_OK)
        return FP8_OK;
    return fp8_fail(status, "%s of layer '%s': its %s hook returned %d (%s)%s",
                    fp8_pass_name(request->pass), request->name, hook, (int)status,
                    fp8_status_name(status), request->is_bias ? " for the bias" : "");
}

/* A weight in high precision is quantised into the slot, with its own version. */
static fp8_status quantize_view(fp8_model *model, int32_t layer, uint32_t copies,
                                const fp8_weight_view *view, const fp8_call *call)
{
    struct fp8_model_weight *weight = &model->weights[layer];
    struct fp8_model_group *group = &model->groups[weight->group];
    FP8_TRY(fp8_model_take_slot(model, weight->group, true));
    FP8_TRY(fp8_mark_wait(model, &model->slots[group->slot].read, call->stream));
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.copies = copies;
    args.w = &view->tensor;
    args.version = view->version;
    args.weight = &weight->operand;
    args.call = *call;
    FP8_TRY(fp8_weight_update(weight->layer, &args));
    group->state = FP8_GROUP_GATHERED;
    return FP8_OK;
}

static fp8_status hold_hooked(fp8_model *model, int32_t layer, fp8_pass pass, const fp8_call *call,
                              const fp8_operand **operand, const fp8_tensor **w)
{
    struct fp8_model_weight *weight = &model->weights[layer];
    fp8_weight_view view = { .size = sizeof view };
    fp8_hook_request request = fp8_model_request(
        model, layer, pass, fp8_slot_dtype(weight->plan, FP8_SLOT_W), call->stream);
    if (!weight->plan->is_bf16)
        request.copies = pass == FP8_PASS_FPROP ? FP8_COPY_ROW : FP8_COPY_TRANSPOSED;
    FP8_TRY(fp8_model_hooked(&request, "weight",
                             weight->hooks.weight(weight->hooks.user, &request, &view)));
    *operand = view.operand;
    if (weight->plan->is_bf16) {
        weight->tensor = view.tensor;
        *operand = NULL;
        *w = &weight->tensor;
    } else if (!view.operand) {
        FP8_TRY(quantize_view(model, layer, request.copies, &view, call));
        *operand = &weight->operand;
    }
    model->groups[weight->group].readers++;
    return FP8_OK;
}

fp8_status fp8_model_bias(fp8_model *model, int32_t layer, const fp8_call *call, fp8_tensor *memory,
                          const fp8_tensor **bias)
{
    struct fp8_model_weight *weight = &model->weights[layer];
    if (!weight->plan->has_bias || *bias)
        return FP8_OK;
    const fp8_dtype dtype = fp8_slot_dtype(weight->plan, FP8_SLOT_BIAS);
    if (weight->is_hooked) {
        fp8_weight_view view = { .size = sizeof view };
        fp8_hook_request request =
            fp8_model_request(model, layer, FP8_PASS_FPROP, dtype, call->stream);
        request.is_bias = 1;
        FP8_TRY(fp8_model_hooked(&request, "weight",
                                 weight->hooks.weight(weight->hooks.user, &request, &view)));
        *memory = view.tensor;
        *bias = memory;
        return FP8_OK;
    }
    if (!weight->has_bias)
        return FP8_OK;
    const int slot = model->groups[weight->group].slot;
    *memory = (fp8_tensor){ .data = model->slots[slot].memory + weight->bias_offset,
                            .rows = 1,
                            .cols = weight->plan->out_features,
                            .ld = weight->plan->out_features,
                            .dtype = dtype };
    *bias = memory;
    return FP8_OK;
}

/* ---- holding ---- */

/* The transposed copy behind the rows that have arrived, once a gather. */
static fp8_status transpose(fp8_model *model, int32_t layer, const fp8_call *call)
{
    struct fp8_model_weight *weight = &model->weights[layer];
    if (weight->shard.is_turned || weight->operand.copies & FP8_COPY_TRANSPOSED)
        return FP8_OK;
    fp8_operand both = weight->operand;
    both.copies = FP8_COPY_BOTH;
    int span = fp8_model_begin(model, "transpose", layer, false, call->stream);
    FP8_TRY(fp8_transpose_operand(weight->layer, &both, call));
    fp8_model_end(model, span, call->stream);
    weight->operand = both;
    return FP8_OK;
}

fp8_status fp8_model_hold(fp8_model *model, int32_t layer, fp8_pass pass, const fp8_call *call,
                          const fp8_operand **operand, const fp8_tensor **w)
{
    struct fp8_model_weight *weight = &model->weights[layer];
    struct fp8_model_group *group = &model->groups[weight->group];
    *operand = NULL;
    *w = NULL;
    if (weight->is_hooked)
        return hold_hooked(model, layer, pass, call, operand, w);
    FP8_TRY(fp8_model_bring(model, weight->group, pass, true));
    FP8_TRY(fp8_mark_wait(model, &group->arrived, call->stream));
    if (pass == FP8_PASS_DGRAD)
        FP8_TRY(transpose(model, layer, call));
    group->readers++;
    model->slots[group->slot].last_use = ++model->clock;
    const bool turned = weight->shard.is_turned && pass == FP8_PASS_DGRAD;
    *operand = turned ? &weight->turned : &weight->operand;
    return FP8_OK;
}

void fp8_model_let_go(fp8_model *model, int32_t layer, fp8_stream stream)
{
    struct fp8_model_group *group = &model->groups[model->weights[layer].group];
    if (group->readers > 0)
        group->readers--;
    if (group->slot < 0)
        return;
    if (group->state == FP8_GROUP_GATHERED)
        group->state = FP8_GROUP_USED;
    (void)fp8_mark_record(model, &model->slots[group->slot].read, stream);
}

fp8_status fp8_model_acquire(fp8_model *model, int32_t layer, fp8_pass pass, const fp8_call *call,
                             const fp8_operand **weight)
{
    const char *name = "model_acquire";
    if (!weight)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: weight is NULL", name);
    *weight = NULL;
    fp8_status status = fp8_model_check(name, model, layer);
    if (status == FP8_OK)
        status = fp8_model_check_pass(name, pass);
    if (status == FP8_OK && !call)
        status = fp8_fail(FP8_ERR_ARGUMENT, "%s: call is NULL", name);
    if (status == FP8_OK)
        status = fp8_model_follow(name, model, call->stream);
    if (status == FP8_OK && model->weights[layer].plan->is_bf16)
        status = fp8_fail(FP8_ERR_UNSUPPORTED,
                          "%s: layer '%s' has compute bf16: its passes read w itself, there is no "
                          "operand",
                          name, model->weights[layer].name);
    const fp8_tensor *w;
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(model->context, &pushed)) == FP8_OK) {
        status = fp8_model_hold(model, layer, pass, call, weight, &w);
        fp8_context_leave(model->context, pushed);
    }
    return model ? fp8_report(model->context, status) : status;
}

/* What was acquired in a capture that has ended has no readers outside it; what was acquired
 * outside is not released by work of a capture. */
static fp8_status let_go_captured(fp8_model *model, struct fp8_model_group *group,
                                  fp8_stream stream, bool *done)
{
    uint64_t capture = 0;
    if (!model->context->is_host)
        FP8_TRY(fp8_capture_of(model->context, "model_release", stream, &capture));
    if (capture == model->capture)
        return FP8_OK;
    if (model->capture == 0)
        return fp8_fail(
            FP8_ERR_CAPTURE,
            "model_release: the weight of layer '%s' was acquired before the capture of "
            "a CUDA graph began; release it on a stream that is not captured",
            model->weights[group->first].name);
    FP8_TRY(fp8_model_check_own("model_release", model, capture));
    group->readers--;
    *done = true;
    return FP8_OK;
}

fp8_status fp8_model_release(fp8_model *model, int32_t layer, fp8_stream stream)
{
    const char *call = "model_release";
    bool pushed;
    FP8_TRY(fp8_model_check(call, model, layer));
    struct fp8_model_group *group = &model->groups[model->weights[layer].group];
    if (group->readers == 0)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: the weight of layer '%s' is not acquired", call,
                        model->weights[layer].name);
    FP8_TRY(fp8_context_enter(model->context, &pushed));
    bool done = false;
    fp8_status status = let_go_captured(model, group, stream, &done);
    if (status == FP8_OK && !done)
        fp8_model_let_go(model, layer, stream);
    fp8_context_leave(model->context, pushed);
    return fp8_report(model->context, status);
}
