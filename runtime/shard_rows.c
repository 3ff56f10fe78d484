/*
 * shard_rows.c - shards of weights whose rows have scales of their own: recipes rowwise and
 * rowwise_hp_wgrad.
 *
 * The row copy has a scale a row of w, which a shard of whole rows knows alone. The transposed copy
 * has a scale a column of w (or one for the tensor), over all ranks' rows: its amaxes are left to
 * be reduced. Neither copy can be made from the other, so a shard holds both: rows behind their
 * scales, then [K][rows] behind its scales, laid out like the head of an operand with the
 * transposed copy alone. Which of them is gathered depends on the pass. Shards with one scale a
 * tensor can hold both too, if the caller asks for it.
 */
#include "runtime/host.h"
#include "runtime/shard.h"

/* ---- shape ---- */

bool fp8_shard_has_rows(const struct fp8_layer_plan *plan)
{
    const fp8_scaling *scalings = plan->scalings[FP8_ROLE_W];
    return !plan->is_bf16 && scalings[FP8_ROW_COPY] == FP8_SCALING_ROW &&
           (scalings[FP8_TRANSPOSED_COPY] == FP8_SCALING_ROW ||
            scalings[FP8_TRANSPOSED_COPY] == FP8_SCALING_TENSOR);
}

static bool has_columns(const fp8_layer *layer)
{
    return layer->plan->scalings[FP8_ROLE_W][FP8_TRANSPOSED_COPY] == FP8_SCALING_ROW;
}

void fp8_shard_shape_turned(const fp8_layer *layer, struct fp8_shard_shape *shape)
{
    const int64_t k = layer->plan->in_features, rows = fp8_round_up(k, FP8_PAD_ROWS);
    size_t scales = 0;
    if (has_columns(layer))
        scales = fp8_align_up((size_t)fp8_round_up(k, FP8_PAD_ROW_SCALES) * sizeof(float),
                              FP8_PART_ALIGN);
    shape->amaxes = has_columns(layer) ? k : 1;
    shape->turned_ld = fp8_round_up(shape->chunk, FP8_PAD_LD);
    shape->turned_head = FP8_PART_ALIGN + scales;
    shape->turned_bytes =
        shape->turned_head + fp8_align_up((size_t)(rows * shape->turned_ld), FP8_PART_ALIGN);
}

/* ---- kernels ---- */

static const struct fp8_kernel *find_kernel(const fp8_layer *layer, enum fp8_op op)
{
    const struct fp8_pass_plan *pass = &layer->plan->passes[FP8_PASS_WEIGHT];
    for (int i = 0; i < pass->step_count; i++) {
        if (pass->steps[i].op == op)
            return pass->steps[i].kernel;
    }
    return NULL;
}

static fp8_status run(const fp8_layer *layer, const struct fp8_kernel *kernel,
                      const fp8_value *values, const fp8_call *call)
{
    return fp8_kernel_run(layer->context, kernel, values, call->stream,
                          fp8_sms_of_call(layer->context, call->max_sms));
}

static fp8_status column_maxima(const fp8_layer *layer, const fp8_value *values,
                                const fp8_call *call)
{
    const struct fp8_manifest *manifest = &layer->bundle->manifest;
    if (layer->context->is_host)
        return fp8_host_run(layer->context->pool, FP8_OP_COLUMN_MAXIMA, NULL, values);
    for (int i = 0; i < manifest->kernel_count; i++) {
        if (manifest->kernels[i].op == FP8_OP_COLUMN_MAXIMA)
            return run(layer, &manifest->kernels[i], values, call);
    }
    return fp8_fail(FP8_ERR_UNSUPPORTED,
                    "the bundle of layer '%s' was built for one rank, so it has no kernel for the "
                    "amaxes of a shard's columns; build it from a spec with mesh = { fsdp = F }",
                    layer->plan->name);
}

/* The source of an op: its first four arguments, which are alike in all that quantise. */
static void set_source(const fp8_shard_args *args, fp8_value *values)
{
    enum { SOURCE, LD, ROWS, COLS };
    values[SOURCE].p = args->source->data;
    values[LD].i = args->source->rows > 1 ? args->source->ld : args->source->cols;
    values[ROWS].i = args->source->rows;
    values[COLS].i = args->source->cols;
}
_Static_assert((int)FP8_QUANTIZE_ROW_source == 0 && (int)FP8_QUANTIZE_LINES_source == 0 &&
                   (int)FP8_LINE_AMAX_source == 0 && (int)FP8_QUANTIZE_source == 0 &&
                   (int)FP8_AMAX_source == 0 && (int)FP8_QUANTIZE_ROW_cols == 3 &&
                   (int)FP8_QUANTIZE_LINES_cols == 3 && (int)FP8_LINE_AMAX_cols == 3 &&
                   (int)FP8_QUANTIZE_cols == 3 && (int)FP8_AMAX_cols == 3,
               "the source comes first");

/* Scratch in the workspace, which holds the partial maxima of the whole w. */
static float *partials_of(const fp8_shard_args *args)
{
    return (float *)fp8_align_up((uintptr_t)args->call.workspace, FP8_PART_ALIGN);
}

static int64_t partials_ld(const fp8_layer *layer)
{
    return fp8_round_up(layer->plan->in_features, FP8_PAD_LD);
}

/* ---- amaxes ---- */

enum { PARTIALS = 1024 }; /* of the op amax: one a CTA, and that many at most */

fp8_status fp8_shard_amax_rows(const fp8_layer *layer, const fp8_shard_args *args)
{
    float *partials = partials_of(args);
    fp8_value of[FP8_OP_MAX_ARGS] = { 0 }, most[FP8_OP_MAX_ARGS] = { 0 };
    const struct fp8_kernel *kernel;
    most[FP8_COLUMN_MAXIMA_partials].p = partials;
    most[FP8_COLUMN_MAXIMA_maxima].p = args->amax;
    set_source(args, of);
    if (has_columns(layer)) {
        kernel = find_kernel(layer, FP8_OP_LINE_AMAX);
        of[FP8_LINE_AMAX_column_partials].p = partials;
        of[FP8_LINE_AMAX_column_partials_ld].i = partials_ld(layer);
        of[FP8_LINE_AMAX_found_inf].p = args->found_inf;
        most[FP8_COLUMN_MAXIMA_partials_ld].i = partials_ld(layer);
        most[FP8_COLUMN_MAXIMA_partial_rows].i = fp8_ceil_div(args->count, FP8_LINE_ELEMENTS);
        most[FP8_COLUMN_MAXIMA_cols].i = layer->plan->in_features;
    } else {
        kernel = find_kernel(layer, FP8_OP_AMAX);
        of[FP8_AMAX_partials].p = partials;
        of[FP8_AMAX_n_partials].i = PARTIALS;
        of[FP8_AMAX_found_inf].p = args->found_inf;
        most[FP8_COLUMN_MAXIMA_partials_ld].i = 1;
        most[FP8_COLUMN_MAXIMA_partial_rows].i = PARTIALS;
        most[FP8_COLUMN_MAXIMA_cols].i = 1;
    }
    FP8_TRY(run(layer, kernel, of, &args->call));
    return column_maxima(layer, most, &args->call);
}

/* ---- quantise ---- */

/* The row copy of a weight whose transposed copy has one scale. */
static fp8_status quantize_rows(const fp8_layer *layer, const fp8_shard_args *args,
                                const struct fp8_shard_shape *shape, size_t *end)
{
    uint8_t *shard = args->shard;
    fp8_value values[FP8_OP_MAX_ARGS] = { 0 };
    set_source(args, values);
    values[FP8_QUANTIZE_ROW_row].p = shard + shape->data_offset;
    values[FP8_QUANTIZE_ROW_row_ld].i = shape->row_ld;
    values[FP8_QUANTIZE_ROW_row_rows].i =
        fp8_min_i64(shape->chunk, fp8_round_up(args->count, FP8_PAD_ROWS));
    values[FP8_QUANTIZE_ROW_row_scales].p = shard + FP8_PART_ALIGN;
    *end = (size_t)(values[FP8_QUANTIZE_ROW_row_rows].i * shape->row_ld);
    return run(layer, find_kernel(layer, FP8_OP_QUANTIZE_ROW), values, &args->call);
}

/* Amaxes of rows are found here, those of columns are handed over: two calls of line_scales, since
 * the latter stand for more rows than there are. */
static fp8_status make_scales(const fp8_layer *layer, const fp8_shard_args *args, float *row_maxima,
                              uint8_t *turned)
{
    const int64_t k = layer->plan->in_features, ld = fp8_round_up(args->count, FP8_PAD_LD);
    const struct fp8_kernel *scales = find_kernel(layer, FP8_OP_LINE_SCALES);
    float *partials = partials_of(args);
    fp8_value find[FP8_OP_MAX_ARGS] = { 0 }, rows[FP8_OP_MAX_ARGS] = { 0 },
              columns[FP8_OP_MAX_ARGS] = { 0 };
    set_source(args, find);
    find[FP8_LINE_AMAX_row_partials].p = rows[FP8_LINE_SCALES_row_partials].p = partials;
    find[FP8_LINE_AMAX_row_partials_ld].i = rows[FP8_LINE_SCALES_row_partials_ld].i = ld;
    rows[FP8_LINE_SCALES_rows].i = args->count;
    rows[FP8_LINE_SCALES_cols].i = columns[FP8_LINE_SCALES_cols].i = k;
    rows[FP8_LINE_SCALES_row_maxima].p = row_maxima;
    rows[FP8_LINE_SCALES_row_scales].p = (uint8_t *)args->shard + FP8_PART_ALIGN;
    columns[FP8_LINE_SCALES_rows].i = 1;
    columns[FP8_LINE_SCALES_column_partials].p = args->amax;
    columns[FP8_LINE_SCALES_column_partials_ld].i = k;
    columns[FP8_LINE_SCALES_transposed_scales].p = turned + FP8_PART_ALIGN;
    FP8_TRY(run(layer, find_kernel(layer, FP8_OP_LINE_AMAX), find, &args->call));
    FP8_TRY(run(layer, scales, rows, &args->call));
    return run(layer, scales, columns, &args->call);
}

static fp8_status quantize_lines(const fp8_layer *layer, const fp8_shard_args *args,
                                 const struct fp8_shard_shape *shape, uint8_t *turned, size_t *end)
{
    const int64_t k = layer->plan->in_features, ld = fp8_round_up(args->count, FP8_PAD_LD);
    float *row_maxima = partials_of(args) + fp8_ceil_div(k, FP8_LINE_ELEMENTS) * ld;
    fp8_value values[FP8_OP_MAX_ARGS] = { 0 };
    FP8_TRY(make_scales(layer, args, row_maxima, turned));
    set_source(args, values);
    values[FP8_QUANTIZE_LINES_row_maxima].p = row_maxima;
    values[FP8_QUANTIZE_LINES_column_maxima].p = args->amax;
    values[FP8_QUANTIZE_LINES_row].p = (uint8_t *)args->shard + shape->data_offset;
    values[FP8_QUANTIZE_LINES_row_ld].i = shape->row_ld;
    values[FP8_QUANTIZE_LINES_row_rows].i = fp8_min_i64(shape->chunk, ld);
    values[FP8_QUANTIZE_LINES_transposed].p = turned + shape->turned_head;
    values[FP8_QUANTIZE_LINES_transposed_ld].i = shape->turned_ld;
    values[FP8_QUANTIZE_LINES_transposed_rows].i = fp8_round_up(k, FP8_PAD_ROWS);
    *end = (size_t)(values[FP8_QUANTIZE_LINES_row_rows].i * shape->row_ld);
    return run(layer, find_kernel(layer, FP8_OP_QUANTIZE_LINES), values, &args->call);
}

static fp8_status quantize_turned(const fp8_layer *layer, const fp8_shard_args *args,
                                  const struct fp8_shard_shape *shape, uint8_t *turned)
{
    fp8_value values[FP8_OP_MAX_ARGS] = { 0 };
    set_source(args, values);
    values[FP8_QUANTIZE_partials].p = args->amax;
    values[FP8_QUANTIZE_n_partials].i = 1;
    values[FP8_QUANTIZE_scales].p = turned;
    values[FP8_QUANTIZE_transposed].p = turned + shape->turned_head;
    values[FP8_QUANTIZE_transposed_ld].i = shape->turned_ld;
    values[FP8_QUANTIZE_transposed_rows].i = fp8_round_up(layer->plan->in_features, FP8_PAD_ROWS);
    return run(layer, find_kernel(layer, FP8_OP_QUANTIZE), values, &args->call);
}

fp8_status fp8_shard_quantize_rows(const fp8_layer *layer, const fp8_shard_args *args,
                                   const struct fp8_shard_shape *shape, size_t *end)
{
    const int64_t head = (int64_t)shape->data_offset;
    uint8_t *turned = (uint8_t *)args->shard + shape->turned_offset;
    int64_t zeroed = (int64_t)shape->turned_head;
    *end = 0;
    if (fp8_round_up(args->count, FP8_BLOCK) < shape->turned_ld || args->count == 0)
        zeroed = (int64_t)shape->turned_bytes; /* more than the kernel's tiles cover */
    FP8_TRY(fp8_zero_2d(layer->context, args->shard, head, head, 1, args->call.stream));
    FP8_TRY(fp8_zero_2d(layer->context, turned, zeroed, zeroed, 1, args->call.stream));
    if (args->count == 0)
        return FP8_OK;
    if (has_columns(layer))
        return quantize_lines(layer, args, shape, turned, end);
    FP8_TRY(quantize_rows(layer, args, shape, end));
    return quantize_turned(layer, args, shape, turned);
}

/* ---- unpack ---- */

fp8_status fp8_shard_put_turned(const fp8_context *context, const struct fp8_shard_shape *shape,
                                const struct fp8_turned_piece *piece, const fp8_operand_view *view,
                                int64_t k, fp8_stream stream)
{
    if (piece->count == 0)
        return FP8_OK;
    if (piece->first == 0) { /* the scales are the same on all ranks that have rows */
        FP8_TRY(fp8_copy_bytes(context, view->scales, piece->data, FP8_PART_ALIGN, stream));
        if (view->transposed_scales)
            FP8_TRY(fp8_copy_bytes(context, view->transposed_scales, piece->data + FP8_PART_ALIGN,
                                   shape->turned_head - FP8_PART_ALIGN, stream));
    }
    return fp8_copy_2d(context, view->transposed + piece->first, view->transposed_ld,
                       piece->data + shape->turned_head, shape->turned_ld, piece->count, k, stream);
}

fp8_status fp8_shard_pad_turned(const fp8_context *context, const fp8_operand_view *view, int64_t n,
                                int64_t k, fp8_stream stream)
{
    FP8_TRY(fp8_zero_2d(context, view->transposed + n, view->transposed_ld, view->transposed_ld - n,
                        k, stream));
    return fp8_zero_2d(context, view->transposed + k * view->transposed_ld, view->transposed_ld,
                       view->transposed_ld, fp8_round_up(k, FP8_PAD_ROWS) - k, stream);
}
