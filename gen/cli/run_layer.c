/*
 * run_layer.c - one layer of a bundle with its tensors on a device, and its passes.
 *
 * In: a bundle, a layer's name, the number of tokens and a seed. Out: x, w, bias and dy of seeded
 * normal data; y, dx, dw, dbias and the operands after the passes. Outputs, operands and workspace
 * are filled with 0xFF (NaN) before a pass that is checked, so that an element which a pass forgets
 * shows. It judges nothing (run_check.c does).
 */
#include <stdlib.h>
#include <string.h>

#include "gen/cli/run.h"
#include "runtime/fp8_primitives.h"

#define WARMUPS 3
#define REPEATS 9

static const char *const buffer_names[RUN_BUFFER_COUNT] = {
    "x",     "w",           "bias",  "dy",     "y",    "dx",       "dw",
    "dbias", "x quantised", "saved", "weight", "grad", "workspace"
};

static void describe_tensors(struct run_layer *run)
{
    const fp8_layer_info *i = &run->info;
    int64_t m = run->m, n = i->out_features, k = i->in_features;
    const fp8_tensor tensors[RUN_X_QUANTIZED] = {
        [RUN_X] = { NULL, m, k, k, i->x_dtype, 0 },
        [RUN_W] = { NULL, n, k, k, i->w_dtype, 0 },
        [RUN_BIAS] = { NULL, 1, i->has_bias ? n : 0, n, i->bias_dtype, 0 },
        [RUN_DY] = { NULL, m, n, n, i->dy_dtype, 0 },
        [RUN_Y] = { NULL, m, n, n, i->y_dtype, 0 },
        [RUN_DX] = { NULL, m, k, k, i->dx_dtype, 0 },
        [RUN_DW] = { NULL, n, k, k, i->dw_dtype, 0 },
        [RUN_DBIAS] = { NULL, 1, i->has_bias ? n : 0, n, FP8_DTYPE_FP32, 0 },
    };
    memcpy(run->tensors, tensors, sizeof tensors);
}

static int buffer_bytes(const struct run_layer *run, enum run_buffer buffer, size_t *bytes)
{
    static const fp8_bytes which[RUN_BUFFER_COUNT] = {
        [RUN_X_QUANTIZED] = FP8_BYTES_X,       [RUN_SAVED] = FP8_BYTES_SAVED,
        [RUN_WEIGHT] = FP8_BYTES_WEIGHT,       [RUN_GRAD] = FP8_BYTES_GRAD,
        [RUN_WORKSPACE] = FP8_BYTES_WORKSPACE,
    };
    if (buffer < RUN_X_QUANTIZED) {
        const fp8_tensor *t = &run->tensors[buffer];
        *bytes = (size_t)t->rows * (size_t)t->cols * fp8_dtype_bytes(t->dtype);
        return CLI_DONE;
    }
    fp8_status status = fp8_layer_bytes(run->layer, run->m, which[buffer], bytes);
    return status ? cli_fp8_failed(status, "%s: size of %s", run->info.name, buffer_names[buffer])
                  : CLI_DONE;
}

static int allocate(struct run_layer *run)
{
    fp8_operand *operands[RUN_BUFFER_COUNT] = {
        [RUN_X_QUANTIZED] = &run->x_quantized,
        [RUN_SAVED] = &run->saved,
        [RUN_WEIGHT] = &run->weight,
        [RUN_GRAD] = &run->grad,
    };
    for (int b = 0; b < RUN_BUFFER_COUNT; b++) {
        size_t bytes;
        struct cli_buffer *buffer = &run->buffers[b];
        int code = buffer_bytes(run, b, &bytes);
        if (!code)
            code = cli_buffer_create(run->device, bytes, b != RUN_WORKSPACE, buffer);
        if (!code && b == RUN_X_QUANTIZED) /* the others are filled before their pass */
            code = cli_buffer_fill(run->device, buffer, 0xff);
        if (code) {
            cli_note("layer '%s' with %lld tokens: no memory for %s (%zu bytes)", run->info.name,
                     (long long)run->m, buffer_names[b], bytes);
            return code;
        }
        if (b < RUN_X_QUANTIZED)
            run->tensors[b].data = buffer->device;
        else if (operands[b]) {
            *operands[b] = (fp8_operand)FP8_OPERAND_INIT;
            operands[b]->data = buffer->device;
            operands[b]->bytes = bytes;
        }
    }
    return CLI_DONE;
}

int run_layer_create(struct run_layer *run, const struct cli_device *device, fp8_bundle *bundle,
                     const char *name)
{
    run->device = device;
    fp8_status status = fp8_layer_create(bundle, name, &run->layer);
    if (status)
        return cli_fp8_failed(status, "layer '%s'", name);
    run->info.size = sizeof run->info;
    status = fp8_layer_describe(run->layer, &run->info);
    return status ? cli_fp8_failed(status, "layer '%s'", name) : CLI_DONE;
}

static fp8_call call_of(const struct run_layer *run)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = run->buffers[RUN_WORKSPACE].device;
    call.workspace_bytes = run->buffers[RUN_WORKSPACE].bytes;
    call.stream = run->device->stream;
    call.state = run->state;
    return call;
}

static fp8_status quantize(struct run_layer *run, fp8_role role, enum run_buffer source,
                           fp8_operand *operand)
{
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = role;
    args.source = &run->tensors[source];
    args.operand = operand;
    args.call = call_of(run);
    return fp8_quantize(run->layer, &args);
}

/* A step of delayed scaling: the amaxes of all three tensors, then their scales. */
static int make_history(struct run_layer *run)
{
    const fp8_layer *layers[] = { run->layer };
    fp8_status status = fp8_state_create(layers, 1, &run->state);
    if (!status)
        status = quantize(run, FP8_ROLE_X, RUN_X, &run->x_quantized);
    if (!status)
        status = quantize(run, FP8_ROLE_W, RUN_W, &run->weight);
    if (!status)
        status = quantize(run, FP8_ROLE_DY, RUN_DY, &run->grad);
    if (!status)
        status = fp8_state_advance(run->state, run->device->stream);
    return status ? cli_fp8_failed(status, "layer '%s', the step before", run->info.name)
                  : cli_device_synchronize(run->device);
}

int run_layer_fill(struct run_layer *run)
{
    describe_tensors(run);
    int code = allocate(run);
    if (!code)
        code = run_make_data(run);
    return code || !run->recipe.is_delayed ? code : make_history(run);
}

void run_layer_destroy(struct run_layer *run)
{
    for (int b = 0; b < RUN_BUFFER_COUNT; b++)
        cli_buffer_destroy(run->device, &run->buffers[b]);
    fp8_state_destroy(run->state);
    fp8_layer_destroy(run->layer);
    run->state = NULL;
    run->layer = NULL;
}

/* ---- passes ---------------------------------------------------------------------------------- */

static fp8_status run_weight(struct run_layer *run)
{
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &run->tensors[RUN_W];
    args.version = ++run->version;
    args.weight = &run->weight;
    args.call = call_of(run);
    return fp8_weight_update(run->layer, &args);
}

static fp8_status run_fprop(struct run_layer *run)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    bool bf16 = run->recipe.is_bf16;
    args.x = &run->tensors[RUN_X];
    args.w = bf16 ? &run->tensors[RUN_W] : NULL;
    args.weight = bf16 ? NULL : &run->weight;
    args.bias = run->info.has_bias ? &run->tensors[RUN_BIAS] : NULL;
    args.y = &run->tensors[RUN_Y];
    args.saved = bf16 ? NULL : &run->saved;
    args.call = call_of(run);
    return fp8_layer_fprop(run->layer, &args);
}

static fp8_status run_quantize_dy(struct run_layer *run)
{
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.dy = &run->tensors[RUN_DY];
    args.saved = run->recipe.is_bf16 ? NULL : &run->saved;
    args.grad = &run->grad;
    args.dbias = run->info.has_bias ? &run->tensors[RUN_DBIAS] : NULL;
    args.call = call_of(run);
    return fp8_layer_quantize_dy(run->layer, &args);
}

static fp8_status run_wgrad(struct run_layer *run, bool accumulate)
{
    fp8_wgrad_args args = FP8_WGRAD_ARGS_INIT;
    args.accumulate = accumulate;
    if (run->recipe.plain[FP8_PASS_WGRAD]) {
        args.x = &run->tensors[RUN_X];
        args.dy = &run->tensors[RUN_DY];
    }
    args.saved = run->recipe.is_bf16 ? NULL : &run->saved;
    args.grad = run->recipe.is_bf16 ? NULL : &run->grad;
    args.dw = &run->tensors[RUN_DW];
    args.call = call_of(run);
    return fp8_layer_wgrad(run->layer, &args);
}

static fp8_status run_dgrad(struct run_layer *run)
{
    fp8_dgrad_args args = FP8_DGRAD_ARGS_INIT;
    bool bf16 = run->recipe.is_bf16;
    args.dy = bf16 ? &run->tensors[RUN_DY] : NULL;
    args.w = bf16 ? &run->tensors[RUN_W] : NULL;
    args.grad = bf16 ? NULL : &run->grad;
    args.weight = bf16 ? NULL : &run->weight;
    args.dx = &run->tensors[RUN_DX];
    args.call = call_of(run);
    return fp8_layer_dgrad(run->layer, &args);
}

static fp8_status launch(struct run_layer *run, fp8_pass pass, bool accumulate)
{
    switch (pass) {
    case FP8_PASS_WEIGHT:
        return run_weight(run);
    case FP8_PASS_FPROP:
        return run_fprop(run);
    case FP8_PASS_QUANTIZE_DY:
        return run_quantize_dy(run);
    case FP8_PASS_WGRAD:
        return run_wgrad(run, accumulate);
    default:
        return run_dgrad(run);
    }
}

int run_pass(struct run_layer *run, fp8_pass pass, bool accumulate)
{
    fp8_status status = launch(run, pass, accumulate);
    return status ? cli_fp8_failed(status, "layer '%s', %s", run->info.name, fp8_pass_name(pass))
                  : cli_device_synchronize(run->device);
}

bool run_has_operand(const struct run_layer *run, enum run_buffer operand)
{
    /* an x without a transposed copy leaves nothing to save but its version */
    return !run->recipe.is_bf16 && !(operand == RUN_SAVED && run->recipe.plain[FP8_PASS_WGRAD]);
}

bool run_has_pass(const struct run_layer *run, fp8_pass pass)
{
    if (!run->recipe.is_bf16)
        return true;
    return pass != FP8_PASS_WEIGHT && (pass != FP8_PASS_QUANTIZE_DY || run->info.has_bias);
}

int run_all(struct run_layer *run, bool backward)
{
    static const fp8_pass passes[] = { FP8_PASS_WEIGHT, FP8_PASS_FPROP, FP8_PASS_QUANTIZE_DY,
                                       FP8_PASS_WGRAD, FP8_PASS_DGRAD };
    int code = run->recipe.is_bf16 ? CLI_DONE : run_quantize_x(run);
    for (int i = 0; !code && i < (backward ? 5 : 2); i++)
        code = run_has_pass(run, passes[i]) ? run_pass(run, passes[i], false) : CLI_DONE;
    for (int b = RUN_Y; !code && b < RUN_WORKSPACE; b++)
        code = run_download(run, b);
    return code;
}

static int poison(struct run_layer *run, fp8_pass pass, bool accumulate)
{
    static const enum run_buffer written[FP8_PASS_COUNT][2] = {
        [FP8_PASS_WEIGHT] = { RUN_WEIGHT, RUN_WEIGHT },
        [FP8_PASS_FPROP] = { RUN_Y, RUN_SAVED },
        [FP8_PASS_QUANTIZE_DY] = { RUN_GRAD, RUN_DBIAS },
        [FP8_PASS_WGRAD] = { RUN_DW, RUN_DW },
        [FP8_PASS_DGRAD] = { RUN_DX, RUN_DX },
    };
    int code = cli_buffer_fill(run->device, &run->buffers[RUN_WORKSPACE], 0xff);
    for (int i = 0; !code && i < 2 && !accumulate; i++)
        code = cli_buffer_fill(run->device, &run->buffers[written[pass][i]], 0xff);
    return code;
}

/* Enqueues all repeats before it waits for the first, so that the host's time is hidden. */
static fp8_status measure(struct run_layer *run, fp8_pass pass, bool accumulate, int repeats,
                          double *median)
{
    fp8_event *events[REPEATS][2] = { { NULL } };
    double seconds[REPEATS] = { 0 };
    fp8_status status = FP8_OK;
    for (int i = 0; !status && i < repeats; i++)
        for (int e = 0; !status && e < 2; e++)
            status = fp8_event_create(run->device->context, &events[i][e]);
    for (int i = 0; !status && i < repeats; i++) {
        status = fp8_event_record(events[i][0], run->device->stream);
        if (!status)
            status = launch(run, pass, accumulate);
        if (!status)
            status = fp8_event_record(events[i][1], run->device->stream);
    }
    for (int i = 0; !status && i < repeats; i++)
        status = fp8_event_seconds(events[i][0], events[i][1], &seconds[i]);
    for (int i = 0; i < repeats; i++)
        for (int e = 0; e < 2; e++)
            fp8_event_destroy(events[i][e]);
    *median = cli_median(seconds, repeats);
    return status;
}

int run_pass_timed(struct run_layer *run, fp8_pass pass, bool accumulate, double *seconds)
{
    fp8_status status = FP8_OK;
    if (run->device->is_host) { /* one run serves both: minutes are not spent on a median */
        int code = poison(run, pass, accumulate);
        status = code ? FP8_OK : measure(run, pass, accumulate, 1, seconds);
        return status
                   ? cli_fp8_failed(status, "layer '%s', %s", run->info.name, fp8_pass_name(pass))
                   : code;
    }
    for (int i = 0; !status && i < WARMUPS; i++)
        status = launch(run, pass, false);
    if (!status)
        status = measure(run, pass, accumulate, REPEATS, seconds);
    if (status)
        return cli_fp8_failed(status, "layer '%s', %s", run->info.name, fp8_pass_name(pass));
    int code = CLI_DONE;
    if (accumulate) /* the repeats added to dw: begin again with what it was */
        code = cli_buffer_upload(run->device, &run->buffers[RUN_DW]);
    if (!code)
        code = poison(run, pass, accumulate);
    return code ? code : run_pass(run, pass, accumulate);
}

int run_quantize_x(struct run_layer *run)
{
    fp8_status status = quantize(run, FP8_ROLE_X, RUN_X, &run->x_quantized);
    return status ? cli_fp8_failed(status, "layer '%s', quantising x", run->info.name)
                  : cli_device_synchronize(run->device);
}

/* ---- results --------------------------------------------------------------------------------- */

int run_download(const struct run_layer *run, enum run_buffer buffer)
{
    return cli_buffer_download(run->device, &run->buffers[buffer]);
}

fp8_tensor run_host_tensor(const struct run_layer *run, enum run_buffer buffer)
{
    fp8_tensor tensor = run->tensors[buffer];
    tensor.data = run->buffers[buffer].host;
    return tensor;
}

fp8_operand run_host_operand(const struct run_layer *run, enum run_buffer buffer)
{
    fp8_operand operand = buffer == RUN_X_QUANTIZED ? run->x_quantized
                          : buffer == RUN_SAVED     ? run->saved
                          : buffer == RUN_WEIGHT    ? run->weight
                                                    : run->grad;
    operand.data = run->buffers[buffer].host;
    return operand;
}
