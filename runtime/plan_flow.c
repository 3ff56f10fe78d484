/*
 * plan_flow.c - what the steps of a pass leave: for each other, for the operand, for dbias.
 *
 * In: a pass whose steps stay inside their buffers. Out: yes, or a sentence. Partial results are
 * read only after a step that leaves them, every part of the pass's operand is written by some
 * step, and a fused step does what the two do that it stands for.
 */
#include "runtime/plan_check.h"

static const char *const partial_names[] = { "partials",        "dbias_partials", "row_partials",
                                             "column_partials", "row_maxima",     "column_maxima" };
enum { NAMES = sizeof partial_names / sizeof partial_names[0] };

static bool leaves_partials(enum fp8_op op, int name)
{
    static const uint8_t left[FP8_OP_COUNT] = {
        [FP8_OP_AMAX] = 1u << 0 | 1u << 1,
        [FP8_OP_FUSED] = 1u << 0 | 1u << 1,
        [FP8_OP_CAST] = 1u << 1,
        [FP8_OP_QUANTIZE_BLOCK] = 1u << 1,
        [FP8_OP_LINE_AMAX] = 1u << 1 | 1u << 2 | 1u << 3,
        [FP8_OP_LINE_SCALES] = 1u << 4 | 1u << 5,
    };
    return left[op] >> name & 1u;
}

/* Whether a step before `end` leaves partials in this buffer. */
static bool left_before(const struct fp8_pass_plan *pass, int end, int buffer)
{
    for (int i = 0; i < end; i++) {
        const struct fp8_step *step = &pass->steps[i];
        for (int name = 0; name < NAMES; name++) {
            int arg = fp8_op_arg(step->op, partial_names[name]);
            if (arg >= 0 && leaves_partials(step->op, name) &&
                step->args[arg].kind == FP8_FROM_ADDRESS && step->args[arg].buffer == buffer)
                return true;
        }
    }
    return false;
}

static fp8_status check_partials_left(struct fp8_checker *c, const struct fp8_pass_plan *pass,
                                      int index)
{
    c->step = &pass->steps[index];
    for (int name = 0; name < NAMES; name++) {
        int arg = fp8_op_arg(c->step->op, partial_names[name]);
        if (arg < 0 || leaves_partials(c->step->op, name) || !fp8_is_given(c, arg))
            continue;
        if (!left_before(pass, index, c->step->args[arg].buffer))
            return fp8_plan_bad(c, arg, "no step before this one leaves them");
    }
    return FP8_OK;
}

/* Whether any step has this buffer as an output: an argument of the name of a part, or dbias. */
static bool is_written(const struct fp8_pass_plan *pass, const char *name, int buffer)
{
    for (int i = 0; i < pass->gemm; i++) {
        int arg = fp8_op_arg(pass->steps[i].op, name);
        if (arg >= 0 && pass->steps[i].args[arg].kind == FP8_FROM_ADDRESS &&
            pass->steps[i].args[arg].buffer == buffer)
            return true;
    }
    return false;
}

static fp8_status not_written(const struct fp8_checker *c, const char *what)
{
    return fp8_fail(FP8_ERR_BUNDLE,
                    "%s: layer '%s', pass %s: no step writes %s; rebuild the bundle", c->path,
                    c->plan->name, fp8_plan_pass_name(c->pass), what);
}

/* An operand is whole only if all its parts are written, and dbias is asked of the pass of dy. */
static fp8_status check_whole(const struct fp8_checker *c)
{
    const struct fp8_layer_plan *plan = c->plan;
    const struct fp8_pass_plan *pass = &plan->passes[c->pass];
    fp8_role role = fp8_plan_belongings(plan, c->pass).filled;
    if (role == FP8_ROLE_NONE)
        return FP8_OK;
    const fp8_scaling *scalings = plan->scalings[role];
    for (int part = 0; part < FP8_PART_COUNT; part++) {
        int buffer = plan->parts[role][part];
        if (part == FP8_PART_SCALES && scalings[FP8_ROW_COPY] != FP8_SCALING_TENSOR &&
            scalings[FP8_TRANSPOSED_COPY] != FP8_SCALING_TENSOR)
            continue;
        if (buffer >= 0 && !is_written(pass, fp8_part_names[part], buffer))
            return not_written(c, plan->buffers[buffer].name);
    }
    int dbias = plan->slots[FP8_SLOT_DBIAS];
    if (role == FP8_ROLE_DY && dbias >= 0 && !is_written(pass, "dbias", dbias))
        return not_written(c, "dbias");
    return FP8_OK;
}

/* A fused step does what its amax and the quantize after it do: where both have an argument of a
 * name, it is the same one. */
static fp8_status check_alternative(struct fp8_checker *c, const struct fp8_pass_plan *pass,
                                    int index)
{
    const struct fp8_step *fused = &pass->steps[index].alternative->step;
    const struct fp8_step *second = &pass->steps[index + 1];
    c->step = fused;
    if (index + 1 >= pass->gemm || second->op != FP8_OP_QUANTIZE)
        return fp8_plan_bad(c, 0, "it is the alternative of an amax that no quantize follows");
    for (int i = 0; i < fp8_op_arg_count(FP8_OP_FUSED); i++) {
        const char *name = fp8_op_arg_name(FP8_OP_FUSED, i);
        const struct fp8_step *like =
            fp8_op_arg(FP8_OP_QUANTIZE, name) >= 0 ? second : &pass->steps[index];
        int arg = fp8_op_arg(like->op, name);
        if (arg < 0)
            continue;
        const struct fp8_source *a = &fused->args[i], *b = &like->args[arg];
        if (a->kind != b->kind || a->buffer != b->buffer || a->literal != b->literal)
            return fp8_plan_bad(c, i, "it is not that of the steps that this one replaces");
    }
    const fp8_semantics *how = &fused->semantics, *wanted = &second->semantics;
    if (how->source_dtype != wanted->source_dtype || how->target_dtype != wanted->target_dtype)
        return fp8_plan_bad(c, 0, "its kernel has other dtypes than the steps that it replaces");
    return FP8_OK;
}

fp8_status fp8_plan_flow(struct fp8_checker *c)
{
    const struct fp8_pass_plan *pass = &c->plan->passes[c->pass];
    for (int i = 0; i < pass->step_count; i++) {
        FP8_TRY(check_partials_left(c, pass, i));
        if (pass->steps[i].alternative)
            FP8_TRY(check_alternative(c, pass, i));
    }
    bool is_list_given = c->pass < FP8_PASS_COUNT || pass->step_count > 0;
    return is_list_given ? check_whole(c) : FP8_OK;
}
