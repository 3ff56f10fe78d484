/*
 * manifest_steps.c - the steps of one pass of a layer record.
 *
 * In: the JSON array, the kernels and buffers read before it. Out: steps in which every argument is
 * a source that a call can evaluate without a name: a literal, M, a flag of the call, the address,
 * leading dim or rows of a buffer. The choices of a gemm are read in manifest_dispatch.c; what the
 * steps do with the buffers is checked in plan_check.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/json_read.h"

static const int64_t extent_limit = FP8_MANIFEST_EXTENT_LIMIT;

static void use_buffer(struct fp8_pass_plan *pass, int buffer)
{
    for (int i = 0; i < pass->buffer_count; i++) {
        if (pass->buffers[i] == buffer)
            return;
    }
    pass->buffers[pass->buffer_count++] = (int8_t)buffer;
}

static fp8_status source_of_text(struct fp8_reader *reader, const struct fp8_layer_plan *plan,
                                 struct fp8_pass_plan *pass, const char *text,
                                 struct fp8_source *source)
{
    if (strcmp(text, "M") == 0) {
        source->kind = FP8_FROM_TOKENS;
        return FP8_OK;
    }
    if (strcmp(text, "accumulate") == 0) {
        source->kind = FP8_FROM_ACCUMULATE;
        return FP8_OK;
    }
    if (strcmp(text, "epoch") == 0) {
        source->kind = FP8_FROM_EPOCH;
        return FP8_OK;
    }
    const char *dot = strrchr(text, '.');
    size_t length = dot ? (size_t)(dot - text) : strlen(text);
    int buffer = fp8_manifest_find_buffer(plan, text, length);
    if (buffer < 0)
        return fp8_read_bad(reader, "there is no buffer '%.*s'", (int)length, text);
    if (!dot)
        source->kind = FP8_FROM_ADDRESS;
    else if (strcmp(dot, ".ld") == 0)
        source->kind = FP8_FROM_LD;
    else if (strcmp(dot, ".rows") == 0)
        source->kind = FP8_FROM_ROWS;
    else
        return fp8_read_bad(reader, "'%.100s' is no value; buffers have .ld and .rows", text);
    source->buffer = (int8_t)buffer;
    pass->uses_state = pass->uses_state || plan->buffers[buffer].object == FP8_OBJECT_STATE;
    use_buffer(pass, buffer);
    return FP8_OK;
}

static fp8_status read_source(struct fp8_reader *reader, const struct fp8_layer_plan *plan,
                              struct fp8_pass_plan *pass, const json_t *value,
                              enum fp8_arg_type type, struct fp8_source *source)
{
    if (!value)
        return fp8_read_bad(reader, "the argument is missing");
    *source = (struct fp8_source){ .kind = FP8_FROM_LITERAL, .buffer = -1 };
    if (json_is_null(value)) {
        if (type != FP8_ARG_POINTER)
            return fp8_read_bad(reader, "null is no integer");
        return FP8_OK;
    }
    if (json_is_integer(value)) {
        source->literal = json_integer_value(value);
        if (type == FP8_ARG_POINTER)
            return fp8_read_bad(reader, "a number is no pointer");
        if (source->literal < 0 || source->literal > extent_limit ||
            (type == FP8_ARG_INT32 && source->literal > INT32_MAX))
            return fp8_read_bad(reader, "%lld is out of range", (long long)source->literal);
        return FP8_OK;
    }
    if (!json_is_string(value))
        return fp8_read_bad(reader, "this is no argument");
    FP8_TRY(source_of_text(reader, plan, pass, json_string_value(value), source));
    if ((source->kind == FP8_FROM_ADDRESS) != (type == FP8_ARG_POINTER))
        return fp8_read_bad(reader, "'%.100s' is %s", json_string_value(value),
                            type == FP8_ARG_POINTER ? "no pointer" : "no integer");
    if (type == FP8_ARG_INT32 && source->kind != FP8_FROM_ACCUMULATE)
        return fp8_read_bad(reader, "'%.100s' may be beyond 32 bits", json_string_value(value));
    return FP8_OK;
}

static fp8_status read_args(struct fp8_reader *reader, const struct fp8_layer_plan *plan,
                            struct fp8_pass_plan *pass, const json_t *record, struct fp8_step *step)
{
    const json_t *args;
    FP8_TRY(fp8_read_object(reader, record, "args", &args));
    size_t mark = fp8_read_enter(reader, "args");
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)args, key, value)
    {
        if (fp8_op_arg(step->op, key) < 0)
            return fp8_read_bad(reader, "op '%s' has no argument '%.100s'", fp8_op_names[step->op],
                                key);
    }
    for (int i = 0; i < fp8_op_arg_count(step->op); i++) {
        const char *name = fp8_op_arg_name(step->op, i);
        size_t inner = fp8_read_enter(reader, "%s", name);
        FP8_TRY(read_source(reader, plan, pass, json_object_get(args, name),
                            fp8_op_arg_type(step->op, i), &step->args[i]));
        fp8_read_leave(reader, inner);
    }
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

fp8_status fp8_manifest_kernel_named(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                     const json_t *record, const char *key, enum fp8_op op,
                                     const struct fp8_kernel **kernel)
{
    const char *name = json_string_value(json_object_get(record, key));
    if (!name)
        return fp8_read_bad(reader, "'%s' names no kernel", key);
    *kernel = fp8_manifest_kernel(manifest, name);
    if (!*kernel)
        return fp8_read_bad(reader, "there is no kernel '%.100s'", name);
    if ((*kernel)->op != op)
        return fp8_read_bad(reader, "kernel '%.100s' implements '%s', not '%s'", name,
                            fp8_op_names[(*kernel)->op], fp8_op_names[op]);
    return FP8_OK;
}

static fp8_status read_workspace_name(struct fp8_reader *reader, const struct fp8_layer_plan *plan,
                                      struct fp8_pass_plan *pass, const json_t *record,
                                      const char *key, int8_t *buffer)
{
    const char *name = json_string_value(json_object_get(record, key));
    int found = name ? fp8_manifest_find_buffer(plan, name, strlen(name)) : -1;
    if (found < 0 || plan->buffers[found].object != FP8_OBJECT_WORKSPACE)
        return fp8_read_bad(reader, "'%s' names no workspace buffer", key);
    *buffer = (int8_t)found;
    pass->gemm_buffers |= 1ull << found;
    use_buffer(pass, found);
    return FP8_OK;
}

static fp8_status read_store(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                             const struct fp8_layer_plan *plan, const json_t *record,
                             const char *key, const struct fp8_step *step, struct fp8_store *store)
{
    static const char *const keys[] = { "kernel", "stage_dtype", NULL };
    const json_t *object;
    FP8_TRY(fp8_read_object(reader, record, key, &object));
    size_t mark = fp8_read_enter(reader, "%s", key);
    FP8_TRY(fp8_read_keys(reader, object, keys));
    FP8_TRY(fp8_manifest_kernel_named(reader, manifest, object, "kernel", FP8_OP_STORE,
                                      &store->kernel));
    FP8_TRY(fp8_read_dtype(reader, object, "stage_dtype", &store->stage_dtype));
    const fp8_semantics *how = &store->kernel->semantics;
    bool accumulate = strcmp(key, "accumulate") == 0;
    if (how->source_dtype != store->stage_dtype || how->accumulate != accumulate ||
        how->target_dtype != step->semantics.target_dtype)
        return fp8_read_bad(reader, "kernel '%.100s' stores other dtypes or in another way",
                            store->kernel->name);
    if (plan->buffers[step->gemm->stage].dtype != store->stage_dtype)
        return fp8_read_bad(reader, "stage_dtype is not the dtype of the stage");
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

const char *const fp8_accumulation_names[FP8_ACCUMULATION_COUNT] = { "", "fast", "split", "256",
                                                                     "512" };

static fp8_status read_gemm(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                            const struct fp8_layer_plan *plan, struct fp8_pass_plan *pass,
                            const json_t *record, struct fp8_step *step)
{
    static const char *const store_keys[] = { "overwrite", "accumulate", NULL };
    int accumulation = 0; /* enum fp8_accumulation */
    FP8_TRY(fp8_read_allocate(reader, 1, sizeof *step->gemm, (void **)&step->gemm));
    struct fp8_gemm_step *gemm = step->gemm;
    gemm->stage_bias = -1;
    FP8_TRY(fp8_read_dtype(reader, record, "a_dtype", &step->semantics.source_dtype));
    FP8_TRY(fp8_read_dtype(reader, record, "b_dtype", &step->semantics.second_dtype));
    FP8_TRY(fp8_read_dtype(reader, record, "out_dtype", &step->semantics.target_dtype));
    FP8_TRY(fp8_manifest_gemm_semantics(reader, record, &step->semantics));
    FP8_TRY(fp8_read_word(reader, record, "accumulation", fp8_accumulation_names,
                          FP8_ACCUMULATION_COUNT, &accumulation));
    gemm->accumulation = (fp8_accumulation)accumulation;
    FP8_TRY(read_workspace_name(reader, plan, pass, record, "stage", &gemm->stage));
    if (!json_is_null(json_object_get(record, "stage_bias")))
        FP8_TRY(read_workspace_name(reader, plan, pass, record, "stage_bias", &gemm->stage_bias));
    FP8_TRY(read_workspace_name(reader, plan, pass, record, "gemm_workspace", &gemm->workspace));
    const json_t *store;
    FP8_TRY(fp8_read_object(reader, record, "store", &store));
    size_t mark = fp8_read_enter(reader, "store");
    FP8_TRY(fp8_read_keys(reader, store, store_keys));
    FP8_TRY(read_store(reader, manifest, plan, store, "overwrite", step, &gemm->overwrite));
    gemm->may_accumulate = step->args[FP8_GEMM_accumulate].kind == FP8_FROM_ACCUMULATE;
    if (gemm->may_accumulate)
        FP8_TRY(read_store(reader, manifest, plan, store, "accumulate", step, &gemm->accumulate));
    else if (!json_is_null(json_object_get(store, "accumulate")))
        return fp8_read_bad(reader, "'accumulate' is not null, but the pass never accumulates");
    fp8_read_leave(reader, mark);
    return fp8_manifest_dispatch(reader, manifest, plan, record, step);
}

/* Kernels of both formats are told which: the argument says what the record says. */
static fp8_status check_format(struct fp8_reader *reader, const struct fp8_step *step)
{
    const int index = fp8_op_arg(step->op, "e5m2");
    if (index < 0)
        return FP8_OK;
    const struct fp8_source *source = &step->args[index];
    const int64_t wanted = step->kernel->semantics.target_dtype == FP8_DTYPE_E5M2;
    if (source->kind == FP8_FROM_LITERAL && source->literal == wanted)
        return FP8_OK;
    return fp8_read_bad(reader, "argument 'e5m2' is not %lld, but kernel '%.100s' makes %s",
                        (long long)wanted, step->kernel->name,
                        fp8_dtype_name(step->kernel->semantics.target_dtype));
}

/* The fused step that may stand for this amax and the quantize after it. */
static fp8_status read_alternative(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                   const struct fp8_layer_plan *plan, struct fp8_pass_plan *pass,
                                   const json_t *record, struct fp8_step *step)
{
    static const char *const keys[] = { "kernel", "args", "elements_per_sm", NULL };
    struct fp8_alternative *made;
    const json_t *object;
    FP8_TRY(fp8_read_object(reader, record, "alternative", &object));
    if (step->op != FP8_OP_AMAX)
        return fp8_read_bad(reader, "'alternative' belongs to steps of op 'amax'");
    FP8_TRY(fp8_read_allocate(reader, 1, sizeof *made, (void **)&made));
    size_t mark = fp8_read_enter(reader, "alternative");
    FP8_TRY(fp8_read_keys(reader, object, keys));
    made->step.op = FP8_OP_FUSED;
    FP8_TRY(
        fp8_read_integer(reader, object, "elements_per_sm", 1, INT32_MAX, &made->elements_per_sm));
    FP8_TRY(read_args(reader, plan, pass, object, &made->step));
    FP8_TRY(fp8_manifest_kernel_named(reader, manifest, object, "kernel", FP8_OP_FUSED,
                                      &made->step.kernel));
    FP8_TRY(check_format(reader, &made->step));
    made->step.semantics = made->step.kernel->semantics;
    step->alternative = made;
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

static fp8_status read_step(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                            const struct fp8_layer_plan *plan, struct fp8_pass_plan *pass,
                            const json_t *record)
{
    static const char *const kernel_keys[] = {
        "op", "kernel", "args", "reason", "alternative", NULL
    };
    static const char *const gemm_keys[] = {
        "op",        "args",         "reason",       "a_dtype",      "b_dtype",  "out_dtype",
        "stage",     "accumulation", "stage_bias",   "store",        "dispatch", "gemm_workspace",
        "a_scaling", "b_scaling",    "a_transposed", "b_transposed", NULL
    };
    const char *reason;
    int op = 0;
    struct fp8_step *step = &pass->steps[pass->step_count];
    FP8_TRY(fp8_read_word(reader, record, "op", fp8_op_names, FP8_OP_COUNT, &op));
    step->op = (enum fp8_op)op;
    FP8_TRY(fp8_read_keys(reader, record, step->op == FP8_OP_GEMM ? gemm_keys : kernel_keys));
    if (json_object_get(record, "reason"))
        FP8_TRY(fp8_read_string(reader, record, "reason", &reason));
    FP8_TRY(read_args(reader, plan, pass, record, step));
    if (step->op == FP8_OP_GEMM) {
        pass->gemm = pass->step_count;
        FP8_TRY(read_gemm(reader, manifest, plan, pass, record, step));
    } else {
        FP8_TRY(
            fp8_manifest_kernel_named(reader, manifest, record, "kernel", step->op, &step->kernel));
        step->semantics = step->kernel->semantics;
        FP8_TRY(check_format(reader, step));
        if (json_object_get(record, "alternative"))
            FP8_TRY(read_alternative(reader, manifest, plan, pass, record, step));
    }
    pass->step_count++;
    return FP8_OK;
}

/* ---- lists ---- */

fp8_status fp8_manifest_steps(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              struct fp8_layer_plan *plan, const json_t *list, const char *key,
                              fp8_pass index)
{
    struct fp8_pass_plan *pass = &plan->passes[index];
    const json_t *steps;
    FP8_TRY(fp8_read_array(reader, list, key, FP8_MAX_STEPS, &steps));
    size_t mark = fp8_read_enter(reader, "%s", key);
    pass->gemm = -1;
    for (size_t i = 0; i < json_array_size(steps); i++) {
        size_t inner = fp8_read_enter(reader, "[%zu]", i);
        if (pass->gemm >= 0)
            return fp8_read_bad(reader, "nothing may follow the gemm of a pass");
        FP8_TRY(read_step(reader, manifest, plan, pass, json_array_get(steps, i)));
        fp8_read_leave(reader, inner);
    }
    bool has_gemm = index == FP8_PASS_FPROP || index == FP8_PASS_WGRAD || index == FP8_PASS_DGRAD;
    if (has_gemm != (pass->gemm >= 0))
        return fp8_read_bad(reader, "the pass %s",
                            has_gemm ? "has no gemm" : "may not have a gemm");
    if (index != FP8_PASS_FPROP && has_gemm && pass->step_count != 1)
        return fp8_read_bad(reader, "the pass has steps beside its gemm");
    if (pass->gemm < 0)
        pass->gemm = pass->step_count;
    fp8_read_leave(reader, mark);
    return FP8_OK;
}
