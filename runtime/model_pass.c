/*
 * model_pass.c - forward and backward of a model's layers: weights held, hooks called, gradients
 * reduced.
 *
 * In: the args of the layer's own passes, without a weight. Out: the same passes, and on the
 * model's stream the gathers ahead and the reduce-scatters behind. Backward is quantize_dy, wgrad,
 * the start of the reduce-scatter, dgrad, so that the sum over the ranks runs beside dgrad and the
 * layer before. The whole gradient lies in one of two buffers (or in the caller's accumulator) and
 * is reduced in place, or sent in parts whose sum is taken here; rows that exist on no rank are
 * reduced too and never looked at.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/host.h"
#include "runtime/model.h"

static fp8_status call_tensor_hook(const fp8_model *model, int32_t layer, fp8_pass pass,
                                   fp8_tensor *tensor, fp8_stream stream)
{
    const struct fp8_model_weight *weight = &model->weights[layer];
    const bool is_output = pass == FP8_PASS_FPROP;
    fp8_tensor_hook hook = is_output ? weight->hooks.output : weight->hooks.grad_output;
    if (!hook)
        return FP8_OK;
    fp8_hook_request request = fp8_model_request(model, layer, pass, tensor->dtype, stream);
    return fp8_model_hooked(&request, is_output ? "output" : "grad_output",
                            hook(weight->hooks.user, &request, tensor));
}

/* ---- fprop ---- */

static fp8_status run_fprop(fp8_model *model, int32_t layer, const fp8_fprop_args *args)
{
    fp8_fprop_args own = *args;
    fp8_tensor bias;
    FP8_TRY(fp8_model_hold(model, layer, FP8_PASS_FPROP, &args->call, &own.weight, &own.w));
    fp8_status status = fp8_model_prefetch(model, layer, FP8_PASS_FPROP);
    if (status == FP8_OK)
        status = fp8_model_bias(model, layer, &args->call, &bias, &own.bias);
    if (status == FP8_OK) {
        int span = fp8_model_begin(model, "fprop", layer, false, args->call.stream);
        status = fp8_layer_fprop(model->weights[layer].layer, &own);
        fp8_model_end(model, span, args->call.stream);
    }
    if (status == FP8_OK) {
        fp8_tensor y = *args->y;
        status = call_tensor_hook(model, layer, FP8_PASS_FPROP, &y, args->call.stream);
    }
    fp8_model_let_go(model, layer, args->call.stream);
    return status;
}

fp8_status fp8_model_fprop(fp8_model *model, int32_t layer, const fp8_fprop_args *args)
{
    const char *call = "model_fprop";
    fp8_status status = fp8_model_check(call, model, layer);
    if (status == FP8_OK && (!args || args->size != sizeof *args || args->weight))
        status = fp8_fail(FP8_ERR_ARGUMENT,
                          "%s: args is NULL, not of this library's size %zu, or has a weight; the "
                          "model gives it: pass NULL",
                          call, sizeof *args);
    if (status == FP8_OK)
        status = fp8_model_follow(call, model, args->call.stream);
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(model->context, &pushed)) == FP8_OK) {
        status = run_fprop(model, layer, args);
        fp8_context_leave(model->context, pushed);
    }
    return model ? fp8_report(model->context, status) : status;
}

/* ---- gradients ---- */

/* A backward under way: its args, and where its whole gradients lie. */
struct backward {
    fp8_model *model;
    int32_t layer;
    const fp8_model_backward_args *args;
    const fp8_backward_args *passes;
    struct fp8_model_weight *weight;
    struct fp8_model_grad *grad; /* NULL: nothing of the model's */
    fp8_tensor dw, dbias;        /* whole; data NULL: not wanted */
    fp8_tensor dy;
    bool is_reducing; /* a reduce-scatter runs beside dgrad */
};

static bool wants_dw(const struct backward *b)
{
    return b->passes->dw || b->args->dw || b->weight->hooks.grad;
}

static bool wants_dbias(const struct backward *b)
{
    return b->weight->plan->has_bias &&
           (b->passes->dbias || b->args->dbias || b->weight->hooks.grad);
}

/* Where wgrad and quantize_dy write: the caller's accumulators, else the next buffer. */
static fp8_status place_grads(struct backward *b)
{
    fp8_model *model = b->model;
    const int64_t n = b->weight->plan->out_features, k = b->weight->plan->in_features;
    bool own = (wants_dw(b) && !b->passes->dw) || (wants_dbias(b) && !b->passes->dbias) ||
               b->args->dw || b->args->dbias;
    if (own) {
        b->grad = &model->grads[model->next_grad];
        model->next_grad = (model->next_grad + 1) % FP8_MODEL_GRADS;
        FP8_TRY(fp8_mark_wait(model, &b->grad->free, b->passes->call.stream));
    }
    if (b->passes->dw)
        b->dw = *b->passes->dw;
    else if (wants_dw(b))
        b->dw = (fp8_tensor){ .data = b->grad->memory,
                              .rows = n,
                              .cols = k,
                              .ld = k,
                              .dtype = fp8_slot_dtype(b->weight->plan, FP8_SLOT_DW) };
    if (b->passes->dbias)
        b->dbias = *b->passes->dbias;
    else if (wants_dbias(b))
        b->dbias = (fp8_tensor){ .data = b->grad->memory + model->dbias_offset,
                                 .rows = 1,
                                 .cols = n,
                                 .ld = n,
                                 .dtype = FP8_DTYPE_FP32 };
    return FP8_OK;
}

/* What no pass needs as an operand may still have column sums, and is checked all the same. */
static fp8_status sum_dy(struct backward *b)
{
    const fp8_backward_args *passes = b->passes;
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.dy = &b->dy;
    args.grad = passes->grad;
    args.dbias = b->dbias.data ? &b->dbias : NULL;
    args.accumulate_dbias = passes->dbias ? passes->accumulate_dbias : 0;
    args.found_inf = passes->found_inf;
    args.call = passes->call;
    return fp8_layer_backward(b->weight->layer, &args);
}

static fp8_status quantize_dy(struct backward *b)
{
    const fp8_backward_args *passes = b->passes;
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.copies = (passes->dx ? (uint32_t)FP8_COPY_ROW : 0u) |
                  (b->dw.data ? (uint32_t)FP8_COPY_TRANSPOSED : 0u);
    args.copies &= fp8_operand_copies(b->weight->plan, FP8_ROLE_DY);
    if (!args.copies)
        return sum_dy(b);
    args.dy = &b->dy;
    args.saved = passes->saved;
    args.grad = passes->grad;
    args.dbias = b->dbias.data ? &b->dbias : NULL;
    args.accumulate_dbias = passes->dbias ? passes->accumulate_dbias : 0;
    args.found_inf = passes->found_inf;
    args.call = passes->call;
    int span = fp8_model_begin(b->model, "quantize_dy", b->layer, false, passes->call.stream);
    fp8_status status = fp8_layer_quantize_dy(b->weight->layer, &args);
    fp8_model_end(b->model, span, passes->call.stream);
    return status;
}

static fp8_status wgrad(struct backward *b)
{
    const fp8_backward_args *passes = b->passes;
    if (!b->dw.data)
        return FP8_OK;
    fp8_wgrad_args args = FP8_WGRAD_ARGS_INIT;
    args.accumulate = passes->dw ? passes->accumulate_dw : 0;
    args.saved = passes->saved;
    args.grad = passes->grad;
    args.dw = &b->dw;
    args.x = passes->x;
    if (!(fp8_operand_copies(b->weight->plan, FP8_ROLE_DY) & FP8_COPY_TRANSPOSED))
        args.dy = &b->dy;
    args.call = passes->call;
    int span = fp8_model_begin(b->model, "wgrad", b->layer, false, passes->call.stream);
    fp8_status status = fp8_layer_wgrad(b->weight->layer, &args);
    fp8_model_end(b->model, span, passes->call.stream);
    return status;
}

static fp8_status dgrad(struct backward *b)
{
    const fp8_backward_args *passes = b->passes;
    if (!passes->dx)
        return FP8_OK;
    fp8_dgrad_args args = FP8_DGRAD_ARGS_INIT;
    args.stale_ok = passes->stale_ok;
    args.grad = passes->grad;
    args.dx = passes->dx;
    args.call = passes->call;
    if (b->is_reducing && b->model->comm_sms > 0) {
        const int32_t sms = fp8_sms_of_call(b->model->context, passes->call.max_sms);
        args.call.max_sms = (int32_t)fp8_max_i64(1, sms - b->model->comm_sms);
    }
    args.dy = b->weight->plan->is_bf16 ? &b->dy : NULL;
    FP8_TRY(
        fp8_model_hold(b->model, b->layer, FP8_PASS_DGRAD, &passes->call, &args.weight, &args.w));
    int span = fp8_model_begin(b->model, "dgrad", b->layer, false, passes->call.stream);
    fp8_status status = fp8_layer_dgrad(b->weight->layer, &args);
    fp8_model_end(b->model, span, passes->call.stream);
    fp8_model_let_go(b->model, b->layer, passes->call.stream);
    return status;
}

/* ---- the grad hook ---- */

static fp8_status call_grad_hook(struct backward *b, fp8_pass pass, const fp8_tensor *grad)
{
    fp8_event *done = NULL;
    const fp8_hooks *hooks = &b->weight->hooks;
    const fp8_stream stream = b->passes->call.stream;
    if (!grad->data)
        return FP8_OK;
    fp8_hook_request request = fp8_model_request(b->model, b->layer, pass, grad->dtype, stream);
    request.is_bias = pass == FP8_PASS_QUANTIZE_DY;
    FP8_TRY(fp8_model_hooked(&request, "grad", hooks->grad(hooks->user, &request, grad, &done)));
    if (!b->grad)
        return FP8_OK;
    /* Free behind the hook's event and behind what it enqueued: both on our stream. */
    FP8_TRY(fp8_model_order(b->model, &b->model->caller, stream, b->model->stream));
    if (done)
        FP8_TRY(fp8_event_wait(done, b->model->stream));
    return fp8_mark_record(b->model, &b->grad->free, b->model->stream);
}

/* ---- reduce-scatter ---- */

/* A gradient that is to be summed: whole rows in, this rank's rows out. */
struct reduction {
    fp8_tensor whole;        /* [N, cols] */
    const fp8_tensor *shard; /* [count, cols] of the caller */
    uint8_t *memory;         /* ranks * chunk rows, in the buffer */
    size_t offset;           /* of it there */
    int64_t cols;
};

const struct fp8_kernel *fp8_model_sum(const fp8_layer *layer, fp8_dtype from, fp8_dtype to)
{
    const struct fp8_manifest *manifest = &layer->bundle->manifest;
    for (int i = 0; i < manifest->kernel_count; i++) {
        const struct fp8_kernel *kernel = &manifest->kernels[i];
        if (kernel->op == FP8_OP_SUM && kernel->semantics.source_dtype == from &&
            kernel->semantics.target_dtype == to)
            return kernel;
    }
    return NULL;
}

/* This rank's rows of `parts` sums, or parts of a sum, a chunk apart: to the caller's shard. */
static fp8_status sum(struct backward *b, const struct reduction *r, const uint8_t *source,
                      int64_t parts)
{
    const fp8_context *context = b->model->context;
    const bool is_dense = r->shard->rows <= 1 || r->shard->ld == r->shard->cols;
    const int64_t elements = r->shard->rows * r->shard->cols;
    fp8_value values[FP8_OP_MAX_ARGS] = { 0 };
    values[FP8_SUM_source].p = (void *)(uintptr_t)source;
    values[FP8_SUM_part_stride].i = b->weight->shard.chunk * r->cols;
    values[FP8_SUM_source_ld].i = r->shard->cols;
    values[FP8_SUM_parts].i = parts;
    values[FP8_SUM_target].p = r->shard->data;
    values[FP8_SUM_target_ld].i = is_dense ? elements : r->shard->ld;
    values[FP8_SUM_rows].i = is_dense ? 1 : r->shard->rows;
    values[FP8_SUM_cols].i = is_dense ? elements : r->shard->cols;
    values[FP8_SUM_average].i = parts > 1 && b->model->average;
    values[FP8_SUM_accumulate].i = b->args->accumulate;
    if (context->is_host) {
        const fp8_semantics how = { .source_dtype = r->whole.dtype,
                                    .target_dtype = r->shard->dtype };
        return fp8_host_run(context->pool, FP8_OP_SUM, &how, values);
    }
    return fp8_kernel_run(context, fp8_model_sum(b->weight->layer, r->whole.dtype, r->shard->dtype),
                          values, b->model->stream, context->sms);
}

/* The reduced rows from the buffer to the caller's shard, where they are not there already. */
static fp8_status deliver(struct backward *b, const struct reduction *r, const uint8_t *reduced)
{
    const int64_t element = (int64_t)fp8_dtype_bytes(r->whole.dtype);
    if (b->weight->shard.count == 0 || reduced == r->shard->data)
        return FP8_OK;
    if (b->args->accumulate || r->shard->dtype != r->whole.dtype)
        return sum(b, r, reduced, 1);
    const int64_t pitch = r->shard->rows > 1 ? r->shard->ld : r->shard->cols;
    return fp8_copy_2d(b->model->context, r->shard->data, pitch * element, reduced,
                       r->shard->cols * element, r->shard->cols * element, r->shard->rows,
                       b->model->stream);
}

/* The rows of all ranks in the buffer: they are there, or are copied there from the caller's. */
static fp8_status bring_together(struct backward *b, const struct reduction *r)
{
    const int64_t element = (int64_t)fp8_dtype_bytes(r->whole.dtype);
    if (r->whole.data == r->memory)
        return FP8_OK;
    const int64_t pitch = r->whole.rows > 1 ? r->whole.ld : r->whole.cols;
    return fp8_copy_2d(b->model->context, r->memory, r->whole.cols * element, r->whole.data,
                       pitch * element, r->whole.cols * element, r->whole.rows,
                       b->passes->call.stream);
}

/* Whether a sum of `share` elements can go straight into the caller's shard. */
static bool is_exact(const struct backward *b, const struct reduction *r, size_t share)
{
    const fp8_tensor *shard = r->shard;
    return !b->args->accumulate && shard->dtype == r->whole.dtype &&
           (shard->rows <= 1 || shard->ld == shard->cols) &&
           (size_t)(shard->rows * shard->cols) == share;
}

/* What is wanted, together in the buffer; returns how many. */
static fp8_status collect(struct backward *b, struct reduction all[2], size_t *count)
{
    const fp8_model *model = b->model;
    *count = 0;
    if (b->args->dw)
        all[(*count)++] = (struct reduction){ b->dw, b->args->dw, b->grad->memory, 0,
                                              b->weight->plan->in_features };
    if (b->args->dbias)
        all[(*count)++] =
            (struct reduction){ b->dbias, b->args->dbias, b->grad->memory + model->dbias_offset,
                                model->dbias_offset, 1 };
    for (size_t i = 0; i < *count; i++)
        FP8_TRY(bring_together(b, &all[i]));
    return FP8_OK;
}

static size_t share_of(const struct backward *b, const struct reduction *r)
{
    return (size_t)(b->weight->shard.chunk * r->cols);
}

/* Sums by the collective. */
static fp8_status reduce_scatter(struct backward *b, const struct reduction *all, size_t count,
                                 const char *label)
{
    fp8_model *model = b->model;
    fp8_reduce_part parts[2];
    for (size_t i = 0; i < count; i++) {
        const size_t share = share_of(b, &all[i]);
        uint8_t *recv =
            all[i].memory + (size_t)model->rank * share * fp8_dtype_bytes(all[i].whole.dtype);
        parts[i] = (fp8_reduce_part){ all[i].memory,
                                      is_exact(b, &all[i], share) ? all[i].shard->data : recv,
                                      share, all[i].whole.dtype, model->average };
    }
    int span = fp8_model_begin(model, "reduce_scatter", b->layer, true, model->stream);
    FP8_TRY(fp8_comm_reduce_scatter(model->comm, parts, count, label, model->stream));
    for (size_t i = 0; i < count; i++)
        FP8_TRY(deliver(b, &all[i], parts[i].recv));
    fp8_model_end(model, span, model->stream);
    return fp8_mark_record(model, &b->grad->free, model->stream);
}

/* Copies of every rank's part, and a sum of our own over what has arrived. No rank sends again into
 * a place before all have come to that exchange on their streams, which is behind their sums of the
 * one before. */
static fp8_status exchange(struct backward *b, const struct reduction *all, size_t count,
                           const char *label)
{
    fp8_model *model = b->model;
    fp8_exchange_part parts[2];
    for (size_t i = 0; i < count; i++)
        parts[i] =
            (fp8_exchange_part){ all[i].memory, b->grad->arrivals + all[i].offset,
                                 share_of(b, &all[i]) * fp8_dtype_bytes(all[i].whole.dtype) };
    FP8_TRY(fp8_mark_wait(model, &b->grad->summed, model->stream));
    int span = fp8_model_begin(model, "all_to_all", b->layer, true, model->stream);
    FP8_TRY(fp8_comm_all_to_all(model->comm, parts, count, label, model->stream));
    fp8_model_end(model, span, model->stream);
    FP8_TRY(fp8_mark_record(model, &b->grad->free, model->stream));
    FP8_TRY(fp8_model_order(model, &model->came, model->stream, model->sums));
    span = fp8_model_begin(model, "sum", b->layer, true, model->sums);
    for (size_t i = 0; i < count && b->weight->shard.count > 0; i++)
        FP8_TRY(sum(b, &all[i], parts[i].recv, model->ranks));
    fp8_model_end(model, span, model->sums);
    return fp8_mark_record(model, &b->grad->summed, model->sums);
}

static fp8_status reduce(struct backward *b)
{
    fp8_model *model = b->model;
    struct reduction all[2];
    size_t count;
    char label[FP8_COMM_LABEL];
    FP8_TRY(collect(b, all, &count));
    if (count == 0)
        return FP8_OK;
    snprintf(label, sizeof label, "dw of layer '%s' (wgrad)", b->weight->name);
    FP8_TRY(fp8_model_order(model, &model->caller, b->passes->call.stream, model->stream));
    b->is_reducing = !model->exchanges;
    return model->exchanges ? exchange(b, all, count, label) : reduce_scatter(b, all, count, label);
}

/* ---- backward ---- */

static fp8_status check_shard(const struct backward *b, const char *name, const fp8_tensor *shard,
                              bool is_bias)
{
    const struct fp8_check check = { .call = "model_backward", .plan = b->weight->plan };
    const int64_t count = b->weight->shard.count;
    const fp8_dtype whole = is_bias ? FP8_DTYPE_FP32 : fp8_slot_dtype(b->weight->plan, FP8_SLOT_DW);
    if (b->weight->is_hooked || !b->model->comm)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: %s of layer '%s' is given, but a hook has its weight, so there are no "
                        "shards; take the gradient in the grad hook or in backward->%s",
                        check.call, name, b->weight->name, name);
    if (is_bias && !b->weight->plan->has_bias)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: dbias is given, but layer '%s' has no bias",
                        check.call, b->weight->name);
    if (count == 0)
        return FP8_OK;
    fp8_dtype dtype = shard->dtype == FP8_DTYPE_FP32 ? FP8_DTYPE_FP32 : whole;
    FP8_TRY(fp8_check_matrix(&check, name, shard, is_bias ? 1 : count,
                             is_bias ? count : b->weight->plan->in_features, dtype));
    if (b->args->accumulate && dtype != FP8_DTYPE_FP32)
        return fp8_fail(
            FP8_ERR_DTYPE,
            "%s: accumulate is 1, but %s of layer '%s' is %s; sums over micro-batches are "
            "kept in fp32",
            check.call, name, b->weight->name, fp8_dtype_name(dtype));
    bool sums = b->model->exchanges || b->args->accumulate || dtype != whole;
    if (sums && !b->model->context->is_host && !fp8_model_sum(b->weight->layer, whole, dtype))
        return fp8_fail(
            FP8_ERR_UNSUPPORTED,
            "%s: the bundle has no kernel that sums %s in %s for %s of layer '%s'; build it from a "
            "spec with mesh = { fsdp = %d }",
            check.call, fp8_dtype_name(whole), fp8_dtype_name(dtype), name, b->weight->name,
            b->model->ranks);
    return FP8_OK;
}

static fp8_status check_backward(const struct backward *b)
{
    const char *call = "model_backward";
    const fp8_model_backward_args *args = b->args;
    const fp8_layer *layer = b->weight->layer;
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args->reserved, 0));
    FP8_TRY(fp8_check_args("model_backward, backward", layer, b->passes, sizeof *b->passes,
                           b->passes->reserved, 0));
    FP8_TRY(fp8_check_flag(call, "reduce", args->reduce));
    FP8_TRY(fp8_check_flag(call, "accumulate", args->accumulate));
    if (b->passes->weight)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: backward->weight is given; the model gives it: pass NULL", call);
    if (!b->passes->dy)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: backward->dy is NULL", call);
    if (!args->reduce && (args->dw || args->dbias))
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "%s: reduce is 0, but %s is given; accumulate into backward->dw and reduce "
                        "with the last micro-batch",
                        call, args->dw ? "dw" : "dbias");
    if (args->dw)
        FP8_TRY(check_shard(b, "dw", args->dw, false));
    if (args->dbias)
        FP8_TRY(check_shard(b, "dbias", args->dbias, true));
    return fp8_model_follow(call, b->model, b->passes->call.stream);
}

static fp8_status run_backward(struct backward *b)
{
    fp8_model *model = b->model;
    b->dy = *b->passes->dy;
    FP8_TRY(
        call_tensor_hook(model, b->layer, FP8_PASS_QUANTIZE_DY, &b->dy, b->passes->call.stream));
    if (b->passes->dx && !b->weight->is_hooked) {
        FP8_TRY(fp8_model_gather(model, b->layer, FP8_PASS_DGRAD));
        FP8_TRY(fp8_model_prefetch(model, b->layer, FP8_PASS_DGRAD));
    }
    FP8_TRY(place_grads(b));
    FP8_TRY(quantize_dy(b));
    FP8_TRY(wgrad(b));
    if (b->weight->hooks.grad) {
        FP8_TRY(call_grad_hook(b, FP8_PASS_QUANTIZE_DY, &b->dbias));
        FP8_TRY(call_grad_hook(b, FP8_PASS_WGRAD, &b->dw));
    } else if (b->args->reduce && model->comm) {
        FP8_TRY(reduce(b));
    }
    return dgrad(b);
}

fp8_status fp8_model_backward(fp8_model *model, int32_t layer, const fp8_model_backward_args *args)
{
    const char *call = "model_backward";
    fp8_status status = fp8_model_check(call, model, layer);
    if (status == FP8_OK && (!args || args->size != sizeof *args || args->reserved0 ||
                             !args->backward || args->backward->size != sizeof *args->backward))
        status =
            fp8_fail(FP8_ERR_ARGUMENT,
                     "%s: args or args->backward is NULL, or not of this library's sizes %zu and "
                     "%zu; start from FP8_MODEL_BACKWARD_ARGS_INIT",
                     call, sizeof *args, sizeof *args->backward);
    struct backward b = { .model = model, .layer = layer, .args = args };
    if (status == FP8_OK) {
        b.passes = args->backward;
        b.weight = &model->weights[layer];
        status = check_backward(&b);
    }
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(model->context, &pushed)) == FP8_OK) {
        status = run_backward(&b);
        fp8_context_leave(model->context, pushed);
    }
    return model ? fp8_report(model->context, status) : status;
}
