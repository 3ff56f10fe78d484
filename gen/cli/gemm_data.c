/*
 * gemm_data.c - the tensors of one shape in every buffer set, and one GEMM on them.
 *
 * Memory is taken once for the largest shape and used for all: the bf16 tensors are one run of
 * random normal numbers of which a shape takes as many as it needs, the operands are quantised
 * again for each shape, and every contender writes into the same outputs.
 */
#include <string.h>

#include "gen/cli/gemm.h"
#include "runtime/fp8_primitives.h"

static size_t round_up(int64_t value, int64_t step)
{
    return (size_t)((value + step - 1) / step * step);
}

static void grow(size_t *size, size_t wanted)
{
    if (*size < wanted)
        *size = wanted;
}

/* Scales and both copies, padded as fp8.h says, each part aligned. */
static size_t operand_bytes(int64_t rows, int64_t cols)
{
    return 1024 + round_up(rows, 16) * round_up(cols, 128) +
           round_up(cols, 16) * round_up(rows, 128);
}

void gemm_room_for(struct gemm_room *room, const struct gemm_layer *layer, int64_t m)
{
    int64_t n = layer->n, k = layer->k;
    grow(&room->x, (size_t)(m * k) * 2);
    grow(&room->w, (size_t)(n * k) * 2);
    grow(&room->dy, (size_t)(m * n) * 2);
    grow(&room->x_bytes, operand_bytes(m, k));
    grow(&room->w_bytes, operand_bytes(n, k));
    grow(&room->dy_bytes, operand_bytes(m, n));
    grow(&room->out, (size_t)(m * n) * fp8_dtype_bytes(layer->y));
    grow(&room->out, (size_t)(m * k) * fp8_dtype_bytes(layer->dx));
    grow(&room->out, (size_t)(n * k) * fp8_dtype_bytes(layer->dw));
}

int gemm_data_create(struct gemm_data *data, struct bench *bench, const struct gemm_room *room)
{
    memset(data, 0, sizeof *data);
    data->bench = bench;
    int code = bench_buffers_create(bench, &data->x, room->x, 1, 1);
    if (!code)
        code = bench_buffers_create(bench, &data->w, room->w, 1, 2);
    if (!code)
        code = bench_buffers_create(bench, &data->dy, room->dy, 1, 3);
    if (!code)
        code = bench_buffers_create(bench, &data->x_bytes, room->x_bytes, 0, 0);
    if (!code)
        code = bench_buffers_create(bench, &data->w_bytes, room->w_bytes, 0, 0);
    if (!code)
        code = bench_buffers_create(bench, &data->dy_bytes, room->dy_bytes, 0, 0);
    if (!code)
        code = bench_buffers_create(bench, &data->out, room->out, 0, 0);
    return code;
}

void gemm_data_destroy(struct gemm_data *data)
{
    if (!data->bench)
        return;
    struct bench_buffers *buffers[] = { &data->x,       &data->w,        &data->dy, &data->x_bytes,
                                        &data->w_bytes, &data->dy_bytes, &data->out };
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        bench_buffers_destroy(data->bench, buffers[i]);
    cli_buffer_destroy(&data->bench->device, &data->workspace);
}

int gemm_data_reserve(struct gemm_data *data, const fp8_layer *layer)
{
    const struct cli_device *device = &data->bench->device;
    size_t bytes = 0;
    fp8_status status = fp8_layer_bytes(layer, data->m, FP8_BYTES_WORKSPACE, &bytes);
    if (status)
        return cli_fp8_failed(status, "size of the workspace");
    if (bytes <= data->workspace.bytes && data->workspace.device)
        return CLI_DONE;
    int code = cli_device_synchronize(device);
    cli_buffer_destroy(device, &data->workspace);
    return code ? code : cli_buffer_create(device, bytes, false, &data->workspace);
}

static fp8_call call_of(const struct gemm_data *data)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = data->workspace.device;
    call.workspace_bytes = data->workspace.bytes;
    call.stream = data->bench->device.stream;
    return call;
}

static int quantize(struct gemm_data *data, const fp8_layer *by, fp8_role role, int set)
{
    int64_t m = data->m, n = data->layer->n, k = data->layer->k;
    const struct bench_buffers *from = role == FP8_ROLE_X   ? &data->x
                                       : role == FP8_ROLE_W ? &data->w
                                                            : &data->dy;
    const struct bench_buffers *to = role == FP8_ROLE_X   ? &data->x_bytes
                                     : role == FP8_ROLE_W ? &data->w_bytes
                                                          : &data->dy_bytes;
    fp8_operand *operand = role == FP8_ROLE_X   ? &data->x_operand[set]
                           : role == FP8_ROLE_W ? &data->w_operand[set]
                                                : &data->dy_operand[set];
    int64_t cols = role == FP8_ROLE_DY ? n : k;
    fp8_tensor source = {
        from->set[set].device, role == FP8_ROLE_W ? n : m, cols, cols, FP8_DTYPE_BF16, 0
    };
    *operand = (fp8_operand)FP8_OPERAND_INIT;
    operand->data = to->set[set].device;
    operand->bytes = to->set[set].bytes;
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = role;
    args.source = &source;
    args.operand = operand;
    args.call = call_of(data);
    fp8_status status = fp8_quantize(by, &args);
    return status ? cli_fp8_failed(status, "quantising the operands") : CLI_DONE;
}

int gemm_data_fill(struct gemm_data *data, const struct gemm_layer *layer, int64_t m,
                   const fp8_layer *by)
{
    data->layer = layer;
    data->m = m;
    int code = gemm_data_reserve(data, by);
    for (int set = 0; !code && set < BENCH_SETS; set++) {
        code = quantize(data, by, FP8_ROLE_X, set);
        if (!code)
            code = quantize(data, by, FP8_ROLE_W, set);
        if (!code)
            code = quantize(data, by, FP8_ROLE_DY, set);
        if (!code) /* sums start from zero, not from what another shape left there */
            code = cli_buffer_fill(&data->bench->device, &data->out.set[set], 0);
    }
    return code ? code : cli_device_synchronize(&data->bench->device);
}

/* ---- one GEMM -------------------------------------------------------------------------------- */

struct gemm_problem gemm_problem_of(struct gemm_data *data, fp8_pass pass, bool split,
                                    bool accumulate)
{
    int64_t m = data->m, n = data->layer->n, k = data->layer->k;
    struct gemm_problem p = {
        .data = data, .pass = pass, .split = split, .accumulate = accumulate
    };
    bool fprop = pass == FP8_PASS_FPROP, wgrad = pass == FP8_PASS_WGRAD;
    p.rows = wgrad ? n : m;
    p.cols = fprop ? n : k;
    p.depth = fprop ? k : wgrad ? m : n;
    p.out = fprop ? data->layer->y : wgrad ? data->layer->dw : data->layer->dx;
    p.a = gemm_operand(&p, false, 0)->dtype;
    p.b = gemm_operand(&p, true, 0)->dtype;
    return p;
}

const fp8_operand *gemm_operand(const struct gemm_problem *p, bool second, int set)
{
    const struct gemm_data *d = p->data;
    if (!second)
        return p->pass == FP8_PASS_FPROP ? &d->x_operand[set] : &d->dy_operand[set];
    return p->pass == FP8_PASS_WGRAD ? &d->x_operand[set] : &d->w_operand[set];
}

/* A matrix of set after set: the operand's copy along the contraction, or the bf16 tensor. */
static struct baseline_matrix operand_matrix(const struct gemm_problem *p, bool second)
{
    /* row copies serve fprop and dgrad's dy; transposed ones the rest */
    bool transposed = p->pass == FP8_PASS_WGRAD || (p->pass == FP8_PASS_DGRAD && second);
    struct baseline_matrix m = { .dtype = gemm_operand(p, second, 0)->dtype };
    for (int set = 0; set < BENCH_SETS; set++) {
        fp8_operand_view view;
        if (fp8_operand_parts(gemm_operand(p, second, set), &view) != FP8_OK)
            continue;
        m.data[set] = transposed ? view.transposed : view.row;
        m.ld = transposed ? view.transposed_ld : view.row_ld;
        m.scale_inv[set] = view.scales + 4;
    }
    return m;
}

static struct baseline_matrix tensor_matrix(const struct bench_buffers *buffers, fp8_dtype dtype,
                                            int64_t ld, bool across)
{
    struct baseline_matrix m = { .dtype = dtype, .ld = ld, .across = across };
    for (int set = 0; set < BENCH_SETS; set++)
        m.data[set] = buffers->set[set].device;
    return m;
}

struct baseline_gemm_shape gemm_baseline_shape(const struct gemm_problem *p, bool fp8)
{
    const struct gemm_data *d = p->data;
    const fp8_dtype type = FP8_DTYPE_BF16;
    int64_t n = d->layer->n, k = d->layer->k;
    struct baseline_gemm_shape s = { .rows = p->rows,
                                     .cols = p->cols,
                                     .depth = p->depth,
                                     .fast_accumulation = !p->split,
                                     .accumulate = p->accumulate,
                                     .out = tensor_matrix(&d->out, p->out, p->cols, false) };
    if (fp8) {
        s.depth = (int64_t)round_up(p->depth, 16); /* the zeros of the pad take part */
        s.a = operand_matrix(p, false);
        s.b = operand_matrix(p, true);
    } else if (p->pass == FP8_PASS_FPROP) {
        s.a = tensor_matrix(&d->x, type, k, false);
        s.b = tensor_matrix(&d->w, type, k, false);
    } else if (p->pass == FP8_PASS_WGRAD) {
        s.a = tensor_matrix(&d->dy, type, n, true);
        s.b = tensor_matrix(&d->x, type, k, true);
    } else {
        s.a = tensor_matrix(&d->dy, type, n, false);
        s.b = tensor_matrix(&d->w, type, k, true);
    }
    return s;
}

fp8_status gemm_run(const struct gemm_problem *p, const fp8_layer *layer, int set)
{
    fp8_tensor out = { p->data->out.set[set].device, p->rows, p->cols, p->cols, p->out, 0 };
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = p->pass;
    args.accumulate = p->accumulate;
    args.a = gemm_operand(p, false, set);
    args.b = gemm_operand(p, true, set);
    args.out = &out;
    args.call = call_of(p->data);
    return fp8_gemm(layer, &args);
}
