/*
 * manifest_dispatch.c - the choices of a gemm step: for each range of tokens, what may compute it.
 *
 * In: the "dispatch" array of a step whose dtypes are known. Out: ranges without gaps up to
 * max_tokens, each with its choices in order, cuBLASLt the last. Which of them a context can run is
 * for gemm_plan.c.
 */
#include <string.h>

#include "runtime/json_read.h"

static bool digit(char c, unsigned *value)
{
    static const char digits[] = "0123456789abcdef";
    const char *found = c ? strchr(digits, c) : NULL;
    *value = found ? (unsigned)(found - digits) : 0;
    return found != NULL;
}

/* The 64 bytes of a cublasLtMatmulAlgo_t. */
static fp8_status read_algo(struct fp8_reader *reader, const json_t *record,
                            struct fp8_choice *choice)
{
    const char *text;
    unsigned char bytes[sizeof choice->algo];
    bool good;
    FP8_TRY(fp8_read_string(reader, record, "algo", &text));
    FP8_TRY(fp8_read_integer(reader, record, "version", 1, INT64_MAX, &choice->version));
    good = strlen(text) == 2 * sizeof bytes;
    for (size_t i = 0; good && i < sizeof bytes; i++) {
        unsigned high, low;
        good = digit(text[2 * i], &high) && digit(text[2 * i + 1], &low);
        bytes[i] = (unsigned char)(high << 4 | low);
    }
    if (!good)
        return fp8_read_bad(reader, "'algo' is not %zu hex digits", 2 * sizeof bytes);
    memcpy(choice->algo, bytes, sizeof bytes);
    return FP8_OK;
}

static fp8_status check_kernel(const struct fp8_reader *reader, const struct fp8_step *step,
                               const struct fp8_kernel *kernel, bool accumulate)
{
    const fp8_semantics *has = &kernel->semantics, *wants = &step->semantics;
    if (has->source_dtype != wants->source_dtype || has->second_dtype != wants->second_dtype ||
        has->target_dtype != wants->target_dtype)
        return fp8_read_bad(
            reader, "kernel '%.100s' is %s x %s -> %s, the step %s x %s -> %s", kernel->name,
            fp8_dtype_name(has->source_dtype), fp8_dtype_name(has->second_dtype),
            fp8_dtype_name(has->target_dtype), fp8_dtype_name(wants->source_dtype),
            fp8_dtype_name(wants->second_dtype), fp8_dtype_name(wants->target_dtype));
    if (has->scaling != wants->scaling || has->second_scaling != wants->second_scaling)
        return fp8_read_bad(
            reader, "kernel '%.100s' is for scalings %s and %s, the step has %s and %s",
            kernel->name, fp8_scaling_names[has->scaling], fp8_scaling_names[has->second_scaling],
            fp8_scaling_names[wants->scaling], fp8_scaling_names[wants->second_scaling]);
    if (has->accumulate != accumulate)
        return fp8_read_bad(reader, "kernel '%.100s' %s", kernel->name,
                            accumulate ? "does not accumulate" : "accumulates");
    return FP8_OK;
}

static fp8_status read_generated(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                 const struct fp8_step *step, const json_t *record,
                                 struct fp8_choice *choice)
{
    FP8_TRY(fp8_manifest_kernel_named(reader, manifest, record, "kernel", FP8_OP_GEMM,
                                      &choice->overwrite));
    FP8_TRY(check_kernel(reader, step, choice->overwrite, false));
    if (!step->gemm->may_accumulate) {
        if (json_is_null(json_object_get(record, "accumulate_kernel")))
            return FP8_OK;
        return fp8_read_bad(reader,
                            "'accumulate_kernel' is not null, but the pass never accumulates");
    }
    FP8_TRY(fp8_manifest_kernel_named(reader, manifest, record, "accumulate_kernel", FP8_OP_GEMM,
                                      &choice->add));
    return check_kernel(reader, step, choice->add, true);
}

static fp8_status read_choice(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              const struct fp8_step *step, const json_t *record,
                              struct fp8_choice *choice)
{
    static const char *const backends[] = { "generated", "cublaslt" };
    static const char *const generated_keys[] = { "backend", "kernel",  "accumulate_kernel",
                                                  "reason",  "seconds", NULL };
    static const char *const cublaslt_keys[] = { "backend", "algo",    "version",
                                                 "reason",  "seconds", NULL };
    int backend = 0;
    if (!json_is_object(record))
        return fp8_read_keys(reader, record, cublaslt_keys);
    FP8_TRY(fp8_read_word(reader, record, "backend", backends, 2, &backend));
    choice->backend = (enum fp8_backend)backend;
    bool generated = choice->backend == FP8_BACKEND_GENERATED;
    FP8_TRY(fp8_read_keys(reader, record, generated ? generated_keys : cublaslt_keys));
    FP8_TRY(fp8_read_string(reader, record, "reason", &choice->reason));
    const json_t *seconds = json_object_get(record, "seconds");
    if (seconds && !json_is_number(seconds))
        return fp8_read_bad(reader, "'seconds' is no number");
    if (generated)
        return read_generated(reader, manifest, step, record, choice);
    if (json_object_get(record, "algo") || json_object_get(record, "version"))
        return read_algo(reader, record, choice);
    return FP8_OK;
}

static fp8_status read_choices(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                               const struct fp8_step *step, const json_t *record,
                               struct fp8_range *range)
{
    const json_t *array;
    FP8_TRY(fp8_read_array(reader, record, "choices", FP8_MAX_CHOICES, &array));
    size_t count = json_array_size(array);
    FP8_TRY(fp8_read_allocate(reader, count, sizeof *range->choices, (void **)&range->choices));
    for (size_t i = 0; i < count; i++) {
        size_t mark = fp8_read_enter(reader, "choices[%zu]", i);
        struct fp8_choice *choice = &range->choices[i];
        FP8_TRY(read_choice(reader, manifest, step, json_array_get(array, i), choice));
        if ((choice->backend == FP8_BACKEND_CUBLASLT) != (i + 1 == count))
            return fp8_read_bad(reader, "cublaslt is the last choice, and no other");
        range->choice_count++;
        fp8_read_leave(reader, mark);
    }
    return count > 0 ? FP8_OK : fp8_read_bad(reader, "'choices' is empty");
}

fp8_status fp8_manifest_dispatch(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                 const struct fp8_layer_plan *plan, const json_t *record,
                                 const struct fp8_step *step)
{
    static const char *const keys[] = { "min_tokens", "max_tokens", "dtype", "choices", NULL };
    struct fp8_gemm_step *gemm = step->gemm;
    const json_t *array;
    int64_t next = 1;
    FP8_TRY(fp8_read_array(reader, record, "dispatch", FP8_MAX_RANGES, &array));
    FP8_TRY(fp8_read_allocate(reader, json_array_size(array), sizeof *gemm->ranges,
                              (void **)&gemm->ranges));
    for (size_t i = 0; i < json_array_size(array); i++) {
        struct fp8_range *range = &gemm->ranges[i];
        size_t mark = fp8_read_enter(reader, "dispatch[%zu]", i);
        const json_t *entry = json_array_get(array, i);
        FP8_TRY(fp8_read_keys(reader, entry, keys));
        FP8_TRY(fp8_read_integer(reader, entry, "min_tokens", next, next, &range->min_tokens));
        FP8_TRY(fp8_read_integer(reader, entry, "max_tokens", next, plan->max_tokens,
                                 &range->max_tokens));
        FP8_TRY(fp8_read_string(reader, entry, "dtype", &range->dtype));
        FP8_TRY(read_choices(reader, manifest, step, entry, range));
        next = range->max_tokens + 1;
        gemm->range_count++;
        fp8_read_leave(reader, mark);
    }
    if (next != plan->max_tokens + 1)
        return fp8_read_bad(reader, "'dispatch' ends at %lld tokens, max_tokens is %lld",
                            (long long)next - 1, (long long)plan->max_tokens);
    return FP8_OK;
}
