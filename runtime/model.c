/*
 * model.c - the model: its layout, its creation, what it can be asked.
 *
 * In: layers in forward order and the communicator over which their weights are sharded. Out: one
 * piece of device memory, the same layout on all ranks because every shard is padded to the
 * largest, in which lie
 *     shards   FP8 rows of this rank behind their scales, and its part of the biases
 *     slots    whole weights: the operand of each layer of a group, laid out so that the rows of
 *              all ranks arrive in place; the transposed copy is made behind them where backward
 *              wants it
 *     grads    two whole gradients, which are reduced while the next is computed (beside the pool
 *              where NCCL sums them: it does not in registered memory)
 *     amaxes   one number a layer, or one a column of its weight; those on which ranks do not agree
 *              (scales of tiles or of shards, weights of hooks) come last and stay here
 * and a stream on which every collective of the model runs, so that all ranks run them in one
 * order.
 */
#include "runtime/model.h"

#include <stdio.h>
#include <string.h>

#include "runtime/driver.h"

/* ---- marks ---- */

static fp8_status make_mark(const fp8_model *model, struct fp8_mark *mark)
{
    if (model->context->is_host)
        return FP8_OK;
    CUevent event = NULL;
    CUresult result = model->context->driver->event_create(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(model->context->driver, result, "model_create: an event");
    mark->event = event;
    return FP8_OK;
}

static void drop_mark(const fp8_model *model, struct fp8_mark *mark)
{
    if (mark->event)
        (void)model->context->driver->event_destroy((CUevent)mark->event);
    mark->event = NULL;
}

fp8_status fp8_mark_record(const fp8_model *model, struct fp8_mark *mark, fp8_stream stream)
{
    mark->set = true;
    mark->capture = model->capture;
    if (model->context->is_host)
        return FP8_OK;
    CUresult result = model->context->driver->event_record((CUevent)mark->event, stream);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(model->context->driver, result, "model: recording an event");
}

fp8_status fp8_mark_wait(const fp8_model *model, const struct fp8_mark *mark, fp8_stream stream)
{
    if (model->context->is_host || !mark->set || mark->capture != model->capture)
        return FP8_OK;
    CUresult result = model->context->driver->stream_wait_event(stream, (CUevent)mark->event, 0);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(model->context->driver, result, "model: a stream waits for an event");
}

fp8_status fp8_model_order(fp8_model *model, struct fp8_mark *mark, fp8_stream from, fp8_stream to)
{
    FP8_TRY(fp8_mark_record(model, mark, from));
    return fp8_mark_wait(model, mark, to);
}

/* ---- options ---- */

static fp8_status check_layer(const fp8_model_options *options, int32_t i)
{
    const fp8_model_layer *layer = &options->layers[i];
    if (layer->size != sizeof *layer || layer->reserved[0] || layer->reserved[1] ||
        layer->reserved[2] || layer->reserved[3])
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_create: size of layer %d is %u, this library's is %zu, and reserved "
                        "words are 0; start from FP8_MODEL_LAYER_INIT",
                        i, layer->size, sizeof *layer);
    if (!layer->layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: layer %d is NULL", i);
    if (layer->layer->context != options->context)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: layer %d ('%s') is of another context", i,
                        layer->layer->plan->name);
    const fp8_hooks *hooks = layer->hooks;
    if (hooks && hooks->size != sizeof *hooks)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_create: hooks->size of layer %d is %u, this library's is %zu; start "
                        "from FP8_HOOKS_INIT",
                        i, hooks->size, sizeof *hooks);
    if (!options->comm && !(hooks && hooks->weight))
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "model_create: layer %d ('%s') has no weight hook, and there is no comm that "
            "its weight could be gathered over",
            i, layer->layer->plan->name);
    int64_t fsdp = layer->layer->bundle->manifest.fsdp;
    int32_t ranks = options->comm ? options->comm->ranks : 1;
    if (!(hooks && hooks->weight) && fsdp > 1 && fsdp != ranks)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_create: layer %d ('%s') was built for fsdp = %lld, but the "
                        "communicator has %d rank%s; start %lld ranks or rebuild the bundle",
                        i, layer->layer->plan->name, (long long)fsdp, ranks, ranks == 1 ? "" : "s",
                        (long long)fsdp);
    return FP8_OK;
}

/* What is left to the spec must be the same in all of the layers' specs. */
static fp8_status check_specs(const fp8_model_options *options)
{
    const struct fp8_manifest *first = &options->layers[0].layer->bundle->manifest;
    for (int32_t i = 1; i < options->layer_count; i++) {
        const struct fp8_manifest *other = &options->layers[i].layer->bundle->manifest;
        const bool keep = !options->backward && other->keep != first->keep;
        if (keep || (!options->grads && other->sum != first->sum))
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "model_create: the specs of layers 0 and %d differ in shard.%s; set "
                            "options->%s",
                            i, keep ? "backward" : "reduce", keep ? "backward" : "grads");
    }
    return FP8_OK;
}

static fp8_status check_options(const fp8_model_options *options)
{
    if (!options)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: options is NULL");
    if (options->size != sizeof *options || options->reserved0 || options->reserved[0] ||
        options->reserved[1] || options->reserved[2] || options->reserved[3])
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_create: options->size is %u, this library's is %zu, and reserved "
                        "words are 0; start from FP8_MODEL_OPTIONS_INIT",
                        options->size, sizeof *options);
    if (!options->context || !options->layers)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: %s is NULL",
                        options->context ? "layers" : "context");
    if (options->layer_count < 1 || options->layer_count > 65536)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: layer_count is %d, not in 1..65536",
                        options->layer_count);
    if (options->slots < 0)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: slots is %d; pass 0 for 2",
                        options->slots);
    if (options->backward < FP8_WEIGHTS_AS_SPEC || options->backward > FP8_WEIGHTS_KEEP)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: backward is %d; pass FP8_WEIGHTS_*",
                        (int)options->backward);
    if (options->grads < FP8_GRADS_AS_SPEC || options->grads > FP8_GRADS_AVERAGE)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: grads is %d; pass FP8_GRADS_*",
                        (int)options->grads);
    FP8_TRY(fp8_check_flag("model_create", "no_prefetch", options->no_prefetch));
    FP8_TRY(fp8_check_flag("model_create", "transposed_shards", options->transposed_shards));
    if (options->comm_sms < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_create: comm_sms is %d; pass the SMs that dgrad leaves to a "
                        "reduce-scatter, or 0",
                        options->comm_sms);
    if (options->reduce_by < FP8_REDUCE_AUTO || options->reduce_by > FP8_REDUCE_EXCHANGE)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: reduce_by is %d; pass FP8_REDUCE_*",
                        (int)options->reduce_by);
    if (options->comm && options->comm->context != options->context)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: comm is of another context");
    for (int32_t i = 0; i < options->layer_count; i++)
        FP8_TRY(check_layer(options, i));
    return check_specs(options);
}

/* ---- layout ---- */

static size_t align(size_t bytes)
{
    return fp8_align_up(bytes, FP8_PART_ALIGN);
}

/* So many elements at most, pads of shards among them: then all sums of bytes below, of 65536
 * layers, stay far within 64 bits. */
static fp8_status check_elements(const struct fp8_model_weight *weight, int64_t rows)
{
    static const int64_t most = (int64_t)1 << 40;
    if (rows <= most / weight->plan->in_features)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT,
                    "model_create: the weight of layer '%s' has %lld rows of %lld elements, but a "
                    "model's have at most 2^40 elements; split the layer",
                    weight->name, (long long)rows, (long long)weight->plan->in_features);
}

static fp8_status describe_weight(const fp8_model *model, const fp8_model_layer *from,
                                  struct fp8_model_weight *weight)
{
    weight->layer = from->layer;
    weight->plan = from->layer->plan;
    snprintf(weight->name, sizeof weight->name, "%s",
             from->name && *from->name ? from->name : weight->plan->name);
    if (from->hooks)
        weight->hooks = *from->hooks;
    weight->is_hooked = weight->hooks.weight != NULL;
    FP8_TRY(fp8_layer_bytes(weight->layer, 0, FP8_BYTES_WEIGHT, &weight->operand_bytes));
    if (weight->is_hooked)
        return check_elements(weight, weight->plan->out_features);
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.rank = model->rank;
    sharding.ranks = model->ranks;
    sharding.transposed = model->transposed_shards;
    FP8_TRY(fp8_shard_shape_of("model_create", weight->layer, &sharding, &weight->shard));
    FP8_TRY(check_elements(weight, model->ranks * weight->shard.chunk));
    if (weight->shard.is_turned) {
        const struct fp8_shape row = fp8_operand_shape(weight->plan, FP8_ROLE_W, 0, FP8_COPY_ROW);
        const struct fp8_shape turned =
            fp8_operand_shape(weight->plan, FP8_ROLE_W, 0, FP8_COPY_TRANSPOSED);
        weight->operand_bytes = (size_t)fp8_operand_bytes(&row);
        weight->turned_bytes = (size_t)fp8_operand_bytes(&turned);
    }
    if (weight->plan->has_bias)
        weight->bias_bytes = (size_t)weight->shard.chunk *
                             fp8_dtype_bytes(fp8_slot_dtype(weight->plan, FP8_SLOT_BIAS));
    return FP8_OK;
}

/* What a weight takes in its slot: the operand, or the rows of all ranks where these are more. */
static size_t place_in_slot(const fp8_model *model, struct fp8_model_weight *weight, size_t at)
{
    weight->operand_offset = at;
    size_t rows = weight->shard.data_offset + (size_t)model->ranks * weight->shard.data_bytes +
                  fp8_align_up((size_t)model->ranks * weight->shard.scale_bytes, FP8_PART_ALIGN);
    size_t bytes = weight->operand_bytes,
           pieces = (size_t)model->ranks * weight->shard.turned_bytes;
    if (!weight->is_hooked && rows > bytes)
        bytes = rows;
    if (!model->keep && pieces > bytes) /* one of the two is there at a time */
        bytes = pieces;
    at = align(at + bytes);
    weight->bias_offset = at;
    at = align(at + (size_t)model->ranks * weight->bias_bytes);
    weight->scales_offset = at;
    at = align(at + (size_t)model->ranks * weight->shard.scale_bytes);
    weight->turned_offset = at;
    at = align(at + weight->turned_bytes);
    weight->pieces_offset = model->keep ? at : weight->operand_offset;
    return model->keep ? align(at + pieces) : at;
}

/* Neighbours of one number form a group. */
static void make_groups(fp8_model *model, const fp8_model_layer *layers)
{
    for (int i = 0; i < model->weight_count; i++) {
        bool joins = i > 0 && layers[i].group != 0 && layers[i].group == layers[i - 1].group &&
                     !model->weights[i].is_hooked && !model->weights[i - 1].is_hooked;
        if (!joins) {
            struct fp8_model_group *group = &model->groups[model->group_count++];
            group->first = i;
            group->slot = -1;
        }
        struct fp8_model_group *group = &model->groups[model->group_count - 1];
        group->count++;
        group->bytes = place_in_slot(model, &model->weights[i], group->bytes);
        model->weights[i].group = model->group_count - 1;
    }
}

/* Bytes of the largest whole gradient; where its dbias begins. */
static size_t grad_bytes(fp8_model *model)
{
    size_t dw = 0, dbias = 0;
    for (int i = 0; i < model->weight_count; i++) {
        const struct fp8_model_weight *weight = &model->weights[i];
        int64_t rows =
            weight->is_hooked ? weight->plan->out_features : model->ranks * weight->shard.chunk;
        size_t bytes = (size_t)(rows * weight->plan->in_features) *
                       fp8_dtype_bytes(fp8_slot_dtype(weight->plan, FP8_SLOT_DW));
        dw = bytes > dw ? bytes : dw;
        bytes = weight->plan->has_bias ? (size_t)rows * sizeof(float) : 0;
        dbias = bytes > dbias ? bytes : dbias;
    }
    model->dbias_offset = align(dw);
    return model->dbias_offset + align(dbias);
}

/* Whether the ranks agree on amaxes of it: not where no scale crosses a cut, and not of a hook's
 * weight. */
static bool is_agreed_on(const struct fp8_model_weight *weight)
{
    return !weight->is_hooked && !weight->shard.is_tile && !weight->shard.own_scale;
}

/* Amaxes that the ranks agree on come first, behind them one for each other weight. Returns
 * bytes. */
static size_t lay_out_amaxes(fp8_model *model, float *at)
{
    model->amaxes = at;
    for (int agreed = 1; agreed >= 0; agreed--) {
        for (int i = 0; i < model->weight_count; i++) {
            struct fp8_model_weight *weight = &model->weights[i];
            if (is_agreed_on(weight) != (agreed == 1))
                continue;
            weight->amax = at;
            at += agreed ? weight->shard.amaxes : 1;
        }
        if (agreed)
            model->amax_count = (size_t)(at - model->amaxes);
    }
    return align((size_t)(at - model->amaxes) * sizeof(float));
}

/* Places in the pool, as offsets from `base`, and of gradients beside it; sets bytes. */
static void lay_out(fp8_model *model, uint8_t *base)
{
    uint8_t *at = base;
    size_t slot = 0;
    for (int i = 0; i < model->weight_count; i++) {
        struct fp8_model_weight *weight = &model->weights[i];
        weight->shard_memory = at;
        at += weight->is_hooked ? 0 : weight->shard.bytes;
        weight->bias_memory = at;
        at += align(weight->bias_bytes);
    }
    model->bytes.shards = (size_t)(at - base);
    for (int i = 0; i < model->group_count; i++)
        slot = model->groups[i].bytes > slot ? model->groups[i].bytes : slot;
    for (int i = 0; i < model->slot_count; i++) {
        model->slots[i].memory = at;
        at += model->keep ? model->groups[i].bytes : slot;
    }
    model->bytes.slots = (size_t)(at - base) - model->bytes.shards;
    const size_t grad = grad_bytes(model);
    uint8_t *grads = model->is_apart ? model->apart : at;
    for (int i = 0; i < FP8_MODEL_GRADS; i++, grads += grad)
        model->grads[i].memory = grads;
    for (int i = 0; i < FP8_MODEL_GRADS && model->exchanges; i++, grads += grad)
        model->grads[i].arrivals = grads;
    model->bytes.grads = FP8_MODEL_GRADS * (model->exchanges ? 2u : 1u) * grad;
    at = model->is_apart ? at : grads;
    at += lay_out_amaxes(model, (float *)(void *)at);
    model->pool_bytes = (size_t)(at - base);
    model->bytes.pool = model->pool_bytes + (model->is_apart ? model->bytes.grads : 0);
    model->bytes.size = sizeof model->bytes;
}

static void release_memory(fp8_model *model)
{
    fp8_release(model->weights);
    fp8_release(model->groups);
    fp8_release(model->slots);
    fp8_release(model);
}

/* Whether gradients are summed by an exchange and our kernel; the same on all ranks. */
static bool exchanges(const fp8_model_options *options)
{
    if (!options->comm || options->comm->ranks == 1)
        return false;
    if (options->reduce_by != FP8_REDUCE_AUTO)
        return options->reduce_by == FP8_REDUCE_EXCHANGE;
    for (int32_t i = 0; i < options->layer_count; i++) {
        const fp8_layer *layer = options->layers[i].layer;
        const fp8_dtype dtype = fp8_slot_dtype(layer->plan, FP8_SLOT_DW);
        if (!fp8_model_sum(layer, dtype, dtype))
            return false; /* built for one rank */
    }
    return options->comm->can_exchange;
}

/* The model without its pool. */
static fp8_status plan_model(const fp8_model_options *options, fp8_model **model)
{
    FP8_TRY(check_options(options));
    size_t count = (size_t)options->layer_count;
    fp8_model *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_fail_memory("a model", sizeof *made);
    made->weights = fp8_allocate(count * sizeof *made->weights);
    made->groups = fp8_allocate(count * sizeof *made->groups);
    made->slots = fp8_allocate((count + 2 + (size_t)options->slots) * sizeof *made->slots);
    if (!made->weights || !made->groups || !made->slots) {
        release_memory(made);
        return fp8_fail_memory("a model", count * sizeof *made->weights);
    }
    made->context = options->context;
    made->comm = options->comm;
    made->rank = options->comm ? options->comm->rank : 0;
    made->ranks = options->comm ? options->comm->ranks : 1;
    const struct fp8_manifest *spec = &options->layers[0].layer->bundle->manifest;
    made->keep = options->backward ? options->backward == FP8_WEIGHTS_KEEP : spec->keep;
    made->average = options->grads ? options->grads == FP8_GRADS_AVERAGE : !spec->sum;
    made->transposed_shards = options->transposed_shards;
    made->prefetch = !options->no_prefetch;
    made->comm_sms = options->comm_sms;
    made->exchanges = exchanges(options);
    made->is_apart = made->ranks > 1 && !made->exchanges;
    made->weight_count = options->layer_count;
    for (int i = 0; i < made->weight_count; i++) {
        fp8_status status = describe_weight(made, &options->layers[i], &made->weights[i]);
        if (status != FP8_OK) {
            release_memory(made);
            return status;
        }
    }
    make_groups(made, options->layers);
    made->slot_count = made->keep ? made->group_count : options->slots ? options->slots : 2;
    made->ahead = (options->slots ? options->slots : 2) - 1;
    if (made->slot_count > made->group_count)
        made->slot_count = made->group_count;
    lay_out(made, NULL);
    *model = made;
    return FP8_OK;
}

fp8_status fp8_model_measure(const fp8_model_options *options, fp8_model_bytes *bytes)
{
    fp8_model *model;
    if (!bytes || bytes->size != sizeof *bytes)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_measure: bytes is NULL or its size is not this library's %zu",
                        sizeof *bytes);
    FP8_TRY(plan_model(options, &model));
    *bytes = model->bytes;
    release_memory(model);
    return FP8_OK;
}

/* ---- creation ---- */

static fp8_status make_marks(fp8_model *model)
{
    FP8_TRY(make_mark(model, &model->caller));
    FP8_TRY(make_mark(model, &model->ours));
    FP8_TRY(make_mark(model, &model->updated));
    for (int i = 0; i < model->group_count; i++)
        FP8_TRY(make_mark(model, &model->groups[i].arrived));
    for (int i = 0; i < model->slot_count; i++)
        FP8_TRY(make_mark(model, &model->slots[i].read));
    FP8_TRY(make_mark(model, &model->came));
    for (int i = 0; i < FP8_MODEL_GRADS; i++) {
        FP8_TRY(make_mark(model, &model->grads[i].free));
        FP8_TRY(make_mark(model, &model->grads[i].summed));
    }
    return FP8_OK;
}

static void drop_marks(fp8_model *model)
{
    drop_mark(model, &model->caller);
    drop_mark(model, &model->ours);
    drop_mark(model, &model->updated);
    for (int i = 0; i < model->group_count; i++)
        drop_mark(model, &model->groups[i].arrived);
    for (int i = 0; i < model->slot_count; i++)
        drop_mark(model, &model->slots[i].read);
    drop_mark(model, &model->came);
    for (int i = 0; i < FP8_MODEL_GRADS; i++) {
        drop_mark(model, &model->grads[i].free);
        drop_mark(model, &model->grads[i].summed);
    }
}

/* Streams of collectives and sums go first where SMs become free: what they do is waited for. */
static fp8_status make_stream(fp8_model *model, fp8_stream *made)
{
    const struct fp8_driver *driver = model->context->driver;
    int least = 0, greatest = 0;
    struct fp8_uncaptured entered;
    CUstream stream = NULL;
    if (model->context->is_host)
        return FP8_OK;
    FP8_TRY(fp8_uncaptured_enter(model->context, "model_create", NULL, &entered));
    CUresult result = driver->priority_range(&least, &greatest);
    if (result == CUDA_SUCCESS)
        result = driver->stream_create_first(&stream, CU_STREAM_NON_BLOCKING, greatest);
    fp8_uncaptured_leave(model->context, &entered);
    *made = stream;
    return result == CUDA_SUCCESS ? FP8_OK
                                  : fp8_fail_cuda(driver, result, "model_create: its stream");
}

static fp8_status make_parts(fp8_model *model)
{
    bool pushed;
    if (model->is_apart)
        FP8_TRY(fp8_memory_alloc(model->context, model->bytes.grads, &model->apart));
    FP8_TRY(make_stream(model, &model->stream));
    if (model->exchanges)
        FP8_TRY(make_stream(model, &model->sums));
    FP8_TRY(fp8_context_enter(model->context, &pushed));
    fp8_status status = make_marks(model);
    fp8_context_leave(model->context, pushed);
    return status;
}

/* All ranks or none: a rank that was alone in failing would be waited for in the first
 * collective. */
static fp8_status make_parts_alike(fp8_model *model)
{
    struct fp8_vote vote;
    if (!model->comm)
        return make_parts(model);
    FP8_TRY(fp8_vote_open(model->comm, &vote));
    fp8_status status = fp8_vote_same(&vote, make_parts(model), "model_create");
    fp8_vote_close(&vote);
    return status;
}

static fp8_status make_memory(fp8_model *model, fp8_model_reduce by)
{
    void *pool = NULL;
    if (model->comm)
        FP8_TRY(fp8_comm_alloc(model->comm, model->pool_bytes, &pool));
    else
        FP8_TRY(fp8_memory_alloc(model->context, model->pool_bytes, &pool));
    model->pool = pool;
    if (by == FP8_REDUCE_AUTO && model->comm && !atomic_load(&model->comm->is_copy_engine))
        model->exchanges = false; /* there are no windows after all, on any rank */
    for (int i = 0; i < model->slot_count; i++)
        model->slots[i].group = -1;
    lay_out(model, model->pool);
    return FP8_OK;
}

fp8_status fp8_model_create(const fp8_model_options *options, fp8_model **model)
{
    if (!model)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_create: model is NULL");
    *model = NULL;
    fp8_model *made = NULL;
    fp8_status status = plan_model(options, &made);
    if (status == FP8_OK && made->comm)
        status = fp8_model_agree(made, options);
    if (status == FP8_OK)
        status = make_parts_alike(made);
    if (status == FP8_OK)
        status = make_memory(made, options->reduce_by);
    if (status != FP8_OK) {
        fp8_model_destroy(made);
        return options && options->context ? fp8_report(options->context, status) : status;
    }
    fp8_log_write(&made->context->log, FP8_LOG_INFO,
                  "model of %d layers in %d groups over %d ranks: pool of %zu bytes (shards %zu, "
                  "slots %zu, grads %zu)",
                  made->weight_count, made->group_count, made->ranks, made->bytes.pool,
                  made->bytes.shards, made->bytes.slots, made->bytes.grads);
    *model = made;
    return FP8_OK;
}

void fp8_model_destroy(fp8_model *model)
{
    if (!model)
        return;
    struct fp8_uncaptured entered;
    fp8_model_forget(model);
    if (fp8_release_enter(model->context, &entered)) {
        drop_marks(model);
        fp8_uncaptured_leave(model->context, &entered);
    }
    if (model->comm)
        fp8_comm_free(model->comm, model->pool);
    else
        fp8_memory_free(model->context, model->pool);
    fp8_memory_free(model->context, model->apart);
    fp8_stream_destroy(model->context, model->stream);
    fp8_stream_destroy(model->context, model->sums);
    release_memory(model);
}

/* ---- questions ---- */

fp8_status fp8_model_check(const char *call, fp8_model *model, int32_t layer)
{
    if (!model)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: model is NULL", call);
    if (layer < 0 || layer >= model->weight_count)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: layer is %d, but the model has layers 0 to %d", call,
                        layer, model->weight_count - 1);
    return model->comm ? fp8_comm_poll(model->comm) : FP8_OK;
}

fp8_status fp8_model_rows(const fp8_model *model, int32_t layer, int64_t *first, int64_t *count)
{
    if (!model || layer < 0 || layer >= model->weight_count)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_rows: model is NULL or has no layer %d", layer);
    const struct fp8_model_weight *weight = &model->weights[layer];
    if (first)
        *first = weight->is_hooked ? 0 : weight->shard.first;
    if (count)
        *count = weight->is_hooked ? weight->plan->out_features : weight->shard.count;
    return FP8_OK;
}
