/*
 * model_advance.c - a step of delayed scaling whose amaxes are those of all ranks.
 *
 * The all-reduce goes to the model's stream, behind its other collectives, between the caller's
 * work before and after; the maximum keeps the -1 of tensors that ran on no rank.
 */
#include <stdio.h>

#include "runtime/fp8_state.h"
#include "runtime/model.h"

static fp8_status reduce(fp8_model *model, const fp8_state *state, fp8_stream stream)
{
    char label[FP8_COMM_LABEL];
    FP8_TRY(fp8_model_follow("model_advance", model, stream));
    FP8_TRY(fp8_model_order(model, &model->caller, stream, model->stream));
    snprintf(label, sizeof label, "amaxes of the histories of %d layers", state->layer_count);
    FP8_TRY(fp8_comm_all_reduce_max(model->comm, state->running, (size_t)state->tensors, label,
                                    model->stream));
    return fp8_model_order(model, &model->ours, model->stream, stream);
}

static fp8_status reduce_entered(fp8_model *model, const fp8_state *state, fp8_stream stream)
{
    bool pushed;
    FP8_TRY(fp8_context_enter(model->context, &pushed));
    fp8_status status = reduce(model, state, stream);
    fp8_context_leave(model->context, pushed);
    return status;
}

fp8_status fp8_model_advance(fp8_model *model, fp8_state *state, fp8_stream stream)
{
    if (!model || !state)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_advance: %s is NULL", model ? "state" : "model");
    fp8_status status = FP8_OK;
    if (state->context != model->context)
        status = fp8_fail(FP8_ERR_ARGUMENT, "model_advance: the state is of another context than "
                                            "the model");
    else if (state->shares_amaxes && !model->comm)
        status = fp8_fail(FP8_ERR_ARGUMENT,
                          "model_advance: amax_group is \"fsdp\", but the model has no "
                          "communicator; reduce what fp8_state_running gives, then call "
                          "fp8_state_advance");
    else if (state->shares_amaxes)
        status = reduce_entered(model, state, stream);
    if (status == FP8_OK)
        return fp8_state_advance(state, stream);
    return fp8_report(model->context, status);
}
