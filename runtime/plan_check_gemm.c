/*
 * plan_check_gemm.c - the checks of plan_check.c for the step that multiplies.
 *
 * In: a gemm step of a pass, its buffers. Out: yes, or a sentence. Both sides must be the copies
 * that the pass reads, with the dtype and the scales that the recipe gives them; out, the stage and
 * the counter of tiles must hold what a kernel writes.
 */
#include "runtime/plan_check.h"

/* Which copy of which operand the gemm of a pass reads as a and as b. */
struct operand_use {
    fp8_role role;
    enum fp8_copy copy;
};
static const struct operand_use uses[FP8_PASS_COUNT][2] = {
    [FP8_PASS_FPROP] = { { FP8_ROLE_X, FP8_ROW_COPY }, { FP8_ROLE_W, FP8_ROW_COPY } },
    [FP8_PASS_WGRAD] = { { FP8_ROLE_DY, FP8_TRANSPOSED_COPY },
                         { FP8_ROLE_X, FP8_TRANSPOSED_COPY } },
    [FP8_PASS_DGRAD] = { { FP8_ROLE_DY, FP8_ROW_COPY }, { FP8_ROLE_W, FP8_TRANSPOSED_COPY } },
};

static bool is_buffer(const struct fp8_checker *c, int arg, int buffer)
{
    return fp8_is_given(c, arg) && buffer >= 0 && c->step->args[arg].buffer == buffer;
}

/* One side of the product, as the step says it. */
struct side {
    int pointer, ld, scales, scales_ld;
    fp8_dtype dtype;
    fp8_scaling scaling;
    bool transposed;
    int64_t rows; /* FP8: padded */
};

static fp8_status check_scales(const struct fp8_checker *c, struct operand_use use,
                               const struct side *side)
{
    static const enum fp8_part vectors[] = { FP8_PART_ROW_SCALES, FP8_PART_TRANSPOSED_SCALES };
    enum fp8_part part = side->scaling == FP8_SCALING_TENSOR ? FP8_PART_SCALES : vectors[use.copy];
    if (!is_buffer(c, side->scales, c->plan->parts[use.role][part]))
        return fp8_plan_bad(c, side->scales, "they are not the scales of that operand");
    if (side->scaling != FP8_SCALING_BLOCK && side->scaling != FP8_SCALING_TILE)
        return FP8_OK;
    const struct fp8_source *ld = &c->step->args[side->scales_ld];
    if (ld->kind != FP8_FROM_LD || ld->buffer != c->step->args[side->scales].buffer)
        return fp8_plan_bad(c, side->scales_ld, "it is not the ld of its buffer");
    return FP8_OK;
}

static fp8_status check_side(const struct fp8_checker *c, struct operand_use use,
                             const struct side *side, int64_t depth)
{
    static const enum fp8_part copies[] = { FP8_PART_ROW, FP8_PART_TRANSPOSED };
    static const enum fp8_slot slots[] = {
        [FP8_ROLE_X] = FP8_SLOT_X, [FP8_ROLE_W] = FP8_SLOT_W, [FP8_ROLE_DY] = FP8_SLOT_DY
    };
    bool is_bf16 = c->plan->scalings[use.role][use.copy] == FP8_SCALING_NONE;
    int buffer =
        is_bf16 ? c->plan->slots[slots[use.role]] : c->plan->parts[use.role][copies[use.copy]];
    if (!is_buffer(c, side->pointer, buffer))
        return fp8_plan_bad(c, side->pointer, "it is not what this pass reads");
    if (side->scaling != c->plan->scalings[use.role][use.copy])
        return fp8_plan_bad(c, side->pointer, "its scaling is not that of the recipe");
    if (side->transposed != (is_bf16 && use.copy == FP8_TRANSPOSED_COPY))
        return fp8_plan_bad(c, side->pointer,
                            "whether it is transposed is not what this pass reads");
    if (is_bf16) {
        if (side->dtype != FP8_DTYPE_BF16)
            return fp8_plan_bad(c, side->pointer, "without a copy of FP8 it is bf16");
        FP8_NEEDS(c,
                  { side->pointer, side->ld, false, FP8_DTYPE_BF16,
                    side->transposed ? depth : side->rows, side->transposed ? side->rows : depth });
        return FP8_OK;
    }
    FP8_NEEDS(c,
              { side->pointer, side->ld, false, side->dtype, side->rows, fp8_round_up(depth, 16) });
    return check_scales(c, use, side);
}

static fp8_status check_stage(const struct fp8_checker *c, int64_t padded)
{
    const struct fp8_gemm_step *gemm = c->step->gemm;
    const struct fp8_buffer *stage = &c->plan->buffers[gemm->stage];
    if (fp8_dim_at(&stage->cols, c->tokens) < padded ||
        (c->tokens > 0 && fp8_dim_at(&stage->rows, c->tokens) < 1) ||
        fp8_dim_at(&stage->cols, c->tokens) * (int64_t)fp8_dtype_bytes(stage->dtype) % 16 != 0)
        return fp8_plan_bad(c, FP8_GEMM_out, "the stage does not hold a row of it");
    const struct fp8_semantics *how = &c->step->semantics;
    if ((how->scaling == FP8_SCALING_ROW || how->second_scaling == FP8_SCALING_ROW) &&
        stage->dtype != FP8_DTYPE_FP32)
        return fp8_plan_bad(c, FP8_GEMM_out, "the stage of a product with scales a row is fp32");
    if (!fp8_is_given(c, FP8_GEMM_bias))
        return FP8_OK;
    if (gemm->stage_bias < 0)
        return fp8_plan_bad(c, FP8_GEMM_bias, "there is no stage_bias");
    const struct fp8_buffer *bias = &c->plan->buffers[gemm->stage_bias];
    if (bias->dtype != FP8_DTYPE_BF16 || fp8_dim_at(&bias->cols, c->tokens) < padded)
        return fp8_plan_bad(c, FP8_GEMM_bias, "stage_bias does not hold it");
    if (stage->dtype != FP8_DTYPE_FP32)
        return fp8_plan_bad(c, FP8_GEMM_bias, "what it is added to in the stage is fp32");
    return FP8_OK;
}

/* The counter of tiles: kernels of the bundle may take it, products of bf16 have none. */
static fp8_status check_counter(const struct fp8_checker *c)
{
    bool needed = c->step->semantics.scaling != FP8_SCALING_NONE;
    FP8_NEEDS(c, { FP8_GEMM_tiles, FP8_NO_LD, !needed, FP8_DTYPE_UINT32, 1, FP8_COUNTER_WORDS });
    if (needed && c->step->args[FP8_GEMM_epoch].kind != FP8_FROM_EPOCH)
        return fp8_plan_bad(c, FP8_GEMM_epoch, "it is not 'epoch'");
    return FP8_OK;
}

fp8_status fp8_plan_check_gemm(const struct fp8_checker *c)
{
    const struct fp8_semantics *how = &c->step->semantics;
    int64_t rows = fp8_plan_value(c, FP8_GEMM_rows), cols = fp8_plan_value(c, FP8_GEMM_cols);
    int64_t depth = fp8_plan_value(c, FP8_GEMM_depth), padded = fp8_round_up(cols, 16);
    const struct operand_use *use = uses[c->pass];
    const struct side a = { FP8_GEMM_a,        FP8_GEMM_a_ld,
                            FP8_GEMM_a_scales, FP8_GEMM_a_scales_ld,
                            how->source_dtype, how->scaling,
                            how->transposed,   rows };
    const struct side b = { FP8_GEMM_b,
                            FP8_GEMM_b_ld,
                            FP8_GEMM_b_scales,
                            FP8_GEMM_b_scales_ld,
                            how->second_dtype,
                            how->second_scaling,
                            how->second_transposed,
                            how->second_scaling == FP8_SCALING_NONE ? cols : padded };
    if ((how->scaling == FP8_SCALING_NONE) != (how->second_scaling == FP8_SCALING_NONE))
        return fp8_plan_bad(c, FP8_GEMM_b, "one operand is bf16 and the other is not");
    FP8_TRY(check_side(c, use[0], &a, depth));
    FP8_TRY(check_side(c, use[1], &b, depth));
    FP8_NEEDS(c, { FP8_GEMM_bias, FP8_NO_LD, true, FP8_DTYPE_BF16, 1, cols },
              { FP8_GEMM_out, FP8_GEMM_out_ld, false, how->target_dtype, rows, cols });
    FP8_TRY(check_counter(c));
    return check_stage(c, padded);
}
