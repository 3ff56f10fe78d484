/*
 * run_shard.c - one rank of `fp8gen run --fsdp`: steps of training over sharded weights.
 *
 * In: the bundle, a communicator. Out: results per layer, the worst of all ranks. Every layer has a
 * weight and data of its own (shapes of a spec do not chain). A step quantises the ranks' rows with
 * the amax of all, runs forward over all layers and backward in reverse, in two micro-batches,
 * through the model object with its gathers ahead and its reduce-scatters behind; the next step has
 * other weights. Layers take turns in how micro-batches add up: every one reduced into an fp32
 * shard, or the whole dw accumulated and reduced once. run_shard_check.c compares with the
 * unsharded layer.
 *
 * With --shrink the last rank's second micro-batch is empty: it must take part in everything.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"
#include "gen/cli/random.h"
#include "gen/cli/run_shard.h"

#define HOST_FLOPS 16e9 /* of one layer's GEMMs over all ranks */

static int failed(const struct shard_rank *s, fp8_status status, const struct shard_layer *l,
                  const char *what)
{
    return cli_fp8_failed(status, "rank %d, layer '%s', %s", s->rank->rank, l->info.name, what);
}

fp8_call shard_call(const struct shard_rank *s, const struct shard_layer *l)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = s->workspace.device;
    call.workspace_bytes = s->workspace.bytes;
    call.stream = s->rank->device.stream;
    call.state = l ? l->state : NULL;
    return call;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static int64_t most_tokens(const struct shard_rank *s, const struct shard_layer *l)
{
    if (s->run->tokens >= 0)
        return s->run->tokens;
    int64_t m = l->info.tokens;
    double each = 8.0 * (double)l->info.in_features * (double)l->info.out_features;
    double fit = HOST_FLOPS / each / s->rank->ranks;
    if (s->rank->device.is_host && (double)m > fit)
        m = fit < 16 ? 16 : (int64_t)fit / 16 * 16;
    return m < l->info.max_tokens ? m : l->info.max_tokens;
}

int64_t shard_tokens(const struct shard_rank *s, const struct shard_layer *l)
{
    bool last = s->rank->ranks > 1 && s->rank->rank == s->rank->ranks - 1;
    return s->run->shrunk && last && s->micro_batch == 1 ? 0 : most_tokens(s, l);
}

fp8_tensor shard_tensor(const struct shard_rank *s, const struct shard_layer *l,
                        enum shard_buffer buffer)
{
    const fp8_layer_info *i = &l->info;
    int64_t m = shard_tokens(s, l), n = i->out_features, k = i->in_features;
    int64_t bias = i->has_bias ? 1 : 0;
    const fp8_tensor shapes[SHARD_BUFFERS] = {
        [SHARD_W] = { NULL, n, k, k, i->w_dtype, 0 },
        [SHARD_W_ROWS] = { NULL, l->rows, k, k, i->w_dtype, 0 },
        [SHARD_BIAS] = { NULL, bias, n, n, i->bias_dtype, 0 },
        [SHARD_BIAS_ROWS] = { NULL, bias, l->rows, l->rows, i->bias_dtype, 0 },
        [SHARD_X] = { NULL, m, k, k, i->x_dtype, 0 },
        [SHARD_DY] = { NULL, m, n, n, i->dy_dtype, 0 },
        [SHARD_Y] = { NULL, m, n, n, i->y_dtype, 0 },
        [SHARD_DX] = { NULL, m, k, k, i->dx_dtype, 0 },
        [SHARD_DW_WHOLE] = { NULL, n, k, k, i->dw_dtype, 0 },
        [SHARD_DBIAS_WHOLE] = { NULL, bias, n, n, FP8_DTYPE_FP32, 0 },
        [SHARD_DW_ROWS] = { NULL, l->rows, k, k, l->rows_dtype, 0 },
        [SHARD_DBIAS_ROWS] = { NULL, bias, l->rows, l->rows, FP8_DTYPE_FP32, 0 },
        [SHARD_REF_Y] = { NULL, m, n, n, i->y_dtype, 0 },
        [SHARD_REF_DX] = { NULL, m, k, k, i->dx_dtype, 0 },
        [SHARD_REF_DW] = { NULL, n, k, k, i->dw_dtype, 0 },
        [SHARD_REF_DBIAS] = { NULL, bias, n, n, FP8_DTYPE_FP32, 0 },
        [SHARD_REF_AMAX] = { NULL, 1, 1, 1, FP8_DTYPE_FP32, 0 },
    };
    fp8_tensor tensor = shapes[buffer];
    tensor.data = l->buffers[buffer].device;
    return tensor;
}

static int buffer_bytes(const struct shard_rank *s, const struct shard_layer *l,
                        enum shard_buffer buffer, size_t *bytes)
{
    static const struct {
        enum shard_buffer buffer;
        fp8_bytes which;
    } operands[] = { { SHARD_SAVED, FP8_BYTES_SAVED },
                     { SHARD_GRAD, FP8_BYTES_GRAD },
                     { SHARD_REF_WEIGHT, FP8_BYTES_WEIGHT },
                     { SHARD_REF_SAVED, FP8_BYTES_SAVED } };
    for (size_t i = 0; i < sizeof operands / sizeof operands[0]; i++) {
        if (operands[i].buffer != buffer)
            continue;
        fp8_status status = fp8_layer_bytes(l->layer, most_tokens(s, l), operands[i].which, bytes);
        return status ? failed(s, status, l, "sizes") : CLI_DONE;
    }
    fp8_tensor t = shard_tensor(s, l, buffer);
    bool unused = l->reduce_each && (buffer == SHARD_DW_WHOLE || buffer == SHARD_DBIAS_WHOLE);
    *bytes = unused ? 0 : (size_t)t.rows * (size_t)t.cols * fp8_dtype_bytes(t.dtype);
    return CLI_DONE;
}

/* ---- layers ---------------------------------------------------------------------------------- */

static int open_layer(struct shard_rank *s, const json_t *record, int index)
{
    struct shard_layer *l = &s->layers[index];
    const char *name = json_string_value(json_object_get(record, "name"));
    l->info.size = sizeof l->info;
    fp8_status status = fp8_layer_create(s->rank->bundle, name, &l->layer);
    if (!status)
        status = fp8_layer_describe(l->layer, &l->info);
    if (status)
        return cli_fp8_failed(status, "rank %d, layer '%s'", s->rank->rank, name);
    if (strcmp(l->info.recipe, "delayed") == 0) {
        const fp8_layer *layer = l->layer;
        status = fp8_state_create(&layer, 1, &l->state);
        if (status)
            return failed(s, status, l, "its state");
    }
    const json_t *shard = json_object_get(record, "shard");
    l->chunk = json_integer_value(json_object_get(shard, "rows"));
    int64_t n = l->info.out_features, first = s->rank->rank * l->chunk;
    l->first = first < n ? first : n;
    l->rows = n - l->first < l->chunk ? n - l->first : l->chunk;
    /* a GPU adds to fp32 what is fp32: its bundle has no kernel for other sums */
    l->reduce_each =
        index % 2 == 0 && (s->rank->device.is_host || l->info.dw_dtype == FP8_DTYPE_FP32);
    l->rows_dtype = l->reduce_each ? FP8_DTYPE_FP32 : l->info.dw_dtype;
    return CLI_DONE;
}

static int open_buffers(struct shard_rank *s, struct shard_layer *l)
{
    fp8_operand *operands[SHARD_BUFFERS] = { [SHARD_SAVED] = &l->saved,
                                             [SHARD_GRAD] = &l->grad,
                                             [SHARD_REF_WEIGHT] = &l->ref_weight,
                                             [SHARD_REF_SAVED] = &l->ref_saved };
    for (int b = 0; b < SHARD_BUFFERS; b++) {
        size_t bytes = 0;
        int code = buffer_bytes(s, l, b, &bytes);
        if (!code)
            code = cli_buffer_create(&s->rank->device, bytes, true, &l->buffers[b]);
        if (!code)
            code = cli_buffer_fill(&s->rank->device, &l->buffers[b], 0xff);
        if (code)
            return code;
        if (operands[b]) {
            *operands[b] = (fp8_operand)FP8_OPERAND_INIT;
            operands[b]->data = l->buffers[b].device;
            operands[b]->bytes = bytes;
        }
    }
    size_t sums = (size_t)l->rows * (size_t)(l->info.in_features + 1) + 1;
    l->exact = calloc(sums, sizeof *l->exact);
    l->sizes = calloc(sums, sizeof *l->sizes);
    if (l->exact && l->sizes)
        return CLI_DONE;
    cli_error("out of memory for the reference");
    return CLI_MACHINE;
}

static int open_workspace(struct shard_rank *s)
{
    size_t most = 0;
    for (int i = 0; i < s->count; i++) {
        const struct shard_layer *l = &s->layers[i];
        size_t bytes = 0;
        fp8_status status =
            fp8_layer_bytes(l->layer, most_tokens(s, l), FP8_BYTES_WORKSPACE, &bytes);
        if (status)
            return failed(s, status, l, "sizes");
        most = bytes > most ? bytes : most;
    }
    return cli_buffer_create(&s->rank->device, most, false, &s->workspace);
}

static int open_layers(struct shard_rank *s)
{
    size_t index;
    json_t *record;
    const json_t *records = json_object_get(s->run->manifest, "layers");
    int code = CLI_DONE;
    s->layers = calloc(json_array_size(records) + 1, sizeof *s->layers);
    if (!s->layers) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    json_array_foreach(records, index, record)
    {
        const char *name = json_string_value(json_object_get(record, "name"));
        if (code || (s->run->only && strcmp(s->run->only, name) != 0) || plan_is_bf16(record))
            continue;
        code = open_layer(s, record, s->count);
        s->count++;
        if (!code)
            code = open_buffers(s, &s->layers[s->count - 1]);
    }
    return code ? code : open_workspace(s);
}

/* ---- the model ------------------------------------------------------------------------------- */

/* Numbers of gather groups: a new one where the name changes. */
static uint32_t group_of(const struct shard_run *run, const char *layer, const char **before,
                         uint32_t *number)
{
    size_t index;
    json_t *record;
    const char *name = NULL;
    json_array_foreach(json_object_get(run->manifest, "layers"), index, record)
    {
        if (strcmp(json_string_value(json_object_get(record, "name")), layer) == 0)
            name = json_string_value(
                json_object_get(json_object_get(record, "shard"), "gather_group"));
    }
    if (name && (!*before || strcmp(name, *before) != 0))
        ++*number;
    *before = name;
    return name ? *number : 0;
}

/* The runtime's shards are the plan's. */
static fp8_status check_rows(struct shard_rank *s, int index)
{
    int64_t first = -1, count = -1;
    struct shard_layer *l = &s->layers[index];
    fp8_status status = fp8_model_rows(s->model, index, &first, &count);
    if (!status && (first != l->first || count != l->rows)) {
        cli_error("rank %d, layer '%s': the model has rows %lld + %lld of w, the plan %lld + %lld",
                  s->rank->rank, l->info.name, (long long)first, (long long)count,
                  (long long)l->first, (long long)l->rows);
        l->results[SHARD_W_WRONG] = 1;
    }
    return status;
}

static int open_model(struct shard_rank *s)
{
    const char *before = NULL;
    fp8_model_layer *layers = calloc((size_t)s->count + 1, sizeof *layers);
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    fp8_model_bytes bytes = { .size = sizeof bytes };
    uint32_t number = 0;
    if (!layers) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    for (int i = 0; i < s->count; i++) {
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = s->layers[i].layer;
        layers[i].group = group_of(s->run, s->layers[i].info.name, &before, &number);
    }
    options.layers = layers;
    options.layer_count = s->count;
    options.context = s->rank->device.context;
    options.comm = s->rank->comm;
    options.hash = json_string_value(json_object_get(s->run->manifest, "spec_hash"));
    fp8_status status = fp8_model_measure(&options, &bytes);
    if (!status)
        status = fp8_model_create(&options, &s->model);
    for (int i = 0; !status && i < s->count; i++)
        status = check_rows(s, i);
    s->pool_bytes = bytes.pool;
    free(layers);
    return status ? cli_fp8_failed(status, "rank %d: making the model", s->rank->rank) : CLI_DONE;
}

/* ---- data ------------------------------------------------------------------------------------ */

/* Fills a tensor with normal data of a seed of its own; whole tensors get the same on all ranks. */
static int fill(struct shard_rank *s, int index, enum shard_buffer buffer, double sigma)
{
    struct shard_layer *l = &s->layers[index];
    fp8_tensor t = shard_tensor(s, l, buffer);
    bool own = buffer == SHARD_X || buffer == SHARD_DY; /* of this rank and micro-batch */
    uint64_t stream = (uint64_t)buffer + 64 * (uint64_t)s->step;
    if (own)
        stream += 1024 * (uint64_t)(1 + s->micro_batch + SHARD_MICRO_BATCHES * s->rank->rank);
    int code = cli_device_synchronize(&s->rank->device);
    if (code)
        return code;
    uint64_t seed = cli_random_word(s->run->seed, 2, (uint64_t)index);
    double u = (double)(cli_random_word(seed, 9, stream) >> 11) * 0x1p-53;
    cli_random_fill(l->buffers[buffer].host, t.dtype, t.rows * t.cols, sigma * (0.8 + 0.4 * u),
                    seed, stream);
    return cli_buffer_upload(&s->rank->device, &l->buffers[buffer]);
}

/* This rank's rows of a tensor with all of them. */
static int take_rows(struct shard_rank *s, struct shard_layer *l, enum shard_buffer from,
                     enum shard_buffer to, int64_t row_elements)
{
    fp8_tensor t = shard_tensor(s, l, from);
    size_t row = (size_t)row_elements * fp8_dtype_bytes(t.dtype);
    if (l->buffers[to].bytes)
        memcpy(l->buffers[to].host, (char *)l->buffers[from].host + (size_t)l->first * row,
               l->buffers[to].bytes);
    return cli_buffer_upload(&s->rank->device, &l->buffers[to]);
}

/* New weights, the largest element in the last row: its shard is often short. */
static int fill_weights(struct shard_rank *s)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < s->count; i++) {
        struct shard_layer *l = &s->layers[i];
        int64_t k = l->info.in_features, last = l->info.out_features * k - 1;
        code = fill(s, i, SHARD_W, 1 / sqrt((double)k));
        if (!code)
            code = fill(s, i, SHARD_BIAS, 0.1);
        float largest = 9.5f / sqrtf((float)k);
        uint32_t bits;
        memcpy(&bits, &largest, sizeof bits);
        if (!code && l->info.w_dtype == FP8_DTYPE_FP32)
            ((float *)l->buffers[SHARD_W].host)[last] = largest;
        else if (!code)
            ((uint16_t *)l->buffers[SHARD_W].host)[last] = (uint16_t)(bits >> 16);
        if (!code)
            code = cli_buffer_upload(&s->rank->device, &l->buffers[SHARD_W]);
        if (!code)
            code = take_rows(s, l, SHARD_W, SHARD_W_ROWS, k);
        if (!code && l->info.has_bias)
            code = take_rows(s, l, SHARD_BIAS, SHARD_BIAS_ROWS, 1);
    }
    return code;
}

static int fill_batch(struct shard_rank *s)
{
    static const enum shard_buffer written[] = { SHARD_Y, SHARD_DX, SHARD_SAVED, SHARD_GRAD };
    int code = CLI_DONE;
    for (int i = 0; !code && i < s->count; i++) {
        code = fill(s, i, SHARD_X, 1.0);
        if (!code)
            code = fill(s, i, SHARD_DY, 0.001);
        for (int b = 0; !code && b < 4; b++)
            code = cli_buffer_fill(&s->rank->device, &s->layers[i].buffers[written[b]], 0xff);
    }
    return code ? code : cli_buffer_fill(&s->rank->device, &s->workspace, 0xff);
}

/* ---- a step ---------------------------------------------------------------------------------- */

static int update(struct shard_rank *s)
{
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    fp8_tensor *w = calloc(2 * (size_t)s->count + 1, sizeof *w), *bias = w + s->count;
    if (!w) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    for (int i = 0; i < s->count; i++) {
        w[i] = shard_tensor(s, &s->layers[i], SHARD_W_ROWS);
        bias[i] = shard_tensor(s, &s->layers[i], SHARD_BIAS_ROWS);
    }
    args.w = w;
    args.bias = bias;
    args.version = ++s->version;
    args.call = shard_call(s, NULL);
    fp8_status status = fp8_model_update(s->model, &args);
    if (!status)
        status = fp8_comm_wait(s->rank->comm, s->rank->device.stream);
    free(w);
    return status ? cli_fp8_failed(status, "rank %d: quantising the weights", s->rank->rank)
                  : CLI_DONE;
}

static int forward(struct shard_rank *s, int index)
{
    struct shard_layer *l = &s->layers[index];
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    fp8_tensor x = shard_tensor(s, l, SHARD_X), y = shard_tensor(s, l, SHARD_Y);
    args.x = &x;
    args.y = &y;
    args.saved = &l->saved;
    args.call = shard_call(s, l);
    fp8_status status = fp8_model_fprop(s->model, index, &args);
    return status ? failed(s, status, l, "fprop") : CLI_DONE;
}

static int backward(struct shard_rank *s, int index)
{
    struct shard_layer *l = &s->layers[index];
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    fp8_tensor dy = shard_tensor(s, l, SHARD_DY), dx = shard_tensor(s, l, SHARD_DX);
    fp8_tensor x = shard_tensor(s, l, SHARD_X), dw = shard_tensor(s, l, SHARD_DW_ROWS);
    fp8_tensor dbias = shard_tensor(s, l, SHARD_DBIAS_ROWS);
    fp8_tensor whole = shard_tensor(s, l, SHARD_DW_WHOLE);
    fp8_tensor whole_dbias = shard_tensor(s, l, SHARD_DBIAS_WHOLE);
    bool first = s->micro_batch == 0, last = s->micro_batch == SHARD_MICRO_BATCHES - 1;
    passes.dy = &dy;
    passes.x = l->saved.bytes ? NULL : &x; /* nothing of x is saved: wgrad reads it */
    passes.dx = &dx;
    passes.saved = &l->saved;
    passes.grad = &l->grad;
    passes.call = shard_call(s, l);
    args.backward = &passes;
    if (l->reduce_each) {
        args.accumulate = !first;
    } else {
        passes.dw = &whole;
        passes.dbias = l->info.has_bias ? &whole_dbias : NULL;
        passes.accumulate_dw = passes.accumulate_dbias = !first;
        args.reduce = last;
    }
    if (args.reduce) {
        args.dw = &dw;
        args.dbias = l->info.has_bias ? &dbias : NULL;
    }
    fp8_status status = fp8_model_backward(s->model, index, &args);
    return status ? failed(s, status, l, "backward") : CLI_DONE;
}

static int wait_all(struct shard_rank *s)
{
    fp8_status status = fp8_model_join(s->model, s->rank->device.stream);
    if (!status)
        status = fp8_comm_wait(s->rank->comm, s->rank->device.stream);
    return status ? cli_fp8_failed(status, "rank %d: waiting for the step", s->rank->rank)
                  : CLI_DONE;
}

static int run_batch(struct shard_rank *s)
{
    int code = fill_batch(s);
    for (int i = 0; !code && i < s->count; i++)
        code = forward(s, i);
    if (!code)
        code = wait_all(s);
    if (!code && s->micro_batch == 0)
        code = shard_check_weights(s);
    for (int i = s->count - 1; !code && i >= 0; i--)
        code = backward(s, i);
    if (!code)
        code = wait_all(s);
    return code ? code : shard_check_batch(s);
}

/* What the step saw makes the scales of the next. */
static int advance(struct shard_rank *s)
{
    fp8_status status = FP8_OK;
    for (int i = 0; !status && i < s->count; i++) {
        if (s->layers[i].state)
            status = fp8_model_advance(s->model, s->layers[i].state, s->rank->device.stream);
    }
    return status ? cli_fp8_failed(status, "rank %d: scales of the next step", s->rank->rank)
                  : CLI_DONE;
}

static int run_step(struct shard_rank *s)
{
    static const enum shard_buffer poisoned[] = { SHARD_DW_WHOLE, SHARD_DBIAS_WHOLE, SHARD_DW_ROWS,
                                                  SHARD_DBIAS_ROWS };
    int code = fill_weights(s);
    for (int i = 0; !code && i < s->count; i++) {
        struct shard_layer *l = &s->layers[i];
        size_t sums = (size_t)l->rows * (size_t)(l->info.in_features + 1);
        memset(l->exact, 0, sums * sizeof *l->exact);
        memset(l->sizes, 0, sums * sizeof *l->sizes);
        for (int b = 0; !code && b < 4; b++)
            code = cli_buffer_fill(&s->rank->device, &l->buffers[poisoned[b]], 0xff);
    }
    if (!code)
        code = update(s);
    for (s->micro_batch = 0; !code && s->micro_batch < SHARD_MICRO_BATCHES; s->micro_batch++) {
        if (s->rank->rank == 0)
            cli_progress("step %d of %d, micro-batch %d", s->step + 1, SHARD_STEPS,
                         s->micro_batch + 1);
        code = run_batch(s);
    }
    s->micro_batch = 0;
    if (!code)
        code = advance(s);
    return code ? code : shard_check_gradients(s);
}

static int collect(struct shard_rank *s)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < s->count; i++) {
        code = cli_rank_max(s->rank, s->layers[i].results, SHARD_RESULTS);
        if (!code && s->rank->rank == 0)
            shard_report_layer(s->run->report, s, &s->layers[i]);
    }
    return code;
}

static void close_layers(struct shard_rank *s)
{
    for (int i = 0; i < s->count; i++) {
        struct shard_layer *l = &s->layers[i];
        for (int b = 0; b < SHARD_BUFFERS; b++)
            cli_buffer_destroy(&s->rank->device, &l->buffers[b]);
        fp8_state_destroy(l->state);
        fp8_layer_destroy(l->layer);
        free(l->exact);
        free(l->sizes);
    }
    cli_buffer_destroy(&s->rank->device, &s->workspace);
    free(s->layers);
}

int shard_work(struct cli_rank *rank, void *user)
{
    struct shard_rank s = { .run = user, .rank = rank };
    int code = open_layers(&s);
    if (!code)
        code = open_model(&s);
    for (s.step = 0; !code && s.step < SHARD_STEPS; s.step++)
        code = run_step(&s);
    if (!code)
        code = collect(&s);
    fp8_model_destroy(s.model);
    close_layers(&s);
    return code;
}
