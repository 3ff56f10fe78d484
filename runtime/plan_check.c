/*
 * plan_check.c - the steps of a parsed layer touch only what their buffers hold, for every M.
 *
 * In: a layer whose fields are all well formed. Out: yes, or a sentence. A bundle comes from a
 * file, so the extents that its steps name are compared with its buffers once, here, and the passes
 * may rely on them: each pointer is a buffer of the pass with the right dtype, each ld is that
 * buffer's, rows and columns are within it. Extents grow with M, in steps at multiples, so values
 * around every power of two are tried.
 */
#include "runtime/plan_check.h"

fp8_status fp8_plan_bad(const struct fp8_checker *c, int arg, const char *rule)
{
    return fp8_fail(
        FP8_ERR_BUNDLE,
        "%s: layer '%s', pass %s, op %s, argument '%s': %s (at M = %lld); rebuild the bundle",
        c->path, c->plan->name, fp8_plan_pass_name(c->pass), fp8_op_names[c->step->op],
        fp8_op_arg_name(c->step->op, arg), rule, (long long)c->tokens);
}

int64_t fp8_plan_value(const struct fp8_checker *c, int arg)
{
    const struct fp8_source *source = &c->step->args[arg];
    switch ((enum fp8_source_kind)source->kind) {
    case FP8_FROM_LITERAL:
        return source->literal;
    case FP8_FROM_TOKENS:
        return c->tokens;
    case FP8_FROM_ACCUMULATE:
    case FP8_FROM_EPOCH:
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

static fp8_status check_need(const struct fp8_checker *c, struct fp8_need need)
{
    const struct fp8_source *source = &c->step->args[need.pointer];
    if (source->kind != FP8_FROM_ADDRESS)
        return need.optional ? FP8_OK : fp8_plan_bad(c, need.pointer, "it may not be null");
    const struct fp8_buffer *buffer = &c->plan->buffers[source->buffer];
    if (buffer->dtype != need.dtype)
        return fp8_plan_bad(c, need.pointer, "the buffer has another dtype");
    if (need.ld != FP8_NO_LD) {
        const struct fp8_source *ld = &c->step->args[need.ld];
        if (ld->kind != FP8_FROM_LD || ld->buffer != source->buffer)
            return fp8_plan_bad(c, need.ld, "it is not the ld of its buffer");
    }
    if (need.rows > fp8_dim_at(&buffer->rows, c->tokens) ||
        need.cols > fp8_dim_at(&buffer->cols, c->tokens))
        return fp8_plan_bad(c, need.pointer, "the buffer is smaller than what the step touches");
    return FP8_OK;
}

fp8_status fp8_plan_needs(const struct fp8_checker *c, const struct fp8_need *needs, size_t count)
{
    for (size_t i = 0; i < count; i++)
        FP8_TRY(check_need(c, needs[i]));
    return FP8_OK;
}

/* ---- ops that quantise ---- */

/* The arguments that they have in common; -1: the op has none such. */
struct common {
    int source, source_ld, rows, cols;
    int row, row_ld, row_rows, transposed, transposed_ld, transposed_rows;
    int dbias_partials, dbias_ld, found_inf, when;
};

static struct common common_of(enum fp8_op op)
{
    return (struct common){
        .source = fp8_op_arg(op, "source"),
        .source_ld = fp8_op_arg(op, "source_ld"),
        .rows = fp8_op_arg(op, "rows"),
        .cols = fp8_op_arg(op, "cols"),
        .row = fp8_op_arg(op, "row"),
        .row_ld = fp8_op_arg(op, "row_ld"),
        .row_rows = fp8_op_arg(op, "row_rows"),
        .transposed = fp8_op_arg(op, "transposed"),
        .transposed_ld = fp8_op_arg(op, "transposed_ld"),
        .transposed_rows = fp8_op_arg(op, "transposed_rows"),
        .dbias_partials = fp8_op_arg(op, "dbias_partials"),
        .dbias_ld = fp8_op_arg(op, "dbias_ld"),
        .found_inf = fp8_op_arg(op, "found_inf"),
        .when = fp8_op_arg(op, "when"),
    };
}

/* What the step's kernel makes of a copy. */
static fp8_scaling scaling_of(const struct fp8_checker *c, enum fp8_copy copy)
{
    switch (c->step->op) {
    case FP8_OP_CAST: /* run for each shard */
        if (c->plan->shard.own_scales && fp8_is_given(c, FP8_CAST_row_scales))
            return copy == FP8_ROW_COPY ? FP8_SCALING_ROW : FP8_SCALING_TILE;
        return FP8_SCALING_TENSOR;
    case FP8_OP_QUANTIZE_ROW:
    case FP8_OP_QUANTIZE_LINES:
        return FP8_SCALING_ROW;
    case FP8_OP_QUANTIZE_BLOCK:
        return c->step->semantics.scaling;
    default:
        return FP8_SCALING_TENSOR;
    }
}

static fp8_status check_copy(const struct fp8_checker *c, int pointer, int ld, int copy_rows,
                             int64_t rows, int64_t cols, enum fp8_copy which)
{
    if (pointer < 0 || !fp8_is_given(c, pointer))
        return FP8_OK;
    int64_t padded = fp8_plan_value(c, copy_rows);
    FP8_NEEDS(c, { pointer, ld, true, c->step->semantics.target_dtype, padded, cols });
    if (padded < rows)
        return fp8_plan_bad(c, copy_rows, "it is less than the rows of the copy");
    const struct fp8_buffer *buffer = &c->plan->buffers[c->step->args[pointer].buffer];
    if (buffer->object == FP8_OBJECT_OPERAND &&
        c->plan->scalings[buffer->role][which] != scaling_of(c, which))
        return fp8_plan_bad(c, pointer, "the op scales this copy in another way than the recipe");
    return FP8_OK;
}

static fp8_status check_common(const struct fp8_checker *c)
{
    const struct common a = common_of(c->step->op);
    int64_t rows = fp8_plan_value(c, a.rows), cols = fp8_plan_value(c, a.cols);
    FP8_NEEDS(c, { a.when, FP8_NO_LD, true, FP8_DTYPE_UINT32, 1, 1 });
    if (a.source >= 0)
        FP8_NEEDS(c, { a.source, a.source_ld, false, c->step->semantics.source_dtype, rows, cols });
    if (a.found_inf >= 0)
        FP8_NEEDS(c, { a.found_inf, FP8_NO_LD, true, FP8_DTYPE_UINT32, 1, 1 });
    if (a.dbias_partials >= 0) {
        FP8_NEEDS(c, { a.dbias_partials, a.dbias_ld, true, FP8_DTYPE_FP32,
                       fp8_ceil_div(rows, FP8_DBIAS_ROWS), cols });
    }
    if (c->step->op != FP8_OP_AMAX && c->step->op != FP8_OP_LINE_AMAX &&
        c->step->semantics.power_of_two != c->plan->recipe.power_of_two)
        return fp8_plan_bad(c, a.rows, "power_of_two of the kernel is not the recipe's");
    FP8_TRY(check_copy(c, a.row, a.row_ld, a.row_rows, rows, cols, FP8_ROW_COPY));
    return check_copy(c, a.transposed, a.transposed_ld, a.transposed_rows, cols, rows,
                      FP8_TRANSPOSED_COPY);
}

/* Every CTA leaves a partial. */
static fp8_status check_partials(const struct fp8_checker *c, int n_partials)
{
    int64_t most = c->step->kernel->grid.max_ctas;
    if (most < 1 || most > fp8_plan_value(c, n_partials))
        return fp8_plan_bad(c, n_partials, "the kernel's grid may have more CTAs than that");
    return FP8_OK;
}

static fp8_status check_amax(const struct fp8_checker *c)
{
    FP8_NEEDS(c, { FP8_AMAX_partials, FP8_NO_LD, false, FP8_DTYPE_FP32, 1,
                   fp8_plan_value(c, FP8_AMAX_n_partials) });
    return check_partials(c, FP8_AMAX_n_partials);
}

static fp8_status check_dbias(const struct fp8_checker *c, int dbias, int partials, int cols)
{
    FP8_NEEDS(c, { dbias, FP8_NO_LD, true, FP8_DTYPE_FP32, 1, fp8_plan_value(c, cols) });
    if (fp8_is_given(c, dbias) && !fp8_is_given(c, partials))
        return fp8_plan_bad(c, partials, "it is null, but dbias is not");
    return FP8_OK;
}

static fp8_status check_quantize(const struct fp8_checker *c)
{
    FP8_NEEDS(c,
              { FP8_QUANTIZE_partials, FP8_NO_LD, false, FP8_DTYPE_FP32, 1,
                fp8_plan_value(c, FP8_QUANTIZE_n_partials) },
              { FP8_QUANTIZE_scales, FP8_NO_LD, false, FP8_DTYPE_FP32, 1, FP8_SCALES_COUNT });
    return check_dbias(c, FP8_QUANTIZE_dbias, FP8_QUANTIZE_dbias_partials, FP8_QUANTIZE_cols);
}

static fp8_status check_fused(const struct fp8_checker *c)
{
    FP8_NEEDS(c,
              { FP8_FUSED_partials, FP8_NO_LD, false, FP8_DTYPE_FP32, 1,
                fp8_plan_value(c, FP8_FUSED_n_partials) },
              { FP8_FUSED_scales, FP8_NO_LD, false, FP8_DTYPE_FP32, 1, FP8_SCALES_COUNT },
              /* uint64 of each CTA, and one more */
              { FP8_FUSED_barrier, FP8_NO_LD, false, FP8_DTYPE_UINT32, 1,
                2 * (c->step->kernel->grid.max_ctas + 1) });
    FP8_TRY(check_partials(c, FP8_FUSED_n_partials));
    return check_dbias(c, FP8_FUSED_dbias, FP8_FUSED_dbias_partials, FP8_FUSED_cols);
}

static fp8_status check_cast(const struct fp8_checker *c)
{
    bool fresh = fp8_is_given(c, FP8_CAST_fresh);
    int64_t shards = c->pass == FP8_PASS_WEIGHT && c->plan->shard.own_scales
                         ? fp8_ceil_div(c->plan->out_features, c->plan->shard.rows)
                         : 1;
    FP8_NEEDS(c, { FP8_CAST_known, FP8_NO_LD, false, FP8_DTYPE_FP32, 1, shards },
              { FP8_CAST_fresh, FP8_NO_LD, true, FP8_DTYPE_UINT32, 1, 1 },
              { FP8_CAST_partials, FP8_NO_LD, !fresh, FP8_DTYPE_FP32, 1,
                fp8_plan_value(c, FP8_CAST_n_partials) },
              { FP8_CAST_scales, FP8_NO_LD, false, FP8_DTYPE_FP32, 1, FP8_SCALES_COUNT },
              { FP8_CAST_row_scales, FP8_NO_LD, true, FP8_DTYPE_FP32, 1,
                fp8_round_up(fp8_plan_value(c, FP8_CAST_rows), FP8_PAD_ROW_SCALES) },
              { FP8_CAST_amax, FP8_NO_LD, true, FP8_DTYPE_FP32, 1, shards });
    if (c->step->semantics.margin != c->plan->recipe.margin)
        return fp8_plan_bad(c, FP8_CAST_known, "margin of the kernel is not the recipe's");
    return FP8_OK;
}

/* Of scales alone: those of a weight's shards. */
static fp8_status check_transpose(const struct fp8_checker *c)
{
    int64_t rows = fp8_plan_value(c, FP8_TRANSPOSE_rows),
            cols = fp8_plan_value(c, FP8_TRANSPOSE_cols);
    if (!c->plan->shard.own_scales || fp8_is_given(c, FP8_TRANSPOSE_source))
        return fp8_plan_bad(c, FP8_TRANSPOSE_source, "a pass turns the scales of shards alone");
    if (fp8_plan_value(c, FP8_TRANSPOSE_scales_ld) != 0)
        return fp8_plan_bad(c, FP8_TRANSPOSE_scales_ld, "scales of rows have none");
    FP8_NEEDS(c, { FP8_TRANSPOSE_scales, FP8_NO_LD, false, FP8_DTYPE_FP32, 1, rows },
              { FP8_TRANSPOSE_transposed_scales, FP8_TRANSPOSE_transposed_scales_ld, false,
                FP8_DTYPE_FP32, fp8_ceil_div(cols, FP8_BLOCK),
                fp8_round_up(fp8_ceil_div(rows, FP8_BLOCK), FP8_PAD_TILE_SCALES) },
              { FP8_TRANSPOSE_when, FP8_NO_LD, true, FP8_DTYPE_UINT32, 1, 1 });
    return FP8_OK;
}

static fp8_status check_column_sums(const struct fp8_checker *c)
{
    int64_t cols = fp8_plan_value(c, FP8_COLUMN_SUMS_cols);
    FP8_NEEDS(c,
              { FP8_COLUMN_SUMS_partials, FP8_COLUMN_SUMS_partials_ld, false, FP8_DTYPE_FP32,
                fp8_plan_value(c, FP8_COLUMN_SUMS_partial_rows), cols },
              { FP8_COLUMN_SUMS_dbias, FP8_NO_LD, true, FP8_DTYPE_FP32, 1, cols });
    return FP8_OK;
}

static fp8_status check_quantize_row(const struct fp8_checker *c)
{
    FP8_NEEDS(c, { FP8_QUANTIZE_ROW_row_scales, FP8_NO_LD, true, FP8_DTYPE_FP32, 1,
                   fp8_round_up(fp8_plan_value(c, FP8_QUANTIZE_ROW_rows), FP8_PAD_ROW_SCALES) });
    return FP8_OK;
}

/* The partial amaxes of rows and columns, each of which may be null. */
static fp8_status check_lines(const struct fp8_checker *c, const int row[2], const int column[2],
                              int64_t rows, int64_t cols)
{
    FP8_NEEDS(c,
              { row[0], row[1], true, FP8_DTYPE_FP32, fp8_ceil_div(cols, FP8_LINE_ELEMENTS), rows },
              { column[0], column[1], true, FP8_DTYPE_FP32, fp8_ceil_div(rows, FP8_LINE_ELEMENTS),
                cols });
    return FP8_OK;
}

static fp8_status check_line_amax(const struct fp8_checker *c)
{
    return check_lines(c, (int[]){ FP8_LINE_AMAX_row_partials, FP8_LINE_AMAX_row_partials_ld },
                       (int[]){ FP8_LINE_AMAX_column_partials, FP8_LINE_AMAX_column_partials_ld },
                       fp8_plan_value(c, FP8_LINE_AMAX_rows),
                       fp8_plan_value(c, FP8_LINE_AMAX_cols));
}

/* What comes of partials that are null is null. */
static fp8_status check_without(const struct fp8_checker *c, int partials, int maxima, int scales)
{
    if (fp8_is_given(c, partials))
        return FP8_OK;
    if (fp8_is_given(c, maxima) || fp8_is_given(c, scales))
        return fp8_plan_bad(c, partials, "it is null, but what follows from it is not");
    return FP8_OK;
}

static fp8_status check_line_scales(const struct fp8_checker *c)
{
    int64_t rows = fp8_plan_value(c, FP8_LINE_SCALES_rows),
            cols = fp8_plan_value(c, FP8_LINE_SCALES_cols);
    FP8_TRY(
        check_lines(c, (int[]){ FP8_LINE_SCALES_row_partials, FP8_LINE_SCALES_row_partials_ld },
                    (int[]){ FP8_LINE_SCALES_column_partials, FP8_LINE_SCALES_column_partials_ld },
                    rows, cols));
    FP8_TRY(check_without(c, FP8_LINE_SCALES_row_partials, FP8_LINE_SCALES_row_maxima,
                          FP8_LINE_SCALES_row_scales));
    FP8_TRY(check_without(c, FP8_LINE_SCALES_column_partials, FP8_LINE_SCALES_column_maxima,
                          FP8_LINE_SCALES_transposed_scales));
    FP8_NEEDS(c, { FP8_LINE_SCALES_row_maxima, FP8_NO_LD, true, FP8_DTYPE_FP32, 1, rows },
              { FP8_LINE_SCALES_column_maxima, FP8_NO_LD, true, FP8_DTYPE_FP32, 1, cols },
              { FP8_LINE_SCALES_row_scales, FP8_NO_LD, true, FP8_DTYPE_FP32, 1,
                fp8_round_up(rows, FP8_PAD_ROW_SCALES) },
              { FP8_LINE_SCALES_transposed_scales, FP8_NO_LD, true, FP8_DTYPE_FP32, 1,
                fp8_round_up(cols, FP8_PAD_ROW_SCALES) });
    return check_dbias(c, FP8_LINE_SCALES_dbias, FP8_LINE_SCALES_dbias_partials,
                       FP8_LINE_SCALES_cols);
}

static fp8_status check_quantize_lines(const struct fp8_checker *c)
{
    FP8_NEEDS(c,
              { FP8_QUANTIZE_LINES_row_maxima, FP8_NO_LD, !fp8_is_given(c, FP8_QUANTIZE_LINES_row),
                FP8_DTYPE_FP32, 1, fp8_plan_value(c, FP8_QUANTIZE_LINES_rows) },
              { FP8_QUANTIZE_LINES_column_maxima, FP8_NO_LD,
                !fp8_is_given(c, FP8_QUANTIZE_LINES_transposed), FP8_DTYPE_FP32, 1,
                fp8_plan_value(c, FP8_QUANTIZE_LINES_cols) });
    return FP8_OK;
}

/* The scales of a copy of r rows and depth d. */
static fp8_status check_block_scales(const struct fp8_checker *c, int pointer, int ld, int64_t r,
                                     int64_t d)
{
    int64_t blocks = fp8_ceil_div(d, FP8_BLOCK);
    if (c->step->semantics.scaling == FP8_SCALING_BLOCK)
        FP8_NEEDS(c, { pointer, ld, true, FP8_DTYPE_FP32, blocks,
                       fp8_round_up(r, FP8_PAD_BLOCK_SCALES) });
    else
        FP8_NEEDS(c, { pointer, ld, true, FP8_DTYPE_FP32, fp8_ceil_div(r, FP8_BLOCK),
                       fp8_round_up(blocks, FP8_PAD_TILE_SCALES) });
    return FP8_OK;
}

static fp8_status check_quantize_block(const struct fp8_checker *c)
{
    int64_t rows = fp8_plan_value(c, FP8_QUANTIZE_BLOCK_rows);
    int64_t cols = fp8_plan_value(c, FP8_QUANTIZE_BLOCK_cols);
    FP8_TRY(check_block_scales(c, FP8_QUANTIZE_BLOCK_row_scales, FP8_QUANTIZE_BLOCK_row_scales_ld,
                               rows, cols));
    return check_block_scales(c, FP8_QUANTIZE_BLOCK_transposed_scales,
                              FP8_QUANTIZE_BLOCK_transposed_scales_ld, cols, rows);
}

/* ---- what a pass may name ---- */

#define SLOT(name) (1u << FP8_SLOT_##name)
#define ROLE(name) (1u << FP8_ROLE_##name)

struct fp8_belongings fp8_plan_belongings(const struct fp8_layer_plan *plan, int pass)
{
    static const struct fp8_belongings table[FP8_PLAN_COUNT] = {
        [FP8_PASS_WEIGHT] = { SLOT(W) | SLOT(FOUND_INF) | SLOT(WHEN), ROLE(W), FP8_ROLE_W },
        [FP8_PASS_FPROP] = { SLOT(X) | SLOT(BIAS) | SLOT(Y) | SLOT(FOUND_INF) | SLOT(WHEN),
                             ROLE(X) | ROLE(W), FP8_ROLE_X },
        [FP8_PASS_QUANTIZE_DY] = { SLOT(DY) | SLOT(DBIAS) | SLOT(FOUND_INF) | SLOT(WHEN), ROLE(DY),
                                   FP8_ROLE_DY },
        [FP8_PASS_WGRAD] = { SLOT(DW), ROLE(DY) | ROLE(X), FP8_ROLE_NONE },
        [FP8_PASS_DGRAD] = { SLOT(DX), ROLE(DY) | ROLE(W), FP8_ROLE_NONE },
        [FP8_PLAN_GIVEN_X] = { SLOT(X) | SLOT(AMAX) | SLOT(FOUND_INF) | SLOT(WHEN), ROLE(X),
                               FP8_ROLE_X },
        [FP8_PLAN_GIVEN_W] = { SLOT(W) | SLOT(AMAX) | SLOT(FOUND_INF) | SLOT(WHEN), ROLE(W),
                               FP8_ROLE_W },
        [FP8_PLAN_GIVEN_DY] = { SLOT(DY) | SLOT(DBIAS) | SLOT(AMAX) | SLOT(FOUND_INF) | SLOT(WHEN),
                                ROLE(DY), FP8_ROLE_DY },
    };
    struct fp8_belongings has = table[pass];
    if (pass == FP8_PASS_WGRAD &&
        plan->scalings[FP8_ROLE_X][FP8_TRANSPOSED_COPY] == FP8_SCALING_NONE)
        has.slots |= SLOT(X) | SLOT(DY);
    if (plan->is_bf16 && pass == FP8_PASS_FPROP)
        has.slots |= SLOT(W);
    if (plan->is_bf16 && pass == FP8_PASS_DGRAD)
        has.slots |= SLOT(DY) | SLOT(W);
    return has;
}

/* A pass may name only the tensors and operands that its call brings; others would be NULL. */
static fp8_status check_owner(const struct fp8_checker *c, int arg)
{
    const struct fp8_belongings has = fp8_plan_belongings(c->plan, c->pass);
    const struct fp8_source *source = &c->step->args[arg];
    if (source->kind != FP8_FROM_ADDRESS && source->kind != FP8_FROM_LD &&
        source->kind != FP8_FROM_ROWS)
        return FP8_OK;
    const struct fp8_buffer *buffer = &c->plan->buffers[source->buffer];
    if (buffer->object == FP8_OBJECT_CALLER && !(has.slots >> buffer->slot & 1u))
        return fp8_plan_bad(c, arg, "this pass has no such tensor");
    if (buffer->object == FP8_OBJECT_STATE && has.filled == FP8_ROLE_NONE)
        return fp8_plan_bad(c, arg, "this pass has no state");
    if (buffer->object != FP8_OBJECT_OPERAND)
        return FP8_OK;
    if (!(has.roles >> buffer->role & 1u))
        return fp8_plan_bad(c, arg, "this pass has no such operand");
    if (c->step->op != FP8_OP_GEMM && buffer->role != has.filled)
        return fp8_plan_bad(c, arg, "this pass does not fill that operand");
    return FP8_OK;
}

static fp8_status check_own(const struct fp8_checker *c)
{
    switch (c->step->op) {
    case FP8_OP_AMAX:
        return check_amax(c);
    case FP8_OP_QUANTIZE:
        return check_quantize(c);
    case FP8_OP_FUSED:
        return check_fused(c);
    case FP8_OP_CAST:
        return check_cast(c);
    case FP8_OP_QUANTIZE_ROW:
        return check_quantize_row(c);
    case FP8_OP_LINE_AMAX:
        return check_line_amax(c);
    case FP8_OP_LINE_SCALES:
        return check_line_scales(c);
    case FP8_OP_QUANTIZE_LINES:
        return check_quantize_lines(c);
    case FP8_OP_QUANTIZE_BLOCK:
        return check_quantize_block(c);
    case FP8_OP_COLUMN_SUMS:
        return check_column_sums(c);
    case FP8_OP_GEMM:
        return fp8_plan_check_gemm(c);
    case FP8_OP_TRANSPOSE:
        return check_transpose(c);
    case FP8_OP_ROLL:
    case FP8_OP_STORE:
    case FP8_OP_SUM:
    case FP8_OP_COLUMN_MAXIMA:
    case FP8_OP_DEQUANTIZE:
    case FP8_OP_COUNT:
        break;
    }
    return fp8_plan_bad(c, 0, "the op is no step of a pass");
}

static fp8_status check_step(const struct fp8_checker *c)
{
    enum fp8_op op = c->step->op;
    for (int i = 0; i < fp8_op_arg_count(op); i++)
        FP8_TRY(check_owner(c, i));
    FP8_TRY(check_own(c));
    bool quantises = op != FP8_OP_GEMM && op != FP8_OP_COLUMN_SUMS && op != FP8_OP_TRANSPOSE;
    return quantises ? check_common(c) : FP8_OK;
}

/* ---- the layer ---- */

/* Values around every power of two. */
static fp8_status check_extents(struct fp8_checker *c, const struct fp8_step *step)
{
    c->step = step;
    for (int64_t power = 1; power < 2 * c->plan->max_tokens; power *= 2) {
        for (int64_t tokens = power - 1; tokens <= power + 1; tokens++) {
            c->tokens = fp8_min_i64(tokens, c->plan->max_tokens);
            FP8_TRY(check_step(c));
        }
    }
    return FP8_OK;
}

fp8_status fp8_plan_check(const char *path, const struct fp8_layer_plan *plan)
{
    struct fp8_checker c = { .path = path, .plan = plan };
    for (int pass = 0; pass < FP8_PLAN_COUNT; pass++) {
        c.pass = (fp8_pass)pass;
        for (int i = 0; i < plan->passes[pass].step_count; i++) {
            const struct fp8_step *step = &plan->passes[pass].steps[i];
            FP8_TRY(check_extents(&c, step));
            if (step->alternative)
                FP8_TRY(check_extents(&c, &step->alternative->step));
        }
        c.tokens = plan->max_tokens;
        FP8_TRY(fp8_plan_flow(&c));
    }
    return FP8_OK;
}
