/*
 * model_gather.c - the weights of a model: gathered into slots, a group at a time.
 *
 * In: FP8 shards of all ranks, passes that want weights. Out: operands in slots. Every decision
 * here (which slot, whether to gather) depends only on the calls that were made, never on time, so
 * that all ranks, which make the same calls, issue the same collectives. A slot is written again
 * only behind the event of its last reader; a group that was gathered ahead and not read yet gives
 * way only to one that is needed now.
 */
#include <stdio.h>

#include "runtime/model.h"

enum { PARTS = 256, PARTS_OF_WEIGHT = 3 };

/* ---- slots ---- */

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

/* A slot that may be taken: an empty one, else that of the group that was used longest ago; only if
 * it is needed now, one that was gathered and not used yet. -1: all are held. */
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

fp8_status fp8_model_take_slot(fp8_model *model, int index, bool needed)
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

/* The pad rows that no rank brings, then the parts of the gather. The scale of a tensor is the same
 * in all shards and is read in ours: a copy of it would be a kernel that waits for SMs behind a
 * product. */
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

/* What of a weight is wanted now: rows, unless they are there; of a weight with scales by row the
 * copy of this pass. */
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

/* Scales of tiles and rows arrive beside the operand: padded for all ranks they can be more than it
 * holds. */
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

fp8_status fp8_model_bring(fp8_model *model, int index, fp8_pass pass, bool needed)
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
                        "copies share a slot; release it first, or make the model with "
                        "options->backward = FP8_WEIGHTS_KEEP",
                        model->weights[group->first].name);
    }
    FP8_TRY(fp8_model_take_slot(model, index, needed));
    return group->slot >= 0 ? gather(model, index, pass) : FP8_OK;
}

fp8_status fp8_model_check_pass(const char *call, fp8_pass pass)
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
        status = fp8_model_check_pass("model_gather", pass);
    if (status == FP8_OK)
        status = fp8_model_follow("model_gather", model, model->stream);
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(model->context, &pushed)) == FP8_OK) {
        status = fp8_model_bring(model, model->weights[layer].group, pass, false);
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
            FP8_TRY(fp8_model_bring(model, next, pass, false));
    }
    return FP8_OK;
}
