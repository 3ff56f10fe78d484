/*
 * bench_shard_step.c - the case "step" of `fp8gen bench shard`: a training step over sharded
 * weights.
 *
 * Some blocks of the same layers, forward and backward in reverse, every layer with a weight, a
 * saved operand and a gradient shard of its own; x, y, dy and dx are shared by layers of one shape.
 * Contenders, in turns: the model object with FP8 gathers ahead and reduce-scatters behind, and the
 * same passes with the whole quantised weights resident and nothing between ranks. Each also with
 * the quantisation of new weights, as after an optimizer step: shards and one all-reduce, or whole
 * weights.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/bench_shard.h"
#include "gen/cli/random.h"

enum step_buffer { STEP_W, STEP_X, STEP_DY, STEP_Y, STEP_DX, STEP_DW, STEP_BUFFERS };

/* A layer of the block: what its repeats share. */
struct step_shape {
    fp8_layer *layer;
    fp8_layer_info info;
    struct cli_buffer buffers[STEP_BUFFERS];
    int64_t first, rows; /* of w here */
};

/* A layer of the model. */
struct step_layer {
    struct step_shape *shape;
    struct cli_buffer weight_memory, saved_memory, dw_rows;
    fp8_operand weight, saved;
};

struct step {
    struct shard_bench_rank *r;
    struct step_shape shapes[BENCH_MAX_SHAPES];
    struct step_layer *layers;
    int shape_count, count;
    struct cli_buffer grad_memory, workspace;
    fp8_operand grad;
    fp8_model *model;
    uint64_t version;
    size_t pool_bytes;
};

static int failed(const struct step *s, fp8_status status, const char *what)
{
    return cli_fp8_failed(status, "rank %d, %s", s->r->rank->rank, what);
}

static fp8_call call_of(const struct step *s)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = s->workspace.device;
    call.workspace_bytes = s->workspace.bytes;
    call.stream = s->r->rank->device.stream;
    return call;
}

static fp8_tensor tensor_of(const struct step_shape *shape, enum step_buffer buffer)
{
    const fp8_layer_info *i = &shape->info;
    int64_t m = i->tokens, n = i->out_features, k = i->in_features;
    const fp8_tensor tensors[STEP_BUFFERS] = {
        [STEP_W] = { NULL, n, k, k, i->w_dtype, 0 },
        [STEP_X] = { NULL, m, k, k, i->x_dtype, 0 },
        [STEP_DY] = { NULL, m, n, n, i->dy_dtype, 0 },
        [STEP_Y] = { NULL, m, n, n, i->y_dtype, 0 },
        [STEP_DX] = { NULL, m, k, k, i->dx_dtype, 0 },
        [STEP_DW] = { NULL, n, k, k, i->dw_dtype, 0 },
    };
    fp8_tensor tensor = tensors[buffer];
    tensor.data = shape->buffers[buffer].device;
    return tensor;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int open_shape(struct step *s, int index)
{
    static const double sigmas[STEP_BUFFERS] = { [STEP_X] = 1, [STEP_DY] = 0.001 };
    struct step_shape *shape = &s->shapes[index];
    const struct cli_device *device = &s->r->rank->device;
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.rank = s->r->rank->rank;
    sharding.ranks = s->r->rank->ranks;
    shape->info.size = sizeof shape->info;
    fp8_status status =
        fp8_layer_create(s->r->rank->bundle, s->r->bench->rows.shapes[index].name, &shape->layer);
    if (!status)
        status = fp8_layer_describe(shape->layer, &shape->info);
    if (!status)
        status = fp8_shard_range(shape->layer, &sharding, &shape->first, &shape->rows, NULL);
    int code = status ? failed(s, status, "opening a layer") : CLI_DONE;
    for (int b = 0; !code && b < STEP_BUFFERS; b++) {
        fp8_tensor t = tensor_of(shape, b);
        double sigma = b == STEP_W ? 1 / sqrt((double)shape->info.in_features) : sigmas[b];
        struct cli_buffer *buffer = &shape->buffers[b];
        size_t bytes = (size_t)t.rows * (size_t)t.cols * fp8_dtype_bytes(t.dtype);
        code = cli_buffer_create(device, bytes, sigma > 0, buffer);
        if (code || sigma <= 0)
            continue;
        cli_random_fill(buffer->host, t.dtype, t.rows * t.cols, sigma, (uint64_t)index,
                        (uint64_t)b + (b == STEP_W ? 0 : 16 * (uint64_t)(1 + s->r->rank->rank)));
        code = cli_buffer_upload(device, buffer);
        if (!code)
            code = cli_device_synchronize(device);
    }
    return code;
}

static int open_operand(struct step *s, const struct step_shape *shape, fp8_bytes which,
                        struct cli_buffer *memory, fp8_operand *operand)
{
    size_t bytes = 0;
    fp8_status status = fp8_layer_bytes(shape->layer, shape->info.tokens, which, &bytes);
    if (status)
        return failed(s, status, "sizes");
    int code = cli_buffer_create(&s->r->rank->device, bytes, false, memory);
    if (operand) {
        *operand = (fp8_operand)FP8_OPERAND_INIT;
        operand->data = memory->device;
        operand->bytes = bytes;
    }
    return code;
}

/* Scratch that fits every layer: of the one that needs most. */
static int open_scratch(struct step *s)
{
    int most[2] = { 0, 0 }, code = CLI_DONE;
    static const fp8_bytes which[2] = { FP8_BYTES_GRAD, FP8_BYTES_WORKSPACE };
    for (int w = 0; w < 2; w++) {
        size_t largest = 0;
        for (int i = 0; i < s->shape_count; i++) {
            size_t bytes = 0;
            const struct step_shape *shape = &s->shapes[i];
            fp8_status status = fp8_layer_bytes(shape->layer, shape->info.tokens, which[w], &bytes);
            if (status)
                return failed(s, status, "sizes");
            if (bytes > largest) {
                largest = bytes;
                most[w] = i;
            }
        }
    }
    code = open_operand(s, &s->shapes[most[0]], which[0], &s->grad_memory, &s->grad);
    return code ? code : open_operand(s, &s->shapes[most[1]], which[1], &s->workspace, NULL);
}

static int open_layers(struct step *s)
{
    int code = CLI_DONE;
    s->shape_count = s->r->bench->shape_count;
    s->count = s->shape_count * (int)s->r->bench->values->blocks;
    s->layers = calloc((size_t)s->count, sizeof *s->layers);
    if (!s->layers) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    for (int i = 0; !code && i < s->shape_count; i++)
        code = open_shape(s, i);
    for (int i = 0; !code && i < s->count; i++) {
        struct step_layer *l = &s->layers[i];
        l->shape = &s->shapes[i % s->shape_count];
        size_t row = (size_t)l->shape->info.in_features * fp8_dtype_bytes(l->shape->info.dw_dtype);
        code = open_operand(s, l->shape, FP8_BYTES_WEIGHT, &l->weight_memory, &l->weight);
        if (!code)
            code = open_operand(s, l->shape, FP8_BYTES_SAVED, &l->saved_memory, &l->saved);
        if (!code)
            code = cli_buffer_create(&s->r->rank->device, (size_t)l->shape->rows * row, false,
                                     &l->dw_rows);
    }
    return code ? code : open_scratch(s);
}

static fp8_model_reduce reduce_of(const char *word)
{
    return !word || strcmp(word, "auto") == 0 ? FP8_REDUCE_AUTO
           : strcmp(word, "collective") == 0  ? FP8_REDUCE_COLLECTIVE
                                              : FP8_REDUCE_EXCHANGE;
}

static int open_model(struct step *s)
{
    fp8_model_layer *layers = calloc((size_t)s->count, sizeof *layers);
    fp8_model_options wanted = FP8_MODEL_OPTIONS_INIT;
    fp8_model_bytes bytes = { .size = sizeof bytes };
    if (!layers) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    for (int i = 0; i < s->count; i++) {
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = s->layers[i].shape->layer;
    }
    wanted.layers = layers;
    wanted.layer_count = s->count;
    wanted.context = s->r->rank->device.context;
    wanted.comm = s->r->comm;
    wanted.grads = FP8_GRADS_AVERAGE;
    wanted.reduce_by = reduce_of(s->r->bench->values->reduce);
    wanted.transposed_shards = s->r->bench->values->transposed;
    wanted.slots = (int32_t)s->r->bench->values->slots;
    wanted.comm_sms = (int32_t)s->r->bench->values->comm_sms;
    fp8_status status = fp8_model_measure(&wanted, &bytes);
    if (!status)
        status = fp8_model_create(&wanted, &s->model);
    s->pool_bytes = bytes.pool;
    free(layers);
    return status ? failed(s, status, "making the model") : CLI_DONE;
}

static void close_step(struct step *s)
{
    const struct cli_device *device = &s->r->rank->device;
    fp8_model_destroy(s->model);
    for (int i = 0; s->layers && i < s->count; i++) {
        cli_buffer_destroy(device, &s->layers[i].weight_memory);
        cli_buffer_destroy(device, &s->layers[i].saved_memory);
        cli_buffer_destroy(device, &s->layers[i].dw_rows);
    }
    for (int i = 0; i < s->shape_count; i++) {
        for (int b = 0; b < STEP_BUFFERS; b++)
            cli_buffer_destroy(device, &s->shapes[i].buffers[b]);
        fp8_layer_destroy(s->shapes[i].layer);
    }
    cli_buffer_destroy(device, &s->grad_memory);
    cli_buffer_destroy(device, &s->workspace);
    free(s->layers);
    free(s);
}

/* ---- the contenders -------------------------------------------------------------------------- */

static int update_alone(struct step *s)
{
    fp8_status status = FP8_OK;
    s->version++;
    for (int i = 0; !status && i < s->count; i++) {
        fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
        fp8_tensor w = tensor_of(s->layers[i].shape, STEP_W);
        args.w = &w;
        args.version = s->version;
        args.weight = &s->layers[i].weight;
        args.call = call_of(s);
        status = fp8_weight_update(s->layers[i].shape->layer, &args);
    }
    return status ? failed(s, status, "quantising the weights") : CLI_DONE;
}

static int update_model(struct step *s)
{
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    fp8_tensor *w = calloc((size_t)s->count, sizeof *w);
    if (!w) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    for (int i = 0; i < s->count; i++) {
        const struct step_shape *shape = s->layers[i].shape;
        w[i] = tensor_of(shape, STEP_W);
        w[i].rows = shape->rows;
        w[i].data = (char *)w[i].data + (size_t)shape->first * (size_t)shape->info.in_features *
                                            fp8_dtype_bytes(shape->info.w_dtype);
    }
    args.w = w;
    args.version = ++s->version;
    args.call = call_of(s);
    fp8_status status = fp8_model_update(s->model, &args);
    free(w);
    return status ? failed(s, status, "quantising the shards") : CLI_DONE;
}

static fp8_status forward(struct step *s, int index, bool sharded)
{
    struct step_layer *l = &s->layers[index];
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    fp8_tensor x = tensor_of(l->shape, STEP_X), y = tensor_of(l->shape, STEP_Y);
    args.x = &x;
    args.y = &y;
    args.saved = &l->saved;
    args.weight = sharded ? NULL : &l->weight;
    args.call = call_of(s);
    return sharded ? fp8_model_fprop(s->model, index, &args)
                   : fp8_layer_fprop(l->shape->layer, &args);
}

static fp8_status backward(struct step *s, int index, bool sharded)
{
    struct step_layer *l = &s->layers[index];
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    fp8_model_backward_args over = FP8_MODEL_BACKWARD_ARGS_INIT;
    fp8_tensor dy = tensor_of(l->shape, STEP_DY), dx = tensor_of(l->shape, STEP_DX);
    fp8_tensor dw = tensor_of(l->shape, STEP_DW), rows = dw;
    rows.rows = l->shape->rows;
    rows.data = l->dw_rows.device;
    args.dy = &dy;
    args.dx = &dx;
    args.saved = &l->saved;
    args.weight = sharded ? NULL : &l->weight;
    args.grad = &s->grad;
    args.dw = sharded ? NULL : &dw;
    args.call = call_of(s);
    over.backward = &args;
    over.dw = &rows;
    return sharded ? fp8_model_backward(s->model, index, &over)
                   : fp8_layer_backward(l->shape->layer, &args);
}

static int run_step(struct step *s, bool sharded)
{
    fp8_status status = FP8_OK;
    for (int i = 0; !status && i < s->count; i++)
        status = forward(s, i, sharded);
    for (int i = s->count - 1; !status && i >= 0; i--)
        status = backward(s, i, sharded);
    if (!status && sharded)
        status = fp8_model_join(s->model, s->r->rank->device.stream);
    return status ? failed(s, status, sharded ? "a sharded step" : "a step") : CLI_DONE;
}

static int run_alone(void *user)
{
    return run_step(user, false);
}

static int run_sharded(void *user)
{
    return run_step(user, true);
}

static int run_alone_updated(void *user)
{
    int code = update_alone(user);
    return code ? code : run_step(user, false);
}

static int run_sharded_updated(void *user)
{
    int code = update_model(user);
    return code ? code : run_step(user, true);
}

/* ---- results --------------------------------------------------------------------------------- */

static double predicted(const struct step *s, const char *name)
{
    const json_t *seconds = json_object_get(s->r->bench->predicted, name);
    return json_is_number(seconds) ? json_number_value(seconds) : NAN;
}

/* Whether gradients are exchanged and added, as the model decides it. */
static bool exchanges(const struct step *s)
{
    fp8_comm_info info = { .size = sizeof info };
    fp8_model_reduce wanted = reduce_of(s->r->bench->values->reduce);
    fp8_comm_describe(s->r->comm, &info);
    return wanted == FP8_REDUCE_EXCHANGE ||
           (wanted == FP8_REDUCE_AUTO && (info.is_copy_engine || !s->r->own_comms));
}

/* With the quantisation of the weights too, or without. */
static struct shard_bench_times times_of(const struct step *s, double alone, double sharded,
                                         bool updated)
{
    const double of_alone = predicted(s, "alone") + (updated ? predicted(s, "update_alone") : 0);
    const double of_step = predicted(s, exchanges(s) ? "step" : "by_collective") +
                           (updated ? predicted(s, "update") : 0);
    return (struct shard_bench_times){
        { sharded, alone }, { isnan(of_step) ? -1 : of_step, isnan(of_alone) ? -1 : of_alone }
    };
}

/* [[N, K], ...] of the layers of a block. */
static json_t *shapes_of(const struct step *s)
{
    json_t *list = json_array();
    for (int i = 0; i < s->shape_count; i++)
        json_array_append_new(list, json_pack("[I, I]", (json_int_t)s->shapes[i].info.out_features,
                                              (json_int_t)s->shapes[i].info.in_features));
    return list;
}

static void print_rows(struct step *s, const struct shard_bench_item *items)
{
    static const char *const names[] = { "step_fsdp", "step_fsdp_updated" };
    struct bench_shape shape = { s->shapes[0].info.tokens, 0, 0, "" };
    for (int i = 0; i < 2; i++) {
        double alone = items[2 * i].seconds, sharded = items[2 * i + 1].seconds;
        struct bench_result result = {
            .bench = "shard",
            .name = names[i],
            .pass = i == 0 ? "forward + backward" : "quantise w, forward + backward",
            .shape = &shape,
            .unit = "ms",
            .value = 1e3 * sharded,
            .baseline = 1e3 * alone,
            .baseline_name = "the same compute with no communication",
            .lower_is_better = true,
            .launches = -1,
        };
        json_t *more = json_pack(
            "{s:o, s:b, s:i, s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:I, s:s}", "shapes", shapes_of(s),
            "transposed_shards", (int)s->r->bench->values->transposed, "slots",
            (int)s->r->bench->values->slots, "reduce", exchanges(s) ? "exchange" : "collective",
            "comm_sms", (int)s->r->bench->values->comm_sms, "ranks", s->r->rank->ranks, "layers",
            s->count, "blocks", s->count / s->shape_count, "exposed_ms", 1e3 * (sharded - alone),
            "times_alone", alone > 0 ? sharded / alone : 0.0, "pool_bytes",
            (json_int_t)s->pool_bytes, "grad_weight", fp8_dtype_name(s->shapes[0].info.dw_dtype));
        struct shard_bench_times times = times_of(s, alone, sharded, i == 1);
        shard_bench_row(s->r, &result, &times, more);
    }
}

static int trace(struct step *s)
{
    struct shard_bench *bench = s->r->bench;
    int32_t count = SHARD_BENCH_SPANS;
    fp8_model_span *spans = bench->spans ? calloc(SHARD_BENCH_SPANS, sizeof *spans) : NULL;
    float together = 0;
    if (!bench->spans)
        return CLI_DONE;
    int code = spans ? cli_rank_max(s->r->rank, &together, 1) : CLI_MACHINE;
    fp8_status status = FP8_OK;
    for (int i = 0; !code && i < 2; i++) /* the traced step is one of many */
        code = run_sharded_updated(s);
    if (!code)
        status = fp8_model_trace(s->model, SHARD_BENCH_SPANS, s->r->rank->device.stream);
    if (!code && !status)
        code = run_sharded_updated(s);
    if (!code && !status)
        status = fp8_comm_wait(s->r->comm, s->r->rank->device.stream);
    if (!code && !status)
        status = fp8_model_spans(s->model, spans, &count);
    if (!code && !status)
        status = fp8_model_trace(s->model, 0, s->r->rank->device.stream);
    if (status)
        code = failed(s, status, "tracing a step");
    for (int i = 0; !code && i < count; i++) {
        struct shard_bench_span *place =
            &bench->spans[(size_t)s->r->rank->rank * SHARD_BENCH_SPANS + (size_t)i];
        place->span = spans[i];
        place->rank = s->r->rank->rank;
    }
    free(spans);
    return code;
}

int shard_bench_step(struct shard_bench_rank *r)
{
    struct step *s = calloc(1, sizeof *s);
    if (!s) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    s->r = r;
    int code = open_layers(s);
    if (!code)
        code = open_model(s);
    if (!code)
        code = update_alone(s);
    if (!code)
        code = update_model(s);
    struct shard_bench_item items[] = { { run_alone, s, 0 },
                                        { run_sharded, s, 0 },
                                        { run_alone_updated, s, 0 },
                                        { run_sharded_updated, s, 0 } };
    if (!code)
        code = shard_bench_measure(r, items, 4, 2);
    if (!code) {
        print_rows(s, items);
        code = trace(s);
    }
    close_step(s);
    return code;
}
