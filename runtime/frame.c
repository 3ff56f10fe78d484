/*
 * frame.c - one call of a pass: addresses of its buffers, evaluated arguments, steps run in order.
 *
 * A frame lives on the caller's stack. It is filled from the call's tensors and operands, the rest
 * of the pass's buffers get their places in the workspace, and each step's sources are then table
 * look-ups. This is the hot path: no allocation, no text, no lock, no question to the driver.
 *
 * Empty tensors are handled here, for both backends: no kernel sees an extent of 0.
 */
#include <string.h>

#include "runtime/host.h"
#include "runtime/internal.h"

void fp8_frame_init(struct fp8_frame *frame, const struct fp8_layer *layer, const fp8_call *call,
                    int64_t tokens)
{
    frame->layer = layer;
    frame->stream = call->stream;
    frame->max_sms = call->max_sms;
    frame->sms = fp8_sms_of_call(layer->context, call->max_sms);
    frame->tokens = tokens;
    frame->accumulate = 0;
    memset(frame->address, 0, sizeof frame->address);
}

void fp8_frame_tensor(struct fp8_frame *frame, enum fp8_slot slot, const fp8_tensor *tensor)
{
    int buffer = frame->layer->plan->slots[slot];
    if (buffer < 0 || !tensor)
        return;
    frame->address[buffer] = tensor->data;
    frame->ld[buffer] = tensor->rows > 1 ? tensor->ld : tensor->cols;
    frame->rows[buffer] = tensor->rows;
}

void fp8_frame_address(struct fp8_frame *frame, enum fp8_slot slot, void *address)
{
    int buffer = frame->layer->plan->slots[slot];
    if (buffer >= 0)
        frame->address[buffer] = address;
}

void fp8_frame_operand(struct fp8_frame *frame, fp8_role role, const fp8_operand *operand)
{
    const int8_t *parts = frame->layer->plan->parts[role];
    fp8_operand_view view;
    if (operand->copies == 0)
        return;
    fp8_operand_layout(operand, &view);
    void *const addresses[FP8_PART_COUNT] = {
        [FP8_PART_SCALES] = view.scales,
        [FP8_PART_ROW_SCALES] = view.row_scales,
        [FP8_PART_ROW] = view.row,
        [FP8_PART_TRANSPOSED_SCALES] = view.transposed_scales,
        [FP8_PART_TRANSPOSED] = view.transposed,
    };
    for (int part = 0; part < FP8_PART_COUNT; part++) {
        if (parts[part] >= 0)
            frame->address[parts[part]] = addresses[part];
    }
}

void fp8_frame_state(struct fp8_frame *frame, fp8_role role, const fp8_call *call)
{
    const struct fp8_state *state = call->state;
    const int8_t *places = frame->layer->plan->places;
    if (!state)
        return;
    int64_t tensor = fp8_state_tensor(call->state_layer, role);
    bool evaluate = call->flags & FP8_CALL_EVALUATE;
    void *const addresses[FP8_PLACE_COUNT] = {
        [FP8_PLACE_SCALE] = state->scale + tensor,
        [FP8_PLACE_AMAX] = evaluate ? NULL : state->running + tensor,
        [FP8_PLACE_FRESH] = state->fresh + tensor,
    };
    for (int place = 0; place < FP8_PLACE_COUNT; place++) {
        if (places[place] >= 0)
            frame->address[places[place]] = addresses[place];
    }
}

/* ---- workspace ---- */

/* Whether a buffer may need a place in the workspace of this layer. */
static bool is_scratch(const struct fp8_layer *layer, fp8_pass pass, int buffer, bool want_row)
{
    const struct fp8_buffer *b = &layer->plan->buffers[buffer];
    if (b->object == FP8_OBJECT_WORKSPACE)
        return !(layer->unused[pass] >> buffer & 1u);
    if (b->object != FP8_OBJECT_OPERAND)
        return false;
    if (b->part == FP8_PART_ROW_SCALES && layer->plan->shard.own_scales && pass == FP8_PASS_WEIGHT)
        return true; /* those of the transposed copy are made of them */
    return b->part == FP8_PART_SCALES ||
           (want_row && (b->part == FP8_PART_ROW || b->part == FP8_PART_ROW_SCALES));
}

static size_t bytes_of(const struct fp8_buffer *buffer, int64_t rows, int64_t ld)
{
    return fp8_align_up((size_t)(rows * ld) * fp8_dtype_bytes(buffer->dtype), FP8_PART_ALIGN);
}

void fp8_frame_workspace(struct fp8_frame *frame, fp8_pass pass, void *workspace, bool want_row)
{
    const struct fp8_layer_plan *plan = frame->layer->plan;
    const struct fp8_pass_plan *steps = &plan->passes[pass];
    uintptr_t at = fp8_align_up((uintptr_t)workspace, FP8_PART_ALIGN);
    for (int i = 0; i < steps->buffer_count; i++) {
        int index = steps->buffers[i];
        const struct fp8_buffer *buffer = &plan->buffers[index];
        if (buffer->object == FP8_OBJECT_CALLER || buffer->object == FP8_OBJECT_STATE)
            continue;
        frame->rows[index] = fp8_dim_at(&buffer->rows, frame->tokens);
        frame->ld[index] = fp8_dim_at(&buffer->cols, frame->tokens);
        if (frame->address[index] || !is_scratch(frame->layer, pass, index, want_row))
            continue;
        frame->address[index] = (void *)at;
        at += bytes_of(buffer, frame->rows[index], frame->ld[index]);
    }
}

size_t fp8_frame_workspace_bytes(const struct fp8_layer *layer, fp8_pass pass, int64_t tokens)
{
    const struct fp8_pass_plan *steps = &layer->plan->passes[pass];
    size_t bytes = FP8_PART_ALIGN - 1; /* slack for a workspace of any alignment */
    for (int i = 0; i < steps->buffer_count; i++) {
        int index = steps->buffers[i];
        const struct fp8_buffer *buffer = &layer->plan->buffers[index];
        /* Only fprop quantises into the workspace; the row copies of its other operand are
         * given. */
        bool want_row = pass == FP8_PASS_FPROP && buffer->role == FP8_ROLE_X;
        if (is_scratch(layer, pass, index, want_row))
            bytes += bytes_of(buffer, fp8_dim_at(&buffer->rows, tokens),
                              fp8_dim_at(&buffer->cols, tokens));
    }
    return bytes;
}

/* ---- steps ---- */

static void evaluate(const struct fp8_frame *frame, const struct fp8_source *sources, int count,
                     fp8_value *values)
{
    for (int i = 0; i < count; i++) {
        const struct fp8_source *source = &sources[i];
        switch ((enum fp8_source_kind)source->kind) {
        case FP8_FROM_LITERAL:
            values[i].i = source->literal;
            break;
        case FP8_FROM_TOKENS:
            values[i].i = frame->tokens;
            break;
        case FP8_FROM_ACCUMULATE:
            values[i].i = frame->accumulate;
            break;
        case FP8_FROM_ADDRESS:
            values[i].p = frame->address[source->buffer];
            break;
        case FP8_FROM_LD:
            values[i].i = frame->ld[source->buffer];
            break;
        case FP8_FROM_ROWS:
            values[i].i = frame->rows[source->buffer];
            break;
        case FP8_FROM_EPOCH:
            values[i].i = fp8_context_epoch(frame->layer->context);
            break;
        }
    }
}

void fp8_frame_evaluate(const struct fp8_frame *frame, const struct fp8_step *step,
                        fp8_value *values)
{
    evaluate(frame, step->args, fp8_op_arg_count(step->op), values);
}

/* All ops that quantise begin alike. */
enum { SOURCE_ROWS = FP8_AMAX_rows, SOURCE_COLS = FP8_AMAX_cols };
#define BEGINS_ALIKE(NAME)                                                                         \
    _Static_assert((int)FP8_##NAME##_rows == (int)SOURCE_ROWS &&                                   \
                       (int)FP8_##NAME##_cols == (int)SOURCE_COLS,                                 \
                   #NAME)
BEGINS_ALIKE(QUANTIZE);
BEGINS_ALIKE(FUSED);
BEGINS_ALIKE(CAST);
BEGINS_ALIKE(QUANTIZE_ROW);
BEGINS_ALIKE(LINE_AMAX);
BEGINS_ALIKE(LINE_SCALES);
BEGINS_ALIKE(QUANTIZE_LINES);
BEGINS_ALIKE(QUANTIZE_BLOCK);

/* The scales of an empty tensor: amax 0, so scale 1. */
static fp8_status scale_nothing(const struct fp8_frame *frame, float *scales)
{
    const struct fp8_context *context = frame->layer->context;
    static const uint32_t one = 0x3f800000u; /* 1.0f */
    FP8_TRY(fp8_fill_words(context, scales, 0, FP8_SCALES_COUNT, frame->stream));
    FP8_TRY(fp8_fill_words(context, scales + FP8_SCALES_SCALE, one, 1, frame->stream));
    return fp8_fill_words(context, scales + FP8_SCALES_SCALE_INV, one, 1, frame->stream);
}

/* The same for each row of a copy that has rows and no depth; its bytes are none. */
static fp8_status scale_empty_rows(const struct fp8_frame *frame, float *scales, int64_t rows)
{
    const struct fp8_context *context = frame->layer->context;
    static const uint32_t one = 0x3f800000u; /* 1.0f */
    if (!scales)
        return FP8_OK;
    FP8_TRY(fp8_fill_words(context, scales, one, rows, frame->stream));
    return fp8_fill_words(context, scales + rows, 0, fp8_round_up(rows, FP8_PAD_ROW_SCALES) - rows,
                          frame->stream);
}

/* dbias of no rows: 0, or what it was. */
static fp8_status sum_nothing(const struct fp8_frame *frame, void *dbias, int64_t cols,
                              int64_t accumulate)
{
    if (!dbias || accumulate)
        return FP8_OK;
    return fp8_fill_words(frame->layer->context, dbias, 0, cols, frame->stream);
}

/* A step whose source has no rows: nothing is known of it, and no state is told of it. */
static fp8_status quantize_nothing(const struct fp8_frame *frame, enum fp8_op op,
                                   const fp8_value *args)
{
    switch (op) {
    case FP8_OP_QUANTIZE:
        FP8_TRY(scale_nothing(frame, args[FP8_QUANTIZE_scales].p));
        return sum_nothing(frame, args[FP8_QUANTIZE_dbias].p, args[FP8_QUANTIZE_cols].i,
                           args[FP8_QUANTIZE_accumulate].i);
    case FP8_OP_CAST:
        return scale_nothing(frame, args[FP8_CAST_scales].p);
    case FP8_OP_LINE_SCALES:
        FP8_TRY(scale_empty_rows(frame, args[FP8_LINE_SCALES_transposed_scales].p,
                                 args[FP8_LINE_SCALES_cols].i));
        return sum_nothing(frame, args[FP8_LINE_SCALES_dbias].p, args[FP8_LINE_SCALES_cols].i,
                           args[FP8_LINE_SCALES_accumulate].i);
    default:
        return FP8_OK;
    }
}

static fp8_status run_gemm(const struct fp8_frame *frame, fp8_pass pass,
                           const struct fp8_step *step, const fp8_value *args)
{
    const struct fp8_context *context = frame->layer->context;
    int64_t rows = args[FP8_GEMM_rows].i, cols = args[FP8_GEMM_cols].i;
    if (rows == 0 || cols == 0)
        return FP8_OK;
    if (args[FP8_GEMM_depth].i == 0) { /* a sum over nothing */
        int64_t bytes = (int64_t)fp8_dtype_bytes(step->semantics.target_dtype);
        if (args[FP8_GEMM_accumulate].i)
            return FP8_OK;
        return fp8_zero_2d(context, args[FP8_GEMM_out].p, args[FP8_GEMM_out_ld].i * bytes,
                           cols * bytes, rows, frame->stream);
    }
    if (context->is_host)
        return fp8_host_run(context->pool, FP8_OP_GEMM, &step->semantics, args);
    return fp8_gemm_run(frame->layer->gemms[pass], frame, args);
}

static void *advance(void *address, int64_t elements, size_t element)
{
    return address ? (char *)address + (size_t)elements * element : NULL;
}

/* A cast of the whole weight, shard by shard: each has a scale of its own. Shards end at multiples
 * of 128, so that the pads of none reach into the next. */
static fp8_status cast_shards(const struct fp8_frame *frame, const struct fp8_step *step,
                              const fp8_value *args)
{
    const struct fp8_context *context = frame->layer->context;
    const int64_t rows = args[FP8_CAST_rows].i, chunk = frame->layer->plan->shard.rows;
    const size_t word = sizeof(float), source = fp8_dtype_bytes(step->semantics.source_dtype);
    if (args[FP8_CAST_amax].p)
        FP8_TRY(fp8_fill_words(context, args[FP8_CAST_amax].p, 0, fp8_ceil_div(rows, chunk),
                               frame->stream));
    for (int64_t i = 0, first = 0; first < rows; i++, first += chunk) {
        fp8_value of[FP8_OP_MAX_ARGS];
        memcpy(of, args, sizeof of);
        const bool last = rows - first <= chunk;
        of[FP8_CAST_source].p =
            advance(of[FP8_CAST_source].p, first * of[FP8_CAST_source_ld].i, source);
        of[FP8_CAST_rows].i = last ? rows - first : chunk;
        of[FP8_CAST_known].p = advance(of[FP8_CAST_known].p, i, word);
        of[FP8_CAST_amax].p = advance(of[FP8_CAST_amax].p, i, word);
        of[FP8_CAST_row_scales].p = advance(of[FP8_CAST_row_scales].p, first, word);
        of[FP8_CAST_row].p = advance(of[FP8_CAST_row].p, first * of[FP8_CAST_row_ld].i, 1);
        of[FP8_CAST_row_rows].i = last ? of[FP8_CAST_row_rows].i - first : chunk;
        of[FP8_CAST_transposed].p = advance(of[FP8_CAST_transposed].p, first, 1);
        FP8_TRY(fp8_kernel_run(context, step->kernel, of, frame->stream, frame->sms));
    }
    return FP8_OK;
}

static fp8_status run_step(const struct fp8_frame *frame, fp8_pass pass,
                           const struct fp8_step *step)
{
    fp8_value args[FP8_OP_MAX_ARGS];
    fp8_frame_evaluate(frame, step, args);
    switch (step->op) {
    case FP8_OP_GEMM:
        return run_gemm(frame, pass, step, args);
    case FP8_OP_COLUMN_SUMS:
        if (!args[FP8_COLUMN_SUMS_dbias].p)
            return FP8_OK;
        if (args[FP8_COLUMN_SUMS_partial_rows].i == 0)
            return sum_nothing(frame, args[FP8_COLUMN_SUMS_dbias].p, args[FP8_COLUMN_SUMS_cols].i,
                               args[FP8_COLUMN_SUMS_accumulate].i);
        break;
    case FP8_OP_TRANSPOSE: /* of the scales of a weight's shards */
        if (!args[FP8_TRANSPOSE_transposed_scales].p)
            return FP8_OK;
        break;
    case FP8_OP_CAST:
        if (pass == FP8_PASS_WEIGHT && frame->layer->plan->shard.own_scales)
            return cast_shards(frame, step, args);
        /* fall through */
    default:
        if (args[SOURCE_ROWS].i == 0 || args[SOURCE_COLS].i == 0)
            return quantize_nothing(frame, step->op, args);
    }
    return fp8_kernel_run(frame->layer->context, step->kernel, args, frame->stream, frame->sms);
}

const struct fp8_alternative *fp8_step_alternative(const struct fp8_layer *layer,
                                                   const struct fp8_step *step, int64_t tokens,
                                                   int32_t sms)
{
    const struct fp8_alternative *alternative = step->alternative;
    if (!alternative || !(layer->context->is_host || alternative->step.kernel->function))
        return NULL;
    int64_t sides[2], elements;
    for (int i = 0; i < 2; i++) {
        const struct fp8_source *source = &alternative->step.args[SOURCE_ROWS + i];
        sides[i] = source->kind == FP8_FROM_TOKENS ? tokens : source->literal;
    }
    if (__builtin_mul_overflow(sides[0], sides[1], &elements) || elements == 0 ||
        elements > alternative->elements_per_sm * sms)
        return NULL;
    return alternative;
}

fp8_status fp8_frame_run(const struct fp8_frame *frame, fp8_pass pass, int first, int end)
{
    const struct fp8_pass_plan *plan = &frame->layer->plan->passes[pass];
    for (int i = first; i < end; i++) {
        const struct fp8_step *step = &plan->steps[i];
        const struct fp8_alternative *alternative =
            fp8_step_alternative(frame->layer, step, frame->tokens, frame->sms);
        if (alternative)
            i++; /* it stands for the quantize step, too */
        FP8_TRY(run_step(frame, pass, alternative ? &alternative->step : step));
    }
    return FP8_OK;
}

fp8_status fp8_frame_enqueue(const struct fp8_frame *frame, fp8_pass pass, int first)
{
    const struct fp8_layer *layer = frame->layer;
    bool pushed;
    FP8_TRY(fp8_context_enter(layer->context, &pushed));
    fp8_status status = fp8_frame_run(frame, pass, first, layer->plan->passes[pass].step_count);
    fp8_context_leave(layer->context, pushed);
    return status;
}
