/*
 * gemm_lt_problem.c - see gemm_lt_problem.h: the rules of cuBLASLt on Hopper.
 *
 * FP8: depth % 16 (our buffers have zeros behind it), bytes of an output row % 16. Scales by block:
 * rows % 8, and the library works out where the scales lie from the rows it is given; for a part of
 * the rows they are copied together; known since CUDA 12.9, on compute capability 9.0 only.
 *
 * Scales by row are not given to the library, whose mode for them multiplies by one vector and then
 * by the other: with the larger scale first a sum overflows that the result does not. The plain
 * sums go to a stage of fp32, and the store takes the smaller scale first.
 *
 * What is moved lies at the head of the plan's workspace; the algorithms get the rest.
 */
#include "runtime/gemm_lt_problem.h"

#include "runtime/driver.h"

enum { DEPTH_PAD = 16, BLOCK = FP8_BLOCK, ROWS_PAD = FP8_PAD_BLOCK_SCALES };
static const uint64_t scaling_version = 120900;

static const fp8_semantics *semantics_of(const struct fp8_gemm_plan *plan)
{
    return &plan->step->semantics;
}

static bool has(const struct fp8_gemm_plan *plan, fp8_scaling scaling)
{
    return semantics_of(plan)->scaling == scaling || semantics_of(plan)->second_scaling == scaling;
}

static bool by_block(const struct fp8_gemm_plan *plan)
{
    return has(plan, FP8_SCALING_BLOCK) || has(plan, FP8_SCALING_TILE);
}

static bool is_bf16(const struct fp8_gemm_plan *plan)
{
    return semantics_of(plan)->source_dtype == FP8_DTYPE_BF16;
}

static int64_t element_bytes(const struct fp8_gemm_plan *plan)
{
    return (int64_t)fp8_dtype_bytes(semantics_of(plan)->target_dtype);
}

fp8_status fp8_lt_check_scaling(const struct fp8_gemm_plan *plan)
{
    const struct fp8_context *context = plan->context;
    uint64_t version = fp8_lt_version(context->lt);
    if (!by_block(plan))
        return FP8_OK;
    if (has(plan, FP8_SCALING_TENSOR))
        return fp8_fail(
            FP8_ERR_CUBLASLT,
            "layer '%s', %s: w has a scale for each shard, and cuBLASLt has no product of such "
            "scales "
            "along the contraction; generated kernels are for compute capability 9.0, this is "
            "%d.%d, with a cubin for it in the bundle; take weight_scale = \"tensor\"",
            plan->layer->name, fp8_pass_name(plan->pass), context->arch / 10, context->arch % 10);
    if (version < scaling_version)
        return fp8_fail(
            FP8_ERR_CUBLASLT,
            "layer '%s', %s: scales by block need cuBLASLt %llu (CUDA 12.9) or newer, this "
            "is %llu; install a newer one, or take a recipe with one scale a tensor",
            plan->layer->name, fp8_pass_name(plan->pass), (unsigned long long)scaling_version,
            (unsigned long long)version);
    if (context->arch != 90)
        return fp8_fail(
            FP8_ERR_CUBLASLT,
            "layer '%s', %s: cuBLASLt has scales by block on compute capability 9.0, not on "
            "%d.%d; take a recipe with one scale a tensor",
            plan->layer->name, fp8_pass_name(plan->pass), context->arch / 10, context->arch % 10);
    return FP8_OK;
}

bool fp8_lt_scaled_by_store(const struct fp8_gemm_plan *plan)
{
    return has(plan, FP8_SCALING_ROW);
}

/* ---- extents ---- */

bool fp8_lt_way_exists(const struct fp8_gemm_plan *plan, enum fp8_lt_way way, int64_t rows,
                       int64_t cols)
{
    const struct fp8_gemm_step *gemm = plan->step->gemm;
    if (way == FP8_LT_STAGED)
        return true;
    if (fp8_lt_scaled_by_store(plan))
        return false;
    if (!is_bf16(plan) && cols * element_bytes(plan) % FP8_LT_OUT_ALIGN != 0)
        return false;
    if (by_block(plan) && rows % ROWS_PAD != 0)
        return false;
    if (semantics_of(plan)->second_scaling == FP8_SCALING_BLOCK && cols % ROWS_PAD != 0)
        return false;
    if (way == FP8_LT_IN_PLACE)
        return true;
    return gemm->may_accumulate && gemm->accumulate.stage_dtype == semantics_of(plan)->target_dtype;
}

/* What the library is told; a tensor without a scale has scale 1. */
static fp8_scaling told_scaling(fp8_scaling scaling)
{
    return scaling == FP8_SCALING_ROW ? FP8_SCALING_TENSOR : scaling;
}

struct fp8_lt_problem fp8_lt_base_problem(const struct fp8_gemm_plan *plan, const fp8_value *args,
                                          void *workspace, size_t workspace_bytes)
{
    const fp8_semantics *how = semantics_of(plan);
    int64_t depth = args[FP8_GEMM_depth].i;
    if (!is_bf16(plan))
        depth = fp8_round_up(depth, by_block(plan) ? BLOCK : DEPTH_PAD);
    return (struct fp8_lt_problem){
        .a = { how->source_dtype, how->transposed, told_scaling(how->scaling),
               args[FP8_GEMM_a_ld].i, args[FP8_GEMM_a].p, NULL },
        .b = { how->second_dtype, how->second_transposed, told_scaling(how->second_scaling),
               args[FP8_GEMM_b_ld].i, args[FP8_GEMM_b].p, NULL },
        .fast = plan->step->gemm->accumulation == FP8_ACCUMULATION_FAST,
        .rows = args[FP8_GEMM_rows].i,
        .cols = args[FP8_GEMM_cols].i,
        .depth = depth,
        .workspace = workspace,
        .workspace_bytes = workspace_bytes,
    };
}

void fp8_lt_write_in_place(struct fp8_lt_problem *problem, const struct fp8_gemm_plan *plan,
                           const fp8_value *args)
{
    problem->out_dtype = semantics_of(plan)->target_dtype;
    problem->out = args[FP8_GEMM_out].p;
    problem->out_ld = args[FP8_GEMM_out_ld].i;
}

/* FP8 has zeros behind its rows and columns; the caller's bf16 ends where it ends. */
void fp8_lt_write_staged(struct fp8_lt_problem *problem, const struct fp8_gemm_plan *plan,
                         void *stage, int64_t stage_ld)
{
    bool by_8 = semantics_of(plan)->second_scaling == FP8_SCALING_BLOCK;
    problem->accumulate = false;
    problem->has_bias = false;
    problem->out_dtype = plan->step->gemm->overwrite.stage_dtype;
    problem->out = stage;
    problem->out_ld = stage_ld;
    if (!is_bf16(plan))
        problem->cols = fp8_round_up(problem->cols, by_8 ? ROWS_PAD : FP8_LT_COLS_PAD);
}

/* ---- chunks of rows ---- */

int64_t fp8_lt_chunk(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                     int64_t stage_rows)
{
    int64_t padded = by_block(plan) ? fp8_round_up(problem->rows, ROWS_PAD) : problem->rows;
    if (stage_rows >= padded)
        return padded;
    if (!by_block(plan))
        return stage_rows < ROWS_PAD ? stage_rows : stage_rows / ROWS_PAD * ROWS_PAD;
    /* copies of scales take a quarter of the workspace at most */
    int64_t scale_bytes = fp8_ceil_div(problem->depth, BLOCK) * (int64_t)sizeof(float);
    int64_t limit = (int64_t)(problem->workspace_bytes / 4) / scale_bytes;
    return fp8_min_i64(stage_rows, limit) / ROWS_PAD * ROWS_PAD;
}

void fp8_lt_take_rows(struct fp8_lt_problem *problem, const fp8_value *args, int64_t first,
                      int64_t rows)
{
    const struct fp8_lt_operand *a = &problem->a;
    int64_t elements = a->transposed ? first : first * a->ld;
    bool block = a->scaling == FP8_SCALING_BLOCK || problem->b.scaling == FP8_SCALING_BLOCK;
    problem->rows = block ? fp8_round_up(rows, ROWS_PAD) : rows;
    problem->a.data =
        (const char *)args[FP8_GEMM_a].p + elements * (int64_t)fp8_dtype_bytes(a->dtype);
}

/* ---- scales ---- */

/* `bytes` from the head of what is left of the workspace. */
static void *take_workspace(struct fp8_lt_problem *problem, int64_t bytes)
{
    size_t taken = fp8_align_up((size_t)bytes, FP8_PART_ALIGN);
    void *memory = problem->workspace;
    if (taken > problem->workspace_bytes)
        taken = problem->workspace_bytes;
    if (memory != NULL)
        problem->workspace = (char *)memory + taken;
    problem->workspace_bytes -= taken;
    return memory;
}

/* For a question without memory; the heuristic may ask whether there are scales, and how they are
 * aligned. */
static const float *anywhere(void)
{
    return (const float *)(uintptr_t)FP8_PART_ALIGN;
}

static const float *scales_at(fp8_scaling scaling, const float *scales, int64_t first)
{
    if (scales == NULL)
        return scaling == FP8_SCALING_TENSOR ? NULL : anywhere();
    return scaling == FP8_SCALING_TENSOR ? scales + FP8_SCALES_SCALE_INV : scales + first;
}

/* Scales [k block][row] of some rows, copied as if there were no others. */
static fp8_status gather_scales(const struct fp8_gemm_plan *plan, struct fp8_lt_problem *problem,
                                int64_t scales_ld, const float **scales)
{
    const float *source = *scales;
    int64_t lines = fp8_ceil_div(problem->depth, BLOCK);
    int64_t width = problem->rows * (int64_t)sizeof(float);
    float *target = take_workspace(problem, lines * width);
    *scales = target != NULL ? target : anywhere();
    if (target == NULL)
        return FP8_OK;
    return fp8_copy_2d(plan->context, target, width, source, scales_ld * (int64_t)sizeof(float),
                       width, lines, problem->stream);
}

fp8_status fp8_lt_place_scales(const struct fp8_gemm_plan *plan, struct fp8_lt_problem *problem,
                               const fp8_value *args, int64_t first)
{
    const fp8_semantics *how = semantics_of(plan);
    const float *a = args[FP8_GEMM_a_scales].p, *b = args[FP8_GEMM_b_scales].p;
    int64_t a_ld = args[FP8_GEMM_a_scales_ld].i;
    if (how->scaling == FP8_SCALING_NONE || fp8_lt_scaled_by_store(plan))
        return FP8_OK;
    problem->a.scales = scales_at(how->scaling, a, first);
    problem->b.scales = scales_at(how->second_scaling, b, 0);
    if (how->scaling == FP8_SCALING_BLOCK && problem->rows != a_ld)
        FP8_TRY(gather_scales(plan, problem, a_ld, &problem->a.scales));
    return FP8_OK;
}
