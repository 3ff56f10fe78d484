/*
 * model_rig.c - see model_rig.h.
 */
#include "tests/ranks/model_rig.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8_format.h"
#include "runtime/internal.h"

enum { LAYERS = 12, BATCHES = 2, SPANS = 512 };

/* Memory of a GPU is kept for blocks of the same size: freeing it waits for everything on the
 * device, collectives included, which must not happen while the other rank still has to come. */
struct store {
    struct block {
        void *memory;
        size_t bytes;
        bool is_shared, is_used;
    } * blocks;
    int count;
};

struct side { /* of one rank, or of a reference */
    fp8_context *context;
    fp8_layer *layers[LAYERS];
    fp8_layer_info info[LAYERS];
    int count;
    void *workspace;
    size_t workspace_bytes;
    struct store *store;
};

/* What a layer's passes read and write. */
struct data {
    fp8_tensor x, dy, y, dx, bias;
    fp8_operand saved, grad;
    void *blocks[8];
};

char model_doing[MODEL_RANKS][96];

static void now_doing(const struct rank *rank, const char *what, int step, int layer)
{
    if (rank->rank < MODEL_RANKS)
        snprintf(model_doing[rank->rank], sizeof model_doing[0], "rank %d: %s, step %d, layer %d",
                 rank->rank, what, step, layer);
}

uint16_t model_value(uint64_t what, int64_t index)
{
    uint64_t z = what * 0x9e3779b97f4a7c15u + (uint64_t)index * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 31)) * 0x94d049bb133111ebu;
    z ^= z >> 29;
    float value = (float)((int64_t)(z & 0xffff) - 32768) / 32768.0f;
    if (z >> 60 == 7)
        value *= 8.0f;
    return fp8_float_to_bf16(value);
}

static struct block *find_block(const struct side *side, size_t bytes, bool is_shared)
{
    for (int i = 0; i < side->store->count; i++) {
        struct block *block = &side->store->blocks[i];
        if (!block->is_used && block->bytes == bytes && block->is_shared == is_shared)
            return block;
    }
    return NULL;
}

/* Memory that the host reads and writes too. */
static void *alloc_managed(const struct side *side, size_t bytes)
{
    int (*managed)(void **, size_t, unsigned);
    void *memory = NULL, *address = NULL;
    bool pushed;
    if (fp8_library_symbol(FP8_LIBRARY_CUDA, "cuMemAllocManaged", &address, NULL) != FP8_OK)
        abort();
    memcpy(&managed, &address, sizeof address);
    if (fp8_context_enter(side->context, &pushed) != FP8_OK ||
        managed(&memory, bytes ? bytes : 1, 1 /* attached to all streams */) != 0)
        abort();
    fp8_context_leave(side->context, pushed);
    return memory;
}

static void *take_block(const struct side *side, size_t bytes, bool is_shared)
{
    struct store *store = side->store;
    struct block *block = find_block(side, bytes, is_shared);
    if (!block) {
        store->blocks = realloc(store->blocks, ((size_t)store->count + 1) * sizeof *store->blocks);
        if (!store->blocks)
            abort();
        block = &store->blocks[store->count++];
        *block = (struct block){ .bytes = bytes, .is_shared = is_shared };
        if (is_shared)
            block->memory = alloc_managed(side, bytes);
        else if (fp8_memory_alloc(side->context, bytes, &block->memory) != FP8_OK)
            abort();
    }
    block->is_used = true;
    return block->memory;
}

/* Memory of the device, poisoned. */
static void *take(const struct side *side, size_t bytes)
{
    void *memory = NULL;
    if (!side->context->is_host)
        memory = take_block(side, bytes, false);
    else if (fp8_memory_alloc(side->context, bytes, &memory) != FP8_OK)
        abort();
    if (fp8_memory_fill(side->context, memory, 0xff, bytes, NULL) != FP8_OK)
        abort();
    return memory;
}

/* The same for the host too: managed on a GPU. What was in it is done with on the device. */
static void *take_shared(const struct side *side, size_t bytes)
{
    if (side->context->is_host)
        return take(side, bytes);
    void *memory = take_block(side, bytes, true);
    memset(memory, 0xff, bytes ? bytes : 1);
    return memory;
}

static void give_back(const struct side *side, void *memory)
{
    if (side->context->is_host)
        fp8_memory_free(side->context, memory);
    for (int i = 0; i < side->store->count; i++) {
        if (side->store->blocks[i].memory == memory)
            side->store->blocks[i].is_used = false;
    }
}

static fp8_tensor tensor_of(const struct side *side, int64_t rows, int64_t cols, fp8_dtype dtype)
{
    fp8_tensor t = { NULL, rows, cols, cols, dtype, 0 };
    t.data = take_shared(side, (size_t)(rows * cols) * fp8_dtype_bytes(dtype));
    return t;
}

static void fill(const fp8_tensor *t, uint64_t what, int64_t first)
{
    for (int64_t i = 0; i < t->rows * t->cols; i++)
        ((uint16_t *)t->data)[i] = model_value(what, first + i);
}

static int64_t tokens_of(const struct model_case *c, int32_t rank, int32_t ranks)
{
    if (c->tokens < 0)
        return rank == ranks - 1 ? 3 : 0;
    return c->tokens > rank ? c->tokens - rank : 0;
}

enum { W = 1, BIAS, X, DY };
static uint64_t name_of(int what, int step, int layer, int rank, int batch)
{
    return ((((uint64_t)what * 64 + (uint64_t)step) * 64 + (uint64_t)layer) * 64 + (uint64_t)rank) *
               64 +
           (uint64_t)batch;
}

static bool open_side(struct side *side, fp8_context *context, fp8_bundle *bundle)
{
    side->context = context;
    side->store = calloc(1, sizeof *side->store);
    if (!side->store)
        return false;
    side->count = fp8_bundle_layer_count(bundle);
    for (int i = 0; i < side->count; i++) {
        size_t bytes;
        side->info[i].size = sizeof side->info[i];
        if (fp8_layer_create(bundle, fp8_bundle_layer_name(bundle, i), &side->layers[i]) !=
                FP8_OK ||
            fp8_layer_describe(side->layers[i], &side->info[i]) != FP8_OK ||
            fp8_layer_bytes(side->layers[i], side->info[i].max_tokens, FP8_BYTES_WORKSPACE,
                            &bytes) != FP8_OK)
            return false;
        if (bytes > side->workspace_bytes)
            side->workspace_bytes = bytes;
    }
    side->workspace = take(side, side->workspace_bytes);
    return true;
}

static void close_side(struct side *side)
{
    for (int i = 0; i < side->count; i++)
        fp8_layer_destroy(side->layers[i]);
    give_back(side, side->workspace);
    for (int i = 0; i < side->store->count; i++)
        fp8_memory_free(side->context, side->store->blocks[i].memory);
    free(side->store->blocks);
    free(side->store);
}

static fp8_call call_of(const struct side *side)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = side->workspace;
    call.workspace_bytes = side->workspace_bytes;
    return call;
}

static void make_data(const struct side *side, int layer, int64_t tokens, struct data *d)
{
    const fp8_layer_info *info = &side->info[layer];
    size_t saved = 0, grad = 0;
    d->x = tensor_of(side, tokens, info->in_features, FP8_DTYPE_BF16);
    d->dy = tensor_of(side, tokens, info->out_features, FP8_DTYPE_BF16);
    d->y = tensor_of(side, tokens, info->out_features, info->y_dtype);
    d->dx = tensor_of(side, tokens, info->in_features, info->dx_dtype);
    d->bias = tensor_of(side, 1, info->out_features, FP8_DTYPE_BF16);
    (void)fp8_layer_bytes(side->layers[layer], tokens, FP8_BYTES_SAVED, &saved);
    (void)fp8_layer_bytes(side->layers[layer], tokens, FP8_BYTES_GRAD, &grad);
    d->saved = (fp8_operand)FP8_OPERAND_INIT;
    d->grad = (fp8_operand)FP8_OPERAND_INIT;
    d->saved.data = take(side, saved);
    d->saved.bytes = saved;
    d->grad.data = take(side, grad);
    d->grad.bytes = grad;
}

static void drop_data(const struct side *side, struct data *d)
{
    void *blocks[] = { d->x.data,    d->dy.data,    d->y.data,   d->dx.data,
                       d->bias.data, d->saved.data, d->grad.data };
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++)
        give_back(side, blocks[i]);
}

/* ---- the reference: one rank's passes with a whole weight ---- */

struct reference {
    struct data d;
    fp8_tensor dw, dbias;
};

/* Whether wgrad multiplies the caller's x and dy. */
static bool reads_x(const fp8_layer *layer)
{
    return !(fp8_operand_copies(layer->plan, FP8_ROLE_X) & FP8_COPY_TRANSPOSED);
}

static bool run_reference(const struct side *side, const struct model_case *c, int step, int layer,
                          int rank, int ranks, int batch, struct reference *r)
{
    const fp8_layer_info *info = &side->info[layer];
    fp8_layer *own = side->layers[layer];
    make_data(side, layer, tokens_of(c, rank, ranks), &r->d);
    r->dw = tensor_of(side, info->out_features, info->in_features, info->dw_dtype);
    r->dbias = tensor_of(side, 1, info->out_features, FP8_DTYPE_FP32);
    fill(&r->d.x, name_of(X, step, layer, rank, batch), 0);
    fill(&r->d.dy, name_of(DY, step, layer, rank, batch), 0);
    fill(&r->d.bias, name_of(BIAS, step, layer, 0, 0), 0);
    fp8_tensor w = tensor_of(side, info->out_features, info->in_features, FP8_DTYPE_BF16);
    fill(&w, name_of(W, step, layer, 0, 0), 0);
    fp8_operand weight = FP8_OPERAND_INIT;
    (void)fp8_layer_bytes(own, 0, FP8_BYTES_WEIGHT, &weight.bytes);
    weight.data = take_shared(side, weight.bytes);
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &w;
    update.version = 1;
    update.weight = &weight;
    update.call = call_of(side);
    const bool by_tensor = own->plan->is_bf16;
    bool good = by_tensor || fp8_weight_update(own, &update) == FP8_OK;
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &r->d.x;
    fprop.weight = by_tensor ? NULL : &weight;
    fprop.w = by_tensor ? &w : NULL;
    fprop.bias = info->has_bias ? &r->d.bias : NULL;
    fprop.y = &r->d.y;
    fprop.saved = by_tensor ? NULL : &r->d.saved;
    fprop.call = call_of(side);
    good = good && fp8_layer_fprop(own, &fprop) == FP8_OK;
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &r->d.dy;
    backward.saved = by_tensor ? NULL : &r->d.saved;
    backward.weight = by_tensor ? NULL : &weight;
    backward.grad = by_tensor ? NULL : &r->d.grad;
    backward.x = reads_x(own) ? &r->d.x : NULL;
    backward.w = fprop.w;
    backward.dbias = info->has_bias ? &r->dbias : NULL;
    backward.dw = &r->dw;
    backward.dx = &r->d.dx;
    backward.call = call_of(side);
    good = good && fp8_layer_backward(own, &backward) == FP8_OK;
    good = good && fp8_stream_synchronize(side->context, NULL) == FP8_OK;
    give_back(side, w.data);
    give_back(side, weight.data);
    return good;
}

static void drop_reference(const struct side *side, struct reference *r)
{
    drop_data(side, &r->d);
    give_back(side, r->dw.data);
    give_back(side, r->dbias.data);
}

static float get(const fp8_tensor *t, int64_t i)
{
    if (t->dtype == FP8_DTYPE_FP32)
        return ((const float *)t->data)[i];
    return fp8_bf16_to_float(((const uint16_t *)t->data)[i]);
}

static float rounded(float value, fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_BF16 ? fp8_bf16_to_float(fp8_float_to_bf16(value)) : value;
}

static bool same_bytes(const fp8_tensor *a, const fp8_tensor *b)
{
    return memcmp(a->data, b->data, (size_t)(a->rows * a->cols) * fp8_dtype_bytes(a->dtype)) == 0;
}

/* ---- hooks: whole weights, gradients kept ---- */

struct hooked {
    const struct side *side;
    const struct model_case *c;
    int step;
    fp8_tensor w[LAYERS], bias[LAYERS], dw[LAYERS], dbias[LAYERS];
    int weights, grads;
    fp8_status next; /* what the weight hook returns, once */
};

static fp8_status give_weight(void *user, const fp8_hook_request *request, fp8_weight_view *view)
{
    struct hooked *h = user;
    const fp8_status status = h->next;
    h->next = FP8_OK;
    if (status != FP8_OK)
        return status;
    h->weights++;
    view->tensor = request->is_bias ? h->bias[request->layer] : h->w[request->layer];
    view->version = (uint64_t)(h->step * LAYERS + request->layer + 1);
    return FP8_OK;
}

static fp8_status keep_grad(void *user, const fp8_hook_request *request, const fp8_tensor *grad,
                            fp8_event **done)
{
    struct hooked *h = user;
    fp8_tensor *to = request->is_bias ? &h->dbias[request->layer] : &h->dw[request->layer];
    (void)done;
    h->grads++;
    return fp8_memory_copy(h->side->context, to->data, grad->data,
                           (size_t)(to->rows * to->cols) * fp8_dtype_bytes(to->dtype),
                           request->stream);
}

/* ---- a rank ---- */

struct run {
    struct rank *rank;
    const struct model_case *c;
    struct side side;
    fp8_model *model;
    struct hooked hooked;
    fp8_hooks hooks;
    fp8_tensor w[LAYERS], bias[LAYERS];        /* shards */
    fp8_tensor dw[LAYERS], dbias[LAYERS];      /* reduced */
    fp8_tensor whole[LAYERS], whole_b[LAYERS]; /* the caller's accumulators */
    int64_t first[LAYERS], rows[LAYERS];
};

static bool is_hooked(const struct run *run, int layer)
{
    return run->c->with_hooks && layer % 2 == 1;
}

static bool make_model(struct run *run)
{
    const struct model_case *c = run->c;
    fp8_model_layer layers[LAYERS];
    run->hooks = (fp8_hooks)FP8_HOOKS_INIT;
    run->hooks.user = &run->hooked;
    run->hooks.weight = give_weight;
    run->hooks.grad = keep_grad;
    run->hooked.side = &run->side;
    run->hooked.c = c;
    for (int i = 0; i < run->side.count; i++) {
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = run->side.layers[i];
        layers[i].group = c->group;
        layers[i].hooks = is_hooked(run, i) ? &run->hooks : NULL;
    }
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    options.layer_count = run->side.count;
    options.layers = layers;
    options.context = run->side.context;
    options.comm = run->rank->comm;
    options.slots = c->slots;
    options.backward = c->keep ? FP8_WEIGHTS_KEEP : FP8_WEIGHTS_GATHER;
    options.grads = c->average ? FP8_GRADS_AVERAGE : FP8_GRADS_SUM;
    options.no_prefetch = c->no_prefetch;
    options.hash = "0123";
    fp8_model_bytes bytes = { .size = sizeof bytes };
    options.comm_sms = -1;
    if (fp8_model_measure(&options, &bytes) != FP8_ERR_ARGUMENT || !says("comm_sms is -1", NULL))
        return false;
    options.comm_sms = c->comm_sms;
    options.grads = (fp8_model_grads)3;
    if (fp8_model_measure(&options, &bytes) != FP8_ERR_ARGUMENT || !says("grads is 3", NULL))
        return false;
    options.grads = c->average ? FP8_GRADS_AVERAGE : FP8_GRADS_SUM;
    options.reduce_by = (fp8_model_reduce)3;
    if (fp8_model_measure(&options, &bytes) != FP8_ERR_ARGUMENT || !says("reduce_by is 3", NULL))
        return false;
    options.reduce_by = c->reduce_by;
    options.transposed_shards = c->transposed_shards;
    if (fp8_model_measure(&options, &bytes) != FP8_OK || bytes.pool < bytes.shards + bytes.slots)
        return false;
    return fp8_model_create(&options, &run->model) == FP8_OK;
}

static bool make_shards(struct run *run)
{
    for (int i = 0; i < run->side.count; i++) {
        const fp8_layer_info *info = &run->side.info[i];
        const int64_t k = info->in_features, n = info->out_features;
        if (fp8_model_rows(run->model, i, &run->first[i], &run->rows[i]) != FP8_OK)
            return false;
        run->w[i] = tensor_of(&run->side, run->rows[i], k, FP8_DTYPE_BF16);
        run->bias[i] = tensor_of(&run->side, 1, run->rows[i], FP8_DTYPE_BF16);
        run->dw[i] = tensor_of(&run->side, run->rows[i], k, FP8_DTYPE_FP32);
        run->dbias[i] = tensor_of(&run->side, 1, run->rows[i], FP8_DTYPE_FP32);
        run->whole[i] = tensor_of(&run->side, n, k, info->dw_dtype);
        run->whole_b[i] = tensor_of(&run->side, 1, n, FP8_DTYPE_FP32);
        run->hooked.w[i] = tensor_of(&run->side, n, k, FP8_DTYPE_BF16);
        run->hooked.bias[i] = tensor_of(&run->side, 1, n, FP8_DTYPE_BF16);
        run->hooked.dw[i] = tensor_of(&run->side, n, k, info->dw_dtype);
        run->hooked.dbias[i] = tensor_of(&run->side, 1, n, FP8_DTYPE_FP32);
    }
    return true;
}

static bool update(struct run *run, int step)
{
    run->hooked.step = step;
    for (int i = 0; i < run->side.count; i++) {
        const int64_t k = run->side.info[i].in_features;
        fill(&run->w[i], name_of(W, step, i, 0, 0), run->first[i] * k);
        fill(&run->bias[i], name_of(BIAS, step, i, 0, 0), run->first[i]);
        fill(&run->hooked.w[i], name_of(W, step, i, 0, 0), 0);
        fill(&run->hooked.bias[i], name_of(BIAS, step, i, 0, 0), 0);
    }
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    args.w = run->w;
    args.bias = run->c->give_bias ? run->bias : NULL;
    args.version = (uint64_t)step + 1;
    args.call = call_of(&run->side);
    return fp8_model_update(run->model, &args) == FP8_OK &&
           fp8_model_update(run->model, &args) == FP8_OK;
}

static bool forward(struct run *run, int step, int layer, int batch, struct data *d)
{
    const bool has_bias = run->side.info[layer].has_bias;
    make_data(&run->side, layer, tokens_of(run->c, run->rank->rank, run->rank->ranks), d);
    fill(&d->x, name_of(X, step, layer, run->rank->rank, batch), 0);
    fill(&d->dy, name_of(DY, step, layer, run->rank->rank, batch), 0);
    fill(&d->bias, name_of(BIAS, step, layer, 0, 0), 0);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &d->x;
    args.bias = has_bias && !run->c->give_bias && !is_hooked(run, layer) ? &d->bias : NULL;
    args.y = &d->y;
    args.saved = run->side.layers[layer]->plan->is_bf16 ? NULL : &d->saved;
    args.call = call_of(&run->side);
    return fp8_model_fprop(run->model, layer, &args) == FP8_OK;
}

static bool backward(struct run *run, int layer, int batch, struct data *d)
{
    const bool has_bias = run->side.info[layer].has_bias, hooked = is_hooked(run, layer);
    const bool own = run->c->caller_dw && !hooked, last = batch == BATCHES - 1;
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    passes.dy = &d->dy;
    passes.saved = run->side.layers[layer]->plan->is_bf16 ? NULL : &d->saved;
    passes.grad = run->side.layers[layer]->plan->is_bf16 ? NULL : &d->grad;
    passes.x = reads_x(run->side.layers[layer]) ? &d->x : NULL;
    passes.dx = &d->dx;
    passes.dw = own ? &run->whole[layer] : NULL;
    passes.dbias = own && has_bias ? &run->whole_b[layer] : NULL;
    passes.accumulate_dw = passes.accumulate_dbias = own && batch > 0;
    passes.call = call_of(&run->side);
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    args.backward = &passes;
    args.reduce = !own || last;
    if (args.reduce && !hooked) {
        args.dw = &run->dw[layer];
        args.dbias = has_bias ? &run->dbias[layer] : NULL;
    }
    args.accumulate = !own && !hooked && batch > 0;
    return fp8_model_backward(run->model, layer, &args) == FP8_OK;
}

/* dw of this rank's rows from the references of all ranks, added up as the collectives do. */
static bool check_grads(struct run *run, int step, int layer)
{
    const struct model_case *c = run->c;
    const int ranks = run->rank->ranks;
    const fp8_layer_info *info = &run->side.info[layer];
    const int64_t k = info->in_features, rows = run->rows[layer];
    const fp8_dtype dtype = info->dw_dtype;
    float *sums = calloc((size_t)(rows * k) * 3 + 1, sizeof *sums), *total = sums + rows * k;
    float *biases = calloc((size_t)rows * 3 + 1, sizeof *biases), *bias_total = biases + rows;
    float *sizes = total + rows * k, *bias_sizes = bias_total + rows; /* of the terms */
    const float share = c->average ? 1.0f / (float)ranks : 1.0f;
    bool good = true;
    for (int batch = 0; batch < BATCHES && good; batch++) {
        for (int rank = 0; rank < ranks && good; rank++) {
            struct reference r;
            good = run_reference(&run->side, c, step, layer, rank, ranks, batch, &r);
            for (int64_t i = 0; i < rows * k; i++) {
                float value = get(&r.dw, run->first[layer] * k + i);
                sums[i] = rank == 0 ? value : sums[i] + value;
                sizes[i] += share * (value < 0 ? -value : value);
            }
            for (int64_t i = 0; i < rows && info->has_bias; i++) {
                float value = get(&r.dbias, run->first[layer] + i);
                biases[i] = rank == 0 ? value : biases[i] + value;
                bias_sizes[i] += share * (value < 0 ? -value : value);
            }
            drop_reference(&run->side, &r);
        }
        for (int64_t i = 0; i < rows * k; i++)
            total[i] = batch == 0 ? rounded(sums[i] * share, dtype)
                                  : total[i] + rounded(sums[i] * share, dtype);
        for (int64_t i = 0; i < rows; i++)
            bias_total[i] = batch == 0 ? biases[i] * share : bias_total[i] + biases[i] * share;
    }
    const float slack =
        c->caller_dw ? 3e-2f : 0.0f; /* the same products added up by another kernel */
    /* NCCL adds more than two ranks in an order of its own, and accumulators are rounded after each
     * batch: a rounding for each addition and average, of the size of its terms */
    const bool is_other = c->caller_dw || (ranks > 2 && !run->side.context->is_host);
    const float roundings = is_other ? (float)(ranks + 2) : 0.0f;
    const float rounding = roundings * (dtype == FP8_DTYPE_BF16 ? 0x1p-8f : 0x1p-24f);
    for (int64_t i = 0; i < rows * k && good; i++) {
        float got = get(&run->dw[layer], i), off = got - total[i];
        const float bound = slack * (1 + (got < 0 ? -got : got)) + rounding * sizes[i];
        good = off <= bound && -off <= bound;
        if (!good)
            fprintf(stderr, "dw of layer %d, element %lld: %g, not %g\n", layer, (long long)i, got,
                    total[i]);
    }
    for (int64_t i = 0; i < rows && good && info->has_bias; i++) {
        float got = get(&run->dbias[layer], i), off = got - bias_total[i];
        const float bound = slack * 10 + roundings * 0x1p-24f * bias_sizes[i];
        good = off <= bound && -off <= bound;
        if (!good)
            fprintf(stderr, "dbias of layer %d, element %lld: %g, not %g\n", layer, (long long)i,
                    got, bias_total[i]);
    }
    free(sums);
    free(biases);
    return good;
}

/* How often weights were gathered since the trace began. */
static int count_gathers(struct run *run)
{
    fp8_model_span spans[SPANS];
    int32_t count = SPANS;
    int gathers = 0;
    if (fp8_model_spans(run->model, spans, &count) != FP8_OK || count == SPANS ||
        fp8_model_trace(run->model, 0, NULL) != FP8_OK)
        return -1;
    for (int32_t i = 0; i < count; i++)
        gathers += strcmp(spans[i].what, "all_gather") == 0;
    return gathers;
}

static void one_step(struct run *run, int step)
{
    struct rank *rank = run->rank;
    struct data d[BATCHES][LAYERS];
    now_doing(rank, "update", step, 0);
    rank_check(rank, update(run, step));
    rank_check(rank, !run->c->gathers || fp8_model_trace(run->model, SPANS, NULL) == FP8_OK);
    for (int batch = 0; batch < BATCHES; batch++) {
        for (int i = 0; i < run->side.count; i++) {
            now_doing(rank, "forward", step, i);
            rank_check(rank, forward(run, step, i, batch, &d[batch][i]));
        }
        for (int i = run->side.count - 1; i >= 0; i--) {
            now_doing(rank, "backward", step, i);
            rank_check(rank, backward(run, i, batch, &d[batch][i]));
            struct reference r;
            now_doing(rank, "backward's reference", step, i);
            rank_check(rank, run_reference(&run->side, run->c, step, i, rank->rank, rank->ranks,
                                           batch, &r));
            rank_check(rank, fp8_comm_wait(rank->comm, NULL) == FP8_OK);
            rank_check(rank, same_bytes(&r.d.y, &d[batch][i].y));
            rank_check(rank, same_bytes(&r.d.dx, &d[batch][i].dx));
            if (is_hooked(run, i)) {
                rank_check(rank, same_bytes(&r.dw, &run->hooked.dw[i]));
                rank_check(rank, !run->side.info[i].has_bias ||
                                     same_bytes(&r.dbias, &run->hooked.dbias[i]));
            }
            drop_reference(&run->side, &r);
        }
    }
    now_doing(rank, "the step's end", step, 0);
    rank_check(rank, fp8_model_join(run->model, NULL) == FP8_OK);
    rank_check(rank, fp8_comm_wait(rank->comm, NULL) == FP8_OK);
    rank_check(rank, !run->c->gathers || count_gathers(run) == run->c->gathers);
    for (int i = 0; i < run->side.count; i++) {
        rank_check(rank, is_hooked(run, i) || check_grads(run, step, i));
        for (int batch = 0; batch < BATCHES; batch++)
            drop_data(&run->side, &d[batch][i]);
    }
}

/* On a GPU all memory is taken and every product run once before the first step. What waits for the
 * device while it holds the driver's lock (an allocation, a kernel that is loaded at its first
 * launch) would keep the other rank, a thread of the same process, from the collective that this
 * device waits for. */
static void warm_up(struct run *run)
{
    struct rank *rank = run->rank;
    struct data d[BATCHES][LAYERS];
    const int64_t tokens = tokens_of(run->c, rank->rank, rank->ranks);
    if (rank->context->is_host)
        return;
    now_doing(rank, "warming up", 0, 0);
    for (int i = 0; i < run->side.count * BATCHES; i++)
        make_data(&run->side, i / BATCHES, tokens, &d[i % BATCHES][i / BATCHES]);
    for (int i = 0; i < run->side.count * rank->ranks; i++) {
        struct reference r;
        rank_check(rank, run_reference(&run->side, run->c, 0, i / rank->ranks, i % rank->ranks,
                                       rank->ranks, 0, &r));
        drop_reference(&run->side, &r);
    }
    for (int i = 0; i < run->side.count * BATCHES; i++)
        drop_data(&run->side, &d[i % BATCHES][i / BATCHES]);
    rank_check(rank, fp8_comm_agree(rank->comm, "readiness", "warm") == FP8_OK);
}

static void drop_run(struct run *run)
{
    for (int i = 0; i < run->side.count; i++) {
        fp8_tensor *all[] = { &run->w[i],           &run->bias[i],        &run->dw[i],
                              &run->dbias[i],       &run->whole[i],       &run->whole_b[i],
                              &run->hooked.w[i],    &run->hooked.bias[i], &run->hooked.dw[i],
                              &run->hooked.dbias[i] };
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++)
            give_back(&run->side, all[j]->data);
    }
    fp8_model_destroy(run->model);
    close_side(&run->side);
}

void model_body(struct rank *rank)
{
    struct run *run = calloc(1, sizeof *run);
    fp8_bundle *bundle = NULL;
    run->rank = rank;
    run->c = rank->user;
    rank_check(rank, fp8_bundle_open(rank->context, run->c->bundle, &bundle) == FP8_OK);
    rank_check(rank, open_side(&run->side, rank->context, bundle));
    rank_check(rank, make_model(run));
    rank_check(rank, make_shards(run));
    warm_up(run);
    for (int step = 0; step < run->c->steps && !rank->fault[0]; step++)
        one_step(run, step);
    if (!rank->fault[0])
        drop_run(run), fp8_bundle_close(bundle);
    free(run);
}
