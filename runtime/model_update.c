/*
 * model_update.c - new values of all weights of a model, after a step of the optimizer.
 *
 * In: every rank's shards in high precision. Out: the same in FP8 in the pool, each behind its
 * scale, and the parts of the biases: amaxes of all shards, one all-reduce for all of them, then
 * the bytes. Nothing counts as gathered afterwards. A version that is there already is not brought
 * again, unless graphs have a say.
 */
#include <stdio.h>

#include "runtime/model.h"

static fp8_sharding sharding_of(const fp8_model *model)
{
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.rank = model->rank;
    sharding.ranks = model->ranks;
    sharding.transposed = model->transposed_shards;
    return sharding;
}

static fp8_shard_args shard_args(const fp8_model *model, const fp8_model_update_args *args, int i,
                                 const fp8_sharding *sharding)
{
    const struct fp8_model_weight *weight = &model->weights[i];
    fp8_shard_args shard = FP8_SHARD_ARGS_INIT;
    shard.count = weight->shard.count;
    shard.sharding = sharding;
    shard.source = &args->w[i];
    shard.amax = weight->amax;
    shard.shard = weight->shard_memory;
    shard.shard_bytes = weight->shard.bytes;
    shard.found_inf = args->found_inf;
    shard.call = args->call;
    return shard;
}

static fp8_status check_bias(const struct fp8_model_weight *weight, const fp8_tensor *bias)
{
    const struct fp8_check check = { .call = "model_update", .plan = weight->plan };
    if (weight->shard.count == 0)
        return FP8_OK;
    return fp8_check_matrix(&check, "bias", bias, 1, weight->shard.count,
                            fp8_slot_dtype(weight->plan, FP8_SLOT_BIAS));
}

static fp8_status check_update(fp8_model *model, const fp8_model_update_args *args)
{
    const char *call = "model_update";
    FP8_TRY(fp8_model_check(call, model, 0));
    if (!args || args->size != sizeof *args || args->reserved0 || args->reserved[0] ||
        args->reserved[1] || args->reserved[2] || args->reserved[3])
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: args is NULL, its size is not this library's %zu, or reserved words are "
            "not 0; start from FP8_MODEL_UPDATE_ARGS_INIT",
            call, sizeof *args);
    if (args->version == 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: version is 0, which means unknown; count from 1, one more after each "
                        "optimizer step",
                        call);
    FP8_TRY(fp8_check_no_state(call, &args->call));
    if (!args->w && model->comm)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: w is NULL", call);
    for (int i = 0; i < model->weight_count && args->bias; i++) {
        if (model->weights[i].bias_bytes)
            FP8_TRY(check_bias(&model->weights[i], &args->bias[i]));
    }
    return fp8_model_follow(call, model, args->call.stream);
}

/* Whether the shards hold this version. In a capture nothing is there that its replays will not
 * bring, and from the first update in one on nobody here knows whether a graph was launched, and
 * with what values. */
static bool is_current(const fp8_model *model, uint64_t version)
{
    return version == model->version && !model->capture && !model->updates_captured;
}

static fp8_status check_released(const fp8_model *model)
{
    for (int i = 0; i < model->group_count; i++) {
        if (model->groups[i].readers)
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "model_update: the weight of layer '%s' is acquired; release it first",
                            model->weights[model->groups[i].first].name);
    }
    return FP8_OK;
}

static fp8_status find_amaxes(fp8_model *model, const fp8_model_update_args *args,
                              const fp8_sharding *sharding)
{
    for (int i = 0; i < model->weight_count; i++) {
        fp8_shard_args shard = shard_args(model, args, i, sharding);
        if (model->weights[i].is_hooked)
            FP8_TRY(
                fp8_fill_words(model->context, model->weights[i].amax, 0, 1, args->call.stream));
        else
            FP8_TRY(fp8_shard_amax(model->weights[i].layer, &shard));
    }
    return FP8_OK;
}

/* On our stream, between the caller's work before and after: behind every gather that still reads
 * the shards. Where every shard has a scale of its own there is nothing to agree on. */
static fp8_status reduce_amaxes(fp8_model *model, fp8_stream stream)
{
    char label[FP8_COMM_LABEL];
    FP8_TRY(fp8_model_order(model, &model->caller, stream, model->stream));
    snprintf(label, sizeof label, "amax of w of all %d layers", model->weight_count);
    if (model->amax_count > 0)
        FP8_TRY(fp8_comm_all_reduce_max(model->comm, model->amaxes, model->amax_count, label,
                                        model->stream));
    return fp8_model_order(model, &model->ours, model->stream, stream);
}

static fp8_status put_bias(fp8_model *model, struct fp8_model_weight *weight,
                           const fp8_tensor *bias, fp8_stream stream)
{
    size_t bytes = (size_t)weight->shard.count *
                   (weight->bias_bytes / (size_t)fp8_max_i64(1, weight->shard.chunk));
    const int64_t rest = (int64_t)(weight->bias_bytes - bytes);
    FP8_TRY(fp8_zero_2d(model->context, weight->bias_memory + bytes, rest, rest, 1, stream));
    return bytes ? fp8_copy_bytes(model->context, weight->bias_memory, bias->data, bytes, stream)
                 : FP8_OK;
}

static fp8_status quantize_shards(fp8_model *model, const fp8_model_update_args *args,
                                  const fp8_sharding *sharding)
{
    for (int i = 0; i < model->weight_count; i++) {
        struct fp8_model_weight *weight = &model->weights[i];
        if (weight->is_hooked)
            continue;
        fp8_shard_args shard = shard_args(model, args, i, sharding);
        FP8_TRY(fp8_shard_quantize(weight->layer, &shard));
        weight->has_bias = args->bias && weight->bias_bytes;
        if (weight->has_bias)
            FP8_TRY(put_bias(model, weight, &args->bias[i], args->call.stream));
    }
    return FP8_OK;
}

static fp8_status run_update(fp8_model *model, const fp8_model_update_args *args)
{
    const fp8_sharding sharding = sharding_of(model);
    FP8_TRY(find_amaxes(model, args, &sharding));
    if (model->comm)
        FP8_TRY(reduce_amaxes(model, args->call.stream));
    FP8_TRY(quantize_shards(model, args, &sharding));
    return fp8_mark_record(model, &model->updated, args->call.stream);
}

fp8_status fp8_model_update(fp8_model *model, const fp8_model_update_args *args)
{
    fp8_status status = check_update(model, args);
    if (status == FP8_OK && is_current(model, args->version))
        return FP8_OK;
    if (status == FP8_OK)
        status = check_released(model);
    bool pushed = false;
    if (status == FP8_OK)
        status = fp8_context_enter(model->context, &pushed);
    if (status == FP8_OK) {
        model->version = 0; /* a failure leaves no weights */
        model->updates_captured |= model->capture != 0;
        fp8_model_forget_groups(model);
        status = run_update(model, args);
        fp8_context_leave(model->context, pushed);
    }
    if (status == FP8_OK)
        model->version = args->version;
    return model ? fp8_report(model->context, status) : status;
}
