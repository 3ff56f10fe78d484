/*
 * model_capture.c - a model's calls as part of a CUDA graph.
 *
 * In: the stream of a call. Out: the model in the same capture as that stream, or in none. A replay
 * sees nothing of the host's books, so a capture begins and ends with empty ones: what was gathered
 * outside counts as not gathered inside, and the reverse, and events of one side are never waited
 * for on the other. The model's own stream enters the capture behind the caller's, and
 * fp8_model_join brings it back. What runs between a graph and calls outside it cannot be seen from
 * here: fp8_model_join orders that, too.
 */
#include "runtime/model.h"

fp8_status fp8_model_check_own(const char *call, const fp8_model *model, uint64_t capture)
{
    uint64_t own;
    FP8_TRY(fp8_capture_of(model->context, call, model->stream, &own));
    if (own == 0 || own == capture)
        return FP8_OK;
    return fp8_fail(FP8_ERR_CAPTURE,
                    "%s: the model is part of the capture of a CUDA graph that goes on, and the "
                    "stream given is not; end that capture first (fp8_model_join, then "
                    "cudaStreamEndCapture), or pass the stream that is captured",
                    call);
}

static fp8_status cross(const char *call, fp8_model *model, uint64_t capture, fp8_stream stream)
{
    FP8_TRY(fp8_model_check_own(call, model, capture));
    for (int i = 0; i < model->group_count; i++) {
        if (model->groups[i].readers > 0)
            return fp8_fail(FP8_ERR_CAPTURE,
                            "%s: the weight of layer '%s' was acquired %s the capture of a CUDA "
                            "graph and is still held; release it where it was acquired",
                            call, model->weights[model->groups[i].first].name,
                            capture ? "before" : "in");
    }
    fp8_model_forget_groups(model);
    model->capture = capture;
    if (stream == model->stream)
        return FP8_OK;
    return fp8_model_order(model, &model->caller, stream, model->stream);
}

fp8_status fp8_model_follow(const char *call, fp8_model *model, fp8_stream stream)
{
    uint64_t capture;
    bool pushed;
    if (model->context->is_host)
        return FP8_OK;
    FP8_TRY(fp8_context_enter(model->context, &pushed));
    fp8_status status = fp8_capture_of(model->context, call, stream, &capture);
    if (status == FP8_OK && capture != model->capture)
        status = cross(call, model, capture, stream);
    fp8_context_leave(model->context, pushed);
    return status;
}

fp8_status fp8_model_join(fp8_model *model, fp8_stream stream)
{
    const char *call = "model_join";
    FP8_TRY(fp8_model_check(call, model, 0));
    bool pushed;
    fp8_status status = fp8_model_follow(call, model, stream);
    if (status == FP8_OK && (status = fp8_context_enter(model->context, &pushed)) == FP8_OK) {
        status = fp8_model_order(model, &model->caller, stream, model->stream);
        for (int i = 0; i < FP8_MODEL_GRADS && status == FP8_OK; i++)
            status = fp8_mark_wait(model, &model->grads[i].summed, model->stream);
        if (status == FP8_OK)
            status = fp8_model_order(model, &model->ours, model->stream, stream);
        fp8_context_leave(model->context, pushed);
    }
    return fp8_report(model->context, status);
}
