/*
 * model_gather.c - the weights of a model: quantised after a step, gathered into slots, handed to passes.
 *
 * In: shards in high precision; passes that want weights. Out: operands in slots. Every decision here
 * (which slot, whether to gather) depends only on the calls that were made, never on time, so that all
 * ranks, which make the same calls, issue the same collectives. A slot is written again only behind the event
 * of its last reader; a group that was gathered ahead and not read yet gives way only to one that is needed
 * now. A weight of a hook needs a slot only if the hook gives it in high precision.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/model.h"

enum { PARTS = 256, PARTS_OF_WEIGHT = 3 };

/* ---- update ---- */

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
    const int slot = weight->plan->slots[FP8_SLOT_BIAS];
    if (weight->shard.count == 0)
        return FP8_OK;
    return fp8_check_matrix(&check, "bias", bias, 1, weight->shard.count,
                            weight->plan->buffers[slot].dtype);
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

/* Whether the shards hold this version. In a capture nothing is there that its replays will not bring, and
 * from the first update in one on nobody here knows whether a graph was launched, and with what values. */
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

/* On our stream, between the caller's work before and after: behind every gather that still reads the
 * shards. */
static fp8_status reduce_amaxes(fp8_model *model, fp8_stream stream)
{
    char label[FP8_COMM_LABEL];
    FP8_TRY(fp8_model_order(model, &model->caller, stream, model->stream));
    snprintf(label, sizeof label, "amax of w of all %d layers", model->weight_count);
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

void fp8_model_forget_groups(fp8_model *model)
{
    for (int i = 0; i < model->group_count; i++) {
        struct fp8_model_group *group = &model->groups[i];
        if (group->slot >= 0)
            model->slots[group->slot].group = -1;
        group->slot = -1;
        group->state = FP8_GROUP_AWAY;
    }
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

/* ---- slots ---- */

/* A slot that may be taken: an empty one, else that of the group that was used longest ago; only if it is
 * needed now, one that was gathered and not used yet. -1: all are held. */
static int find_slot(const fp8_model *model, int group, bool needed)
{
    if (model->keep)
        return group;
    int best = -1, best_rank = -1;
    for (int i = 0; i < model->slot_count; i++) {
        const struct fp8_model_slot *slot = &model->slots[i];
        int rank = 2;
        if (slot->group >= 0 && model->groups[slot->group].readers > 0)
            continue;
        if (slot->group >= 0)
            rank = model->groups[slot->group].state == FP8_GROUP_USED;
        if (rank == 0 && !needed)
            continue;
        if (rank > best_rank ||
            (rank == best_rank && slot->last_use < model->slots[best].last_use)) {
            best = i;
            best_rank = rank;
        }
    }
    return best;
}

/* The group gets a slot of its own; all are held: FP8_OK and slot -1 if it is not needed now. */
static fp8_status take_slot(fp8_model *model, int index, bool needed)
{
    struct fp8_model_group *group = &model->groups[index];
    if (group->slot >= 0)
        return FP8_OK;
    int at = find_slot(model, index, needed);
    if (at < 0 && !needed)
        return FP8_OK;
    if (at < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model: all %d slots are held while layer '%s' needs one; release a weight "
                        "first, or raise slots",
                        model->slot_count, model->weights[group->first].name);
    struct fp8_model_slot *slot = &model->slots[at];
    if (slot->group >= 0) {
        model->groups[slot->group].slot = -1;
        model->groups[slot->group].state = FP8_GROUP_AWAY;
    }
    slot->group = index;
    slot->last_use = ++model->clock;
    group->slot = at;
    group->state = FP8_GROUP_AWAY;
    group->gathered = 0;
    for (int i = group->first; i < group->first + group->count; i++) {
        struct fp8_model_weight *weight = &model->weights[i];
        weight->operand = (fp8_operand)FP8_OPERAND_INIT;
        weight->operand.data = slot->memory + weight->operand_offset;
        weight->operand.bytes = weight->operand_bytes;
        weight->turned = (fp8_operand)FP8_OPERAND_INIT;
        weight->turned.data = slot->memory + weight->turned_offset;
        weight->turned.bytes = weight->turned_bytes;
    }
    return FP8_OK;
}

/* ---- gathering ---- */

/* The pad rows that no rank brings, then the parts of the gather. The scale of a tensor is the same in all
 * shards and is read in ours: a copy of it would be a kernel that waits for SMs behind a product. */
static fp8_status prepare_rows(fp8_model *model, struct fp8_model_weight *weight, uint8_t *slot,
                               fp8_gather_part *parts, size_t *count)
{
    const struct fp8_shard_shape *shard = &weight->shard;
    fp8_operand_fill(&weight->operand, weight->plan, FP8_ROLE_W, 0, FP8_COPY_ROW, model->version);
    fp8_operand_view view;
    FP8_TRY(fp8_operand_parts(&weight->operand, &view));
    weight->operand.scales = (const float *)(const void *)weight->shard_memory;
    const int64_t brought = model->ranks * shard->chunk;
    const int64_t padded = fp8_round_up(weight->plan->out_features, FP8_PAD_ROWS);
    FP8_TRY(fp8_zero_2d(model->context, view.row + brought * view.row_ld, view.row_ld, view.row_ld,
                        padded - brought, model->stream));
    parts[(*count)++] = (fp8_gather_part){ weight->shard_memory + shard->data_offset, view.row,
                                           (size_t)(shard->chunk * shard->row_ld) };
    if (shard->scale_bytes)
        parts[(*count)++] = (fp8_gather_part){ weight->shard_memory + FP8_PART_ALIGN,
                                               slot + weight->scales_offset, shard->scale_bytes };
    if (weight->has_bias)
        parts[(*count)++] = (fp8_gather_part){ weight->bias_memory, slot + weight->bias_offset,
                                               weight->bias_bytes };
    return FP8_OK;
}

/* What of a weight is wanted now: rows, unless they are there; of a weight with scales by row the copy of
 * this pass. */
static fp8_status prepare_weight(fp8_model *model, int index, uint32_t wanted,
                                 fp8_gather_part *parts, size_t *count)
{
    struct fp8_model_weight *weight = &model->weights[index];
    const struct fp8_model_group *group = &model->groups[weight->group];
    uint8_t *slot = model->slots[group->slot].memory;
    if (weight->shard.is_turned && wanted == FP8_COPY_TRANSPOSED) {
        fp8_operand_fill(&weight->turned, weight->plan, FP8_ROLE_W, 0, wanted, model->version);
        parts[(*count)++] =
            (fp8_gather_part){ weight->shard_memory + weight->shard.turned_offset,
                               slot + weight->pieces_offset, weight->shard.turned_bytes };
        return FP8_OK;
    }
    if (group->gathered && !weight->shard.is_turned)
        return FP8_OK;
    return prepare_rows(model, weight, slot, parts, count);
}

/* Scales of tiles and rows arrive beside the operand: padded for all ranks they can be more than it holds. */
static fp8_status finish_rows(fp8_model *model, const struct fp8_model_weight *weight,
                              const uint8_t *slot)
{
    const int64_t n = weight->plan->out_features;
    fp8_operand_view view;
    if (!weight->shard.scale_bytes)
        return FP8_OK;
    FP8_TRY(fp8_operand_parts(&weight->operand, &view));
    int64_t count = n, pad = fp8_round_up(n, FP8_PAD_ROW_SCALES) - n;
    if (weight->shard.is_tile) {
        count = fp8_ceil_div(n, FP8_BLOCK) * view.row_scales_ld;
        pad = 0;
    }
    FP8_TRY(fp8_copy_bytes(model->context, view.row_scales, slot + weight->scales_offset,
                           (size_t)count * sizeof(float), model->stream));
    return fp8_fill_words(model->context, view.row_scales + count, 0, pad, model->stream);
}

/* The parts of all ranks, [K][rows] each, side by side. */
static fp8_status finish_turned(fp8_model *model, const struct fp8_model_weight *weight,
                                const uint8_t *slot)
{
    const struct fp8_shard_shape *shard = &weight->shard;
    const int64_t n = weight->plan->out_features, k = weight->plan->in_features;
    fp8_operand_view view;
    FP8_TRY(fp8_operand_parts(&weight->turned, &view));
    for (int32_t rank = 0; rank < model->ranks; rank++) {
        const int64_t first = fp8_min_i64(rank * shard->chunk, n);
        const struct fp8_turned_piece piece = { slot + weight->pieces_offset +
                                                    (size_t)rank * shard->turned_bytes,
                                                first, fp8_min_i64(shard->chunk, n - first) };
        FP8_TRY(fp8_shard_put_turned(model->context, shard, &piece, &view, k, model->stream));
    }
    return fp8_shard_pad_turned(model->context, &view, n, k, model->stream);
}

static fp8_status finish_weight(fp8_model *model, int index, uint32_t wanted)
{
    const struct fp8_model_weight *weight = &model->weights[index];
    const struct fp8_model_group *group = &model->groups[weight->group];
    const uint8_t *slot = model->slots[group->slot].memory;
    if (weight->shard.is_turned && wanted == FP8_COPY_TRANSPOSED)
        return finish_turned(model, weight, slot);
    return group->gathered && !weight->shard.is_turned ? FP8_OK : finish_rows(model, weight, slot);
}

/* Whether a weight of the group has copies that are not made from each other. */
static bool is_turned(const fp8_model *model, const struct fp8_model_group *group)
{
    for (int i = group->first; i < group->first + group->count; i++) {
        if (model->weights[i].shard.is_turned)
            return true;
    }
    return false;
}

static void make_label(const fp8_model *model, const struct fp8_model_group *group, fp8_pass pass,
                       char *label, size_t size)
{
    const char *first = model->weights[group->first].name;
    const char *last = model->weights[group->first + group->count - 1].name;
    if (group->count == 1)
        snprintf(label, size, "w of layer '%s' (%s)", first, fp8_pass_name(pass));
    else
        snprintf(label, size, "w of layers '%s' to '%s' (%s)", first, last, fp8_pass_name(pass));
}

static fp8_status gather(fp8_model *model, int index, fp8_pass pass)
{
    struct fp8_model_group *group = &model->groups[index];
    struct fp8_model_slot *slot = &model->slots[group->slot];
    uint32_t wanted = pass == FP8_PASS_FPROP ? FP8_COPY_ROW : FP8_COPY_TRANSPOSED;
    fp8_gather_part parts[PARTS];
    size_t count = 0;
    char label[FP8_COMM_LABEL];
    FP8_TRY(fp8_mark_wait(model, &model->updated, model->stream));
    FP8_TRY(fp8_mark_wait(model, &slot->read, model->stream));
    int span = fp8_model_begin(model, "all_gather", group->first, true, model->stream);
    for (int i = group->first; i < group->first + group->count; i++) {
        if (count > PARTS - PARTS_OF_WEIGHT) { /* a group without end: in pieces */
            FP8_TRY(fp8_comm_all_gather(model->comm, parts, count, "w of a large group",
                                        model->stream));
            count = 0;
        }
        FP8_TRY(prepare_weight(model, i, wanted, parts, &count));
    }
    make_label(model, group, pass, label, sizeof label);
    FP8_TRY(fp8_comm_all_gather(model->comm, parts, count, label, model->stream));
    for (int i = group->first; i < group->first + group->count; i++)
        FP8_TRY(finish_weight(model, i, wanted));
    fp8_model_end(model, span, model->stream);
    FP8_TRY(fp8_mark_record(model, &group->arrived, model->stream));
    group->state = FP8_GROUP_GATHERED;
    if (!is_turned(model, group))
        wanted = FP8_COPY_BOTH;
    group->gathered = model->keep ? group->gathered | wanted : wanted;
    return FP8_OK;
}

/* Brings a group whose weights are not there; `needed` as in take_slot. */
static fp8_status bring(fp8_model *model, int index, fp8_pass pass, bool needed)
{
    struct fp8_model_group *group = &model->groups[index];
    if (model->weights[group->first].is_hooked)
        return FP8_OK;
    if (model->version == 0)
        return fp8_fail(FP8_ERR_VERSION,
                        "model: the weight of layer '%s' has no values yet; call fp8_model_update",
                        model->weights[group->first].name);
    const uint32_t wanted = pass == FP8_PASS_FPROP ? FP8_COPY_ROW : FP8_COPY_TRANSPOSED;
    if (group->slot >= 0 && group->state != FP8_GROUP_AWAY && group->gathered & wanted) {
        group->state = FP8_GROUP_GATHERED; /* wanted again: no gather ahead takes its slot */
        return FP8_OK;
    }
    if (group->slot >= 0 && group->readers > 0 && !model->keep) { /* its other copy gives way */
        if (!needed)
            return FP8_OK;
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model: the weight of layer '%s' is held for another pass, and its two "
                        "copies share a slot; release it first, or set keep",
                        model->weights[group->first].name);
    }
    FP8_TRY(take_slot(model, index, needed));
    return group->slot >= 0 ? gather(model, index, pass) : FP8_OK;
}

static fp8_status check_pass(const char *call, fp8_pass pass)
{
    if (pass == FP8_PASS_FPROP || pass == FP8_PASS_DGRAD)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT,
                    "%s: pass is %d; FP8_PASS_FPROP and FP8_PASS_DGRAD read weights", call,
                    (int)pass);
}

fp8_status fp8_model_gather(fp8_model *model, int32_t layer, fp8_pass pass)
{
    fp8_status status = fp8_model_check("model_gather", model, layer);
    if (status == FP8_OK)
        status = check_pass("model_gather", pass);
    if (status == FP8_OK)
        status = fp8_model_follow("model_gather", model, model->stream);
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(model->context, &pushed)) == FP8_OK) {
        status = bring(model, model->weights[layer].group, pass, false);
        fp8_context_leave(model->context, pushed);
    }
    return model ? fp8_report(model->context, status) : status;
}

fp8_status fp8_model_prefetch(fp8_model *model, int32_t layer, fp8_pass pass)
{
    const int step = pass == FP8_PASS_FPROP ? 1 : -1;
    int next = model->weights[layer].group + step;
    for (int i = 0; i < model->ahead && model->prefetch; i++, next += step) {
        if (next >= 0 && next < model->group_count)
            FP8_TRY(bring(model, next, pass, false));
    }
    return FP8_OK;
}

/* ---- hooks ---- */

static fp8_hook_request request_of(const fp8_model *model, int32_t layer, fp8_pass pass,
                                   fp8_stream stream)
{
    fp8_hook_request request = { .size = sizeof request,
                                 .layer = layer,
                                 .name = model->weights[layer].name,
                                 .pass = pass,
                                 .stream = stream };
    return request;
}

/* A weight in high precision is quantised into the slot, with its own version. */
static fp8_status quantize_view(fp8_model *model, int32_t layer, uint32_t copies,
                                const fp8_weight_view *view, const fp8_call *call)
{
    struct fp8_model_weight *weight = &model->weights[layer];
    struct fp8_model_group *group = &model->groups[weight->group];
    FP8_TRY(take_slot(model, weight->group, true));
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
    fp8_hook_request request = request_of(model, layer, pass, call->stream);
    request.dtype = weight->plan->buffers[weight->plan->slots[FP8_SLOT_W]].dtype;
    if (!weight->plan->is_bf16)
        request.copies = pass == FP8_PASS_FPROP ? FP8_COPY_ROW : FP8_COPY_TRANSPOSED;
    fp8_status status = weight->hooks.weight(weight->hooks.user, &request, &view);
    if (status != FP8_OK)
        return fp8_fail(status, "%s of layer '%s': its weight hook returned %d (%s)",
                        fp8_pass_name(pass), weight->name, (int)status, fp8_status_name(status));
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
    const fp8_dtype dtype = weight->plan->buffers[weight->plan->slots[FP8_SLOT_BIAS]].dtype;
    if (weight->is_hooked) {
        fp8_weight_view view = { .size = sizeof view };
        fp8_hook_request request = request_of(model, layer, FP8_PASS_FPROP, call->stream);
        request.is_bias = 1;
        request.dtype = dtype;
        fp8_status status = weight->hooks.weight(weight->hooks.user, &request, &view);
        if (status != FP8_OK)
            return fp8_fail(status, "fprop of layer '%s': its weight hook returned %d for the bias",
                            weight->name, (int)status);
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
    FP8_TRY(fp8_shard_transpose(weight->layer, &both, call));
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
    FP8_TRY(bring(model, weight->group, pass, true));
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
        status = check_pass(name, pass);
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

/* What was acquired in a capture that has ended has no readers outside it; what was acquired outside is not
 * released by work of a capture. */
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
