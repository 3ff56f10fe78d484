/*
 * plan_check.c - the steps of a parsed layer touch only what their buffers hold, for every M.
 *
 * In: a layer whose fields are all well formed. Out: yes, or a sentence. A bundle comes from a
 * file, so the extents that its steps name are compared with its buffers once, here, and the passes
 * may rely on them: each pointer is a buffer of the pass with the right dtype, each ld is that
 * buffer's, rows and columns are within it. Extents grow with M, in steps at multiples, so values
 * around every power of two are tried.
 */
#include <stdio.h>

#include "runtime/internal.h"
#include "runtime/json_read.h"

enum { QUANTIZE_TILE = 128 }; /* rows of one partial of dbias */

struct checker {
    const char *path;
    const struct fp8_layer_plan *plan;
    fp8_pass pass;
    const struct fp8_step *step;
    int64_t tokens;
};

static fp8_status bad(const struct checker *c, int arg, const char *rule)
{
    return fp8_fail(
        FP8_ERR_BUNDLE,
        "%s: layer '%s', pass %s, op %s, argument '%s': %s (at M = %lld); rebuild the bundle",
        c->path, c->plan->name, fp8_pass_name(c->pass), fp8_op_names[c->step->op],
        fp8_op_arg_name(c->step->op, arg), rule, (long long)c->tokens);
}

static int64_t value_of(const struct checker *c, int arg)
{
    const struct fp8_source *source = &c->step->args[arg];
    switch ((enum fp8_source_kind)source->kind) {
    case FP8_FROM_LITERAL:
        return source->literal;
    case FP8_FROM_TOKENS:
        return c->tokens;
    case FP8_FROM_ACCUMULATE:
        return 1;
    case FP8_FROM_LD:
        return fp8_dim_at(&c->plan->buffers[source->buffer].cols, c->tokens);
    case FP8_FROM_ROWS:
        return fp8_dim_at(&c->plan->buffers[source->buffer].rows, c->tokens);
    case FP8_FROM_ADDRESS:
        break;
    }
    return 0;
}

enum { NO_LD = -1 };

/* What one pointer argument must cover. */
struct need {
    int pointer;
    int ld; /* an argument, or NO_LD where rows is 1 */
    bool optional;
    fp8_dtype dtype;
    int64_t rows;
    int64_t cols;
};

static fp8_status check_need(const struct checker *c, struct need need)
{
    const struct fp8_source *source = &c->step->args[need.pointer];
    if (source->kind != FP8_FROM_ADDRESS)
        return need.optional ? FP8_OK : bad(c, need.pointer, "it may not be null");
    const struct fp8_buffer *buffer = &c->plan->buffers[source->buffer];
    if (buffer->dtype != need.dtype)
        return bad(c, need.pointer, "the buffer has another dtype");
    if (need.ld != NO_LD) {
        const struct fp8_source *ld = &c->step->args[need.ld];
        if (ld->kind != FP8_FROM_LD || ld->buffer != source->buffer)
            return bad(c, need.ld, "it is not the ld of its buffer");
    }
    if (need.rows > fp8_dim_at(&buffer->rows, c->tokens) ||
        need.cols > fp8_dim_at(&buffer->cols, c->tokens))
        return bad(c, need.pointer, "the buffer is smaller than what the step touches");
    return FP8_OK;
}

static fp8_status check_amax(const struct checker *c)
{
    int64_t rows = value_of(c, FP8_AMAX_rows), cols = value_of(c, FP8_AMAX_cols);
    const struct need needs[] = {
        { FP8_AMAX_source, FP8_AMAX_source_ld, false, c->step->semantics.source_dtype, rows, cols },
        { FP8_AMAX_partials, NO_LD, false, FP8_DTYPE_FP32, 1, value_of(c, FP8_AMAX_n_partials) },
        { FP8_AMAX_found_inf, NO_LD, true, FP8_DTYPE_UINT32, 1, 1 },
        { FP8_AMAX_dbias_partials, FP8_AMAX_dbias_ld, true, FP8_DTYPE_FP32,
          fp8_ceil_div(rows, QUANTIZE_TILE), cols },
    };
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++)
        FP8_TRY(check_need(c, needs[i]));
    return FP8_OK;
}

static fp8_status check_quantize(const struct checker *c)
{
    int64_t rows = value_of(c, FP8_QUANTIZE_rows), cols = value_of(c, FP8_QUANTIZE_cols);
    int64_t row_rows = value_of(c, FP8_QUANTIZE_row_rows);
    int64_t transposed_rows = value_of(c, FP8_QUANTIZE_transposed_rows);
    fp8_dtype format = c->step->semantics.target_dtype;
    const struct need needs[] = {
        { FP8_QUANTIZE_source, FP8_QUANTIZE_source_ld, false, c->step->semantics.source_dtype, rows,
          cols },
        { FP8_QUANTIZE_partials, NO_LD, false, FP8_DTYPE_FP32, 1,
          value_of(c, FP8_QUANTIZE_n_partials) },
        { FP8_QUANTIZE_scales, NO_LD, false, FP8_DTYPE_FP32, 1, FP8_SCALES_COUNT },
        { FP8_QUANTIZE_row, FP8_QUANTIZE_row_ld, true, format, row_rows, cols },
        { FP8_QUANTIZE_transposed, FP8_QUANTIZE_transposed_ld, true, format, transposed_rows,
          rows },
        { FP8_QUANTIZE_dbias, NO_LD, true, FP8_DTYPE_FP32, 1, cols },
        { FP8_QUANTIZE_dbias_partials, FP8_QUANTIZE_dbias_ld, true, FP8_DTYPE_FP32,
          fp8_ceil_div(rows, QUANTIZE_TILE), cols },
    };
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++)
        FP8_TRY(check_need(c, needs[i]));
    if (row_rows < rows)
        return bad(c, FP8_QUANTIZE_row_rows, "it is less than rows");
    if (transposed_rows < cols)
        return bad(c, FP8_QUANTIZE_transposed_rows, "it is less than cols");
    if (c->step->args[FP8_QUANTIZE_dbias].kind == FP8_FROM_ADDRESS &&
        c->step->args[FP8_QUANTIZE_dbias_partials].kind != FP8_FROM_ADDRESS)
        return bad(c, FP8_QUANTIZE_dbias_partials, "it is null, but dbias is not");
    return FP8_OK;
}

/* Which copy of which operand the gemm of a pass reads as a and as b. */
static bool is_part(const struct checker *c, int arg, fp8_role role, enum fp8_part part)
{
    const struct fp8_source *source = &c->step->args[arg];
    return source->kind == FP8_FROM_ADDRESS && source->buffer == c->plan->parts[role][part];
}

static fp8_status check_gemm_operands(const struct checker *c)
{
    static const struct {
        fp8_role a, b;
        enum fp8_part a_copy, b_copy;
    } reads[FP8_PASS_COUNT] = {
        [FP8_PASS_FPROP] = { FP8_ROLE_X, FP8_ROLE_W, FP8_PART_ROW, FP8_PART_ROW },
        [FP8_PASS_WGRAD] = { FP8_ROLE_DY, FP8_ROLE_X, FP8_PART_TRANSPOSED, FP8_PART_TRANSPOSED },
        [FP8_PASS_DGRAD] = { FP8_ROLE_DY, FP8_ROLE_W, FP8_PART_ROW, FP8_PART_TRANSPOSED },
    };
    fp8_role a = reads[c->pass].a, b = reads[c->pass].b;
    if (!is_part(c, FP8_GEMM_a, a, reads[c->pass].a_copy))
        return bad(c, FP8_GEMM_a, "it is not the copy that this pass reads");
    if (!is_part(c, FP8_GEMM_b, b, reads[c->pass].b_copy))
        return bad(c, FP8_GEMM_b, "it is not the copy that this pass reads");
    if (!is_part(c, FP8_GEMM_a_scales, a, FP8_PART_SCALES))
        return bad(c, FP8_GEMM_a_scales, "they are not the scales of a");
    if (!is_part(c, FP8_GEMM_b_scales, b, FP8_PART_SCALES))
        return bad(c, FP8_GEMM_b_scales, "they are not the scales of b");
    return FP8_OK;
}

static fp8_status check_gemm(const struct checker *c)
{
    const struct fp8_semantics *how = &c->step->semantics;
    const struct fp8_gemm_step *gemm = c->step->gemm;
    int64_t rows = value_of(c, FP8_GEMM_rows), cols = value_of(c, FP8_GEMM_cols);
    int64_t depth = fp8_round_up(value_of(c, FP8_GEMM_depth), 16), padded = fp8_round_up(cols, 16);
    const struct need needs[] = {
        { FP8_GEMM_a, FP8_GEMM_a_ld, false, how->source_dtype, rows, depth },
        { FP8_GEMM_b, FP8_GEMM_b_ld, false, how->second_dtype, padded, depth },
        { FP8_GEMM_bias, NO_LD, true, FP8_DTYPE_BF16, 1, cols },
        { FP8_GEMM_out, FP8_GEMM_out_ld, false, how->target_dtype, rows, cols },
    };
    FP8_TRY(check_gemm_operands(c));
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++)
        FP8_TRY(check_need(c, needs[i]));
    const struct fp8_buffer *stage = &c->plan->buffers[gemm->stage];
    if (fp8_dim_at(&stage->cols, c->tokens) < padded ||
        (c->tokens > 0 && fp8_dim_at(&stage->rows, c->tokens) < 1) ||
        fp8_dim_at(&stage->cols, c->tokens) * (int64_t)fp8_dtype_bytes(stage->dtype) % 16 != 0)
        return bad(c, FP8_GEMM_out, "the stage does not hold a row of it");
    if (c->step->args[FP8_GEMM_bias].kind != FP8_FROM_ADDRESS)
        return FP8_OK;
    if (gemm->stage_bias < 0)
        return bad(c, FP8_GEMM_bias, "there is no stage_bias");
    const struct fp8_buffer *bias = &c->plan->buffers[gemm->stage_bias];
    if (bias->dtype != FP8_DTYPE_BF16 || fp8_dim_at(&bias->cols, c->tokens) < padded)
        return bad(c, FP8_GEMM_bias, "stage_bias does not hold it");
    return FP8_OK;
}

/* A pass may name only the tensors and operands that its call brings; others would be NULL. */
static fp8_status check_owner(const struct checker *c, int arg)
{
    static const struct {
        uint32_t slots, roles;
        fp8_role filled; /* operand that the pass may write */
    } has[FP8_PASS_COUNT] = {
        [FP8_PASS_WEIGHT] = { 1u << FP8_SLOT_W | 1u << FP8_SLOT_FOUND_INF, 1u << FP8_ROLE_W,
                              FP8_ROLE_W },
        [FP8_PASS_FPROP] = { 1u << FP8_SLOT_X | 1u << FP8_SLOT_BIAS | 1u << FP8_SLOT_Y |
                                 1u << FP8_SLOT_FOUND_INF,
                             1u << FP8_ROLE_X | 1u << FP8_ROLE_W, FP8_ROLE_X },
        [FP8_PASS_QUANTIZE_DY] = { 1u << FP8_SLOT_DY | 1u << FP8_SLOT_DBIAS |
                                       1u << FP8_SLOT_FOUND_INF,
                                   1u << FP8_ROLE_DY, FP8_ROLE_DY },
        [FP8_PASS_WGRAD] = { 1u << FP8_SLOT_DW, 1u << FP8_ROLE_DY | 1u << FP8_ROLE_X,
                             FP8_ROLE_NONE },
        [FP8_PASS_DGRAD] = { 1u << FP8_SLOT_DX, 1u << FP8_ROLE_DY | 1u << FP8_ROLE_W,
                             FP8_ROLE_NONE },
    };
    const struct fp8_source *source = &c->step->args[arg];
    if (source->kind != FP8_FROM_ADDRESS && source->kind != FP8_FROM_LD)
        return FP8_OK;
    const struct fp8_buffer *buffer = &c->plan->buffers[source->buffer];
    if (buffer->object == FP8_OBJECT_CALLER && !(has[c->pass].slots >> buffer->slot & 1u))
        return bad(c, arg, "this pass has no such tensor");
    if (buffer->object != FP8_OBJECT_OPERAND)
        return FP8_OK;
    if (!(has[c->pass].roles >> buffer->role & 1u))
        return bad(c, arg, "this pass has no such operand");
    if (c->step->op != FP8_OP_GEMM && buffer->role != has[c->pass].filled)
        return bad(c, arg, "this pass does not fill that operand");
    return FP8_OK;
}

static fp8_status check_step(const struct checker *c)
{
    for (int i = 0; i < fp8_op_arg_count(c->step->op); i++)
        FP8_TRY(check_owner(c, i));
    switch (c->step->op) {
    case FP8_OP_AMAX:
        return check_amax(c);
    case FP8_OP_QUANTIZE:
        return check_quantize(c);
    case FP8_OP_GEMM:
        return check_gemm(c);
    case FP8_OP_STORE:
    case FP8_OP_DEQUANTIZE:
    case FP8_OP_COUNT:
        break;
    }
    return bad(c, 0, "the op is no step of a pass");
}

/* An operand is whole only after an amax and a quantize, in this order. */
static fp8_status check_order(struct checker *c)
{
    const struct fp8_pass_plan *pass = &c->plan->passes[c->pass];
    if (c->pass == FP8_PASS_WGRAD || c->pass == FP8_PASS_DGRAD)
        return FP8_OK;
    if (pass->gemm == 2 && pass->steps[0].op == FP8_OP_AMAX && pass->steps[1].op == FP8_OP_QUANTIZE)
        return FP8_OK;
    return fp8_fail(FP8_ERR_BUNDLE,
                    "%s: layer '%s', pass %s: it does not begin with the steps amax and quantize; "
                    "rebuild the bundle",
                    c->path, c->plan->name, fp8_pass_name(c->pass));
}

fp8_status fp8_plan_check(const char *path, const struct fp8_layer_plan *plan)
{
    struct checker c = { .path = path, .plan = plan };
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        c.pass = (fp8_pass)pass;
        FP8_TRY(check_order(&c));
        for (int i = 0; i < plan->passes[pass].step_count; i++) {
            c.step = &plan->passes[pass].steps[i];
            for (int64_t power = 1; power < 2 * plan->max_tokens; power *= 2) {
                for (int64_t tokens = power - 1; tokens <= power + 1; tokens++) {
                    c.tokens = fp8_min_i64(tokens, plan->max_tokens);
                    FP8_TRY(check_step(&c));
                }
            }
        }
    }
    return FP8_OK;
}
