/*
 * gemm_cublaslt.c - a product through cuBLASLt: which algorithm, in place or through the stage.
 *
 * At creation the heuristic is asked once for every way to write the output in place; its
 * candidates are kept in its order, behind a measured one where the plan has one for this version
 * of the library. A call tries them until one is accepted and remembers that one; the memory is one
 * atomic per way, so threads need no lock. If all refuse, the heuristic is asked for the exact
 * problem; only then the call fails. The library loads a kernel when it runs it first, perhaps
 * inside the capture of a graph: the first run of each algorithm is in the relaxed capture mode.
 *
 * The output goes in place where cuBLASLt's rules allow it (address, ld and row bytes multiples of
 * 16). Elsewhere it goes to the stage, whose rows are padded, in chunks of rows, and a store kernel
 * takes it from there: nothing outside the caller's tensor is ever touched. An output with a bias
 * and a 16-bit one that accumulates are staged in fp32, and the store adds, so that they are
 * rounded once. That is also the way of shapes and dtypes to which the library adds no bias, and of
 * scales by row, which the store applies.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/gemm_lt_problem.h"

enum { CHOICES = 8, WAY_COUNT = FP8_LT_WAY_COUNT };

static const char *const way_names[WAY_COUNT] = { "in place", "in place, accumulating", "staged" };

struct variant {
    _Atomic int good;         /* the choice that worked last */
    _Atomic unsigned started; /* bit = choice: it was run before */
    int count;
    bool is_measured; /* the first is the plan's, the others the heuristic's */
    struct fp8_lt_choice choices[CHOICES];
};

struct fp8_lt_range {
    /* [has_bias][unaligned]; staged has no bias, only bf16 has unaligned */
    struct variant variants[WAY_COUNT][2][2];
    char name[96];
    atomic_bool staged_asked; /* else the first output that needs the stage asks */
    pthread_mutex_t lock;
};

/* ---- creation ---- */

static size_t gemm_workspace_bytes(const struct fp8_gemm_plan *plan, int64_t tokens)
{
    const struct fp8_buffer *buffer = &plan->layer->buffers[plan->step->gemm->workspace];
    return (size_t)(fp8_dim_at(&buffer->rows, tokens) * fp8_dim_at(&buffer->cols, tokens)) *
           fp8_dtype_bytes(buffer->dtype);
}

static bool is_bf16(const struct fp8_gemm_plan *plan)
{
    return plan->step->semantics.source_dtype == FP8_DTYPE_BF16;
}

static struct fp8_lt_problem problem_at(const struct fp8_gemm_plan *plan, enum fp8_lt_way way,
                                        bool bias, int64_t tokens)
{
    fp8_value args[FP8_GEMM_ARG_COUNT];
    for (int i = 0; i < FP8_GEMM_ARG_COUNT; i++)
        args[i].i = fp8_gemm_extent(plan, i, tokens);
    struct fp8_lt_problem problem =
        fp8_lt_base_problem(plan, args, NULL, gemm_workspace_bytes(plan, tokens));
    const struct fp8_buffer *stage = &plan->layer->buffers[plan->step->gemm->stage];
    problem.has_bias = bias;
    problem.accumulate = way == FP8_LT_IN_PLACE_ADD;
    problem.max_sms = plan->context->max_sms;
    if (way == FP8_LT_STAGED) {
        fp8_lt_write_staged(&problem, plan, NULL, fp8_dim_at(&stage->cols, tokens));
        fp8_lt_take_rows(&problem, args, 0,
                         fp8_lt_chunk(plan, &problem, fp8_dim_at(&stage->rows, tokens)));
    } else {
        fp8_lt_write_in_place(&problem, plan, args);
    }
    (void)fp8_lt_place_scales(plan, &problem, args, 0); /* without memory it copies nothing */
    return problem;
}

/* The M that stands for a range: the spec's usual one if it lies within, else the largest; whole
 * vectors of rows, which every way has with every scaling. */
static int64_t tokens_of_range(const struct fp8_layer_plan *layer, const struct fp8_range *range)
{
    bool usual = layer->tokens >= range->min_tokens && layer->tokens <= range->max_tokens;
    int64_t tokens = usual ? layer->tokens : range->max_tokens;
    bool by_block = layer->recipe.kind == FP8_RECIPE_BLOCK && !layer->is_bf16;
    return by_block ? fp8_round_up(tokens, FP8_PAD_BLOCK_SCALES) : tokens;
}

static void log_way(const struct fp8_gemm_plan *plan, const struct fp8_range *range,
                    enum fp8_lt_way way, bool bias, const struct variant *variant)
{
    const struct fp8_log *log = &plan->context->log;
    if (!fp8_log_wanted(log, FP8_LOG_DISPATCH))
        return;
    char name[96] = "no algorithm";
    if (variant->count > 0)
        fp8_lt_name(plan->context->lt, &variant->choices[0], name, sizeof name);
    fp8_log_write(log, FP8_LOG_DISPATCH,
                  "layer '%s', %s, M %lld..%lld, %s%s: %s, first of %d that are %s",
                  plan->layer->name, fp8_pass_name(plan->pass), (long long)range->min_tokens,
                  (long long)range->max_tokens, way_names[way], bias ? " with bias" : "", name,
                  variant->count, variant->is_measured ? "measured or offered" : "offered");
}

/* The measured algorithm first, if the plan has one for this library and it takes it; then the
 * heuristic's. */
static void fill_variant(const struct fp8_gemm_plan *plan, const struct fp8_choice *choice,
                         enum fp8_lt_way way, const struct fp8_lt_problem *problem,
                         struct variant *variant)
{
    const struct fp8_lt *lt = plan->context->lt;
    if (way != FP8_LT_STAGED && choice->version > 0 &&
        (uint64_t)choice->version == fp8_lt_version(lt) &&
        fp8_lt_check(lt, problem, choice->algo, &variant->choices[0]))
        variant->is_measured = true;
    variant->count = variant->is_measured;
    variant->count +=
        fp8_lt_ask(lt, problem, variant->choices + variant->count, CHOICES - variant->count);
}

/* One way, for pointers that are aligned and, of bf16, for those that are not. */
static int ask_way(const struct fp8_gemm_plan *plan, int index, enum fp8_lt_way way, bool bias,
                   struct fp8_lt_range *asked)
{
    const struct fp8_range *range = &plan->step->gemm->ranges[index];
    int64_t tokens = tokens_of_range(plan->layer, range);
    if (!fp8_lt_way_exists(plan, way, fp8_gemm_extent(plan, FP8_GEMM_rows, tokens),
                           fp8_gemm_extent(plan, FP8_GEMM_cols, tokens)))
        return 0;
    int found = 0;
    for (int unaligned = 0; unaligned <= is_bf16(plan); unaligned++) {
        struct variant *variant = &asked->variants[way][bias][unaligned];
        struct fp8_lt_problem problem = problem_at(plan, way, bias, tokens);
        problem.unaligned = unaligned;
        fill_variant(plan, plan->ranges[index].choice, way, &problem, variant);
        log_way(plan, range, way, bias, variant);
        found += variant->count;
        if (variant->count > 0 && !asked->name[0])
            fp8_lt_name(plan->context->lt, &variant->choices[0], asked->name, sizeof asked->name);
    }
    return found;
}

static fp8_status ask(const struct fp8_gemm_plan *plan, int index, struct fp8_lt_range *asked)
{
    const struct fp8_range *range = &plan->step->gemm->ranges[index];
    FP8_TRY(fp8_lt_check_scaling(plan));
    int in_place[2] = { 0 };
    for (int bias = 0; bias <= plan->has_bias; bias++) {
        in_place[bias] = ask_way(plan, index, FP8_LT_IN_PLACE, bias, asked);
        (void)ask_way(plan, index, FP8_LT_IN_PLACE_ADD, bias, asked);
    }
    bool all_in_place = in_place[0] > 0 && (in_place[1] > 0 || !plan->has_bias);
    int staged = all_in_place ? 0 : ask_way(plan, index, FP8_LT_STAGED, false, asked);
    atomic_init(&asked->staged_asked, !all_in_place);
    for (int bias = 0; bias <= plan->has_bias; bias++) {
        if (in_place[bias] + staged == 0)
            return fp8_fail(FP8_ERR_CUBLASLT,
                            "layer '%s', %s: cuBLASLt offers no algorithm for M = %lld, N = %lld, "
                            "K = %lld (%s)%s",
                            plan->layer->name, fp8_pass_name(plan->pass),
                            (long long)tokens_of_range(plan->layer, range),
                            (long long)plan->layer->out_features,
                            (long long)plan->layer->in_features, range->dtype,
                            bias ? " with bias" : "");
    }
    return FP8_OK;
}

fp8_status fp8_lt_range_create(const struct fp8_gemm_plan *plan, int range,
                               struct fp8_lt_range **made)
{
    *made = fp8_allocate(sizeof **made);
    if (!*made)
        return fp8_fail_memory("the algorithms of a range", sizeof **made);
    pthread_mutex_init(&(*made)->lock, NULL);
    return ask(plan, range, *made);
}

void fp8_lt_range_destroy(struct fp8_lt_range *range)
{
    if (range)
        pthread_mutex_destroy(&range->lock);
    fp8_release(range);
}

/* Where everything goes in place the stage is rarely wanted, and to ask for it takes as long as for
 * the rest of a layer. Nothing is loaded or allocated by that. */
static void ask_staged(const struct fp8_gemm_plan *plan, int range)
{
    struct fp8_lt_range *asked = plan->ranges[range].lt;
    if (atomic_load_explicit(&asked->staged_asked, memory_order_acquire))
        return;
    pthread_mutex_lock(&asked->lock);
    if (!atomic_load_explicit(&asked->staged_asked, memory_order_relaxed)) {
        struct fp8_uncaptured entered;
        fp8_status status = fp8_uncaptured_enter(plan->context, NULL, NULL, &entered);
        (void)ask_way(plan, range, FP8_LT_STAGED, false, asked);
        if (status == FP8_OK)
            fp8_uncaptured_leave(plan->context, &entered);
        atomic_store_explicit(&asked->staged_asked, true, memory_order_release);
    }
    pthread_mutex_unlock(&asked->lock);
}

/* ---- running ---- */

static void log_refusal(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                        enum fp8_lt_way way, const struct fp8_lt_choice *choice, const char *reason)
{
    const struct fp8_log *log = &plan->context->log;
    if (!fp8_log_wanted(log, FP8_LOG_DISPATCH))
        return;
    char name[96];
    fp8_lt_name(plan->context->lt, choice, name, sizeof name);
    fp8_log_write(log, FP8_LOG_DISPATCH,
                  "layer '%s', %s, rows %lld, cols %lld, depth %lld, %s: %s refused: %s",
                  plan->layer->name, fp8_pass_name(plan->pass), (long long)problem->rows,
                  (long long)problem->cols, (long long)problem->depth, way_names[way], name,
                  reason);
}

/* Once for each algorithm; the mode costs two calls of the driver. */
static bool try_first(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                      const struct fp8_lt_choice *choice, const char **reason)
{
    struct fp8_uncaptured entered;
    if (fp8_uncaptured_enter(plan->context, NULL, NULL, &entered) != FP8_OK)
        return fp8_lt_try(plan->context->lt, problem, choice, reason);
    bool done = fp8_lt_try(plan->context->lt, problem, choice, reason);
    fp8_uncaptured_leave(plan->context, &entered);
    return done;
}

static bool try_choice(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                       struct variant *variant, int index, const char **reason)
{
    unsigned bit = 1u << index;
    if (atomic_load_explicit(&variant->started, memory_order_relaxed) & bit)
        return fp8_lt_try(plan->context->lt, problem, &variant->choices[index], reason);
    bool done = try_first(plan, problem, &variant->choices[index], reason);
    if (done)
        atomic_fetch_or_explicit(&variant->started, bit, memory_order_relaxed);
    return done;
}

static bool try_choices(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                        enum fp8_lt_way way, struct variant *variant, const char **reason)
{
    int good = atomic_load_explicit(&variant->good, memory_order_relaxed);
    for (int i = 0; i < variant->count; i++) {
        int index = i == 0 ? good : i <= good ? i - 1 : i; /* the good one first, then in order */
        if (try_choice(plan, problem, variant, index, reason)) {
            if (index != good)
                atomic_store_explicit(&variant->good, index, memory_order_relaxed);
            return true;
        }
        log_refusal(plan, problem, way, &variant->choices[index], *reason);
    }
    return false;
}

/* All candidates of the range refused: ask for exactly this problem. */
static bool try_exact(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                      enum fp8_lt_way way, const char **reason)
{
    struct fp8_lt_choice choices[CHOICES];
    struct fp8_uncaptured entered;
    bool done = false;
    if (fp8_uncaptured_enter(plan->context, NULL, NULL, &entered) != FP8_OK)
        return false;
    int count = fp8_lt_ask(plan->context->lt, problem, choices, CHOICES);
    for (int i = 0; i < count && !done; i++) {
        done = fp8_lt_try(plan->context->lt, problem, &choices[i], reason);
        if (!done)
            log_refusal(plan, problem, way, &choices[i], *reason);
    }
    fp8_uncaptured_leave(plan->context, &entered);
    return done;
}

static fp8_status multiply(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                           enum fp8_lt_way way, int range)
{
    struct variant *variant =
        &plan->ranges[range].lt->variants[way][problem->has_bias][problem->unaligned];
    const char *reason = "the heuristic offers no algorithm";
    if (try_choices(plan, problem, way, variant, &reason) || try_exact(plan, problem, way, &reason))
        return FP8_OK;
    return fp8_fail(
        FP8_ERR_CUBLASLT,
        "layer '%s', %s: no cuBLASLt algorithm accepts %lld x %lld over %lld (%s, %s): %s",
        plan->layer->name, fp8_pass_name(plan->pass), (long long)problem->rows,
        (long long)problem->cols, (long long)problem->depth, plan->step->gemm->ranges[range].dtype,
        way_names[way], reason);
}

/* A bias that is not aligned is moved to where it is. */
static fp8_status place_bias(const struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                             struct fp8_lt_problem *problem)
{
    if (!problem->has_bias || (uintptr_t)problem->bias % FP8_LT_OUT_ALIGN == 0)
        return FP8_OK;
    void *moved = frame->address[plan->step->gemm->stage_bias];
    FP8_TRY(fp8_copy_bytes(plan->context, moved, problem->bias,
                           (size_t)problem->cols * fp8_dtype_bytes(FP8_DTYPE_BF16), frame->stream));
    problem->bias = moved;
    return FP8_OK;
}

/* A vector of the operand's rows from `first` on, or the one scale of the tensor again and
 * again. */
static void put_store_scales(fp8_scaling scaling, const fp8_value *scales, int64_t first,
                             fp8_value *vector, fp8_value *step)
{
    bool by_row = scaling == FP8_SCALING_ROW;
    vector->p = (float *)scales->p + (by_row ? first : FP8_SCALES_SCALE_INV);
    step->i = by_row;
}

static fp8_status store_rows(const struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                             const fp8_value *args, int64_t first, int64_t rows)
{
    const struct fp8_gemm_step *gemm = plan->step->gemm;
    const struct fp8_kernel *store =
        args[FP8_GEMM_accumulate].i ? gemm->accumulate.kernel : gemm->overwrite.kernel;
    int64_t bytes = (int64_t)fp8_dtype_bytes(plan->step->semantics.target_dtype);
    int64_t out_ld = args[FP8_GEMM_out_ld].i;
    const fp8_semantics *how = &plan->step->semantics;
    fp8_value store_args[FP8_STORE_ARG_COUNT] = {
        [FP8_STORE_source].p = frame->address[gemm->stage],
        [FP8_STORE_source_ld].i = frame->ld[gemm->stage],
        [FP8_STORE_bias].p = args[FP8_GEMM_bias].p,
        [FP8_STORE_target].p = (char *)args[FP8_GEMM_out].p + first * out_ld * bytes,
        [FP8_STORE_target_ld].i = out_ld,
        [FP8_STORE_rows].i = rows,
        [FP8_STORE_cols].i = args[FP8_GEMM_cols].i,
        [FP8_STORE_accumulate].i = store->semantics.accumulate,
    };
    if (fp8_lt_scaled_by_store(plan)) {
        put_store_scales(how->scaling, &args[FP8_GEMM_a_scales], first,
                         &store_args[FP8_STORE_a_scales], &store_args[FP8_STORE_a_scales_step]);
        put_store_scales(how->second_scaling, &args[FP8_GEMM_b_scales], 0,
                         &store_args[FP8_STORE_b_scales], &store_args[FP8_STORE_b_scales_step]);
    }
    return fp8_kernel_run(plan->context, store, store_args, frame->stream, frame->sms);
}

static fp8_status run_staged(const struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                             const fp8_value *args, struct fp8_lt_problem whole, int range)
{
    int stage = plan->step->gemm->stage;
    int64_t rows = args[FP8_GEMM_rows].i;
    ask_staged(plan, range);
    fp8_lt_write_staged(&whole, plan, frame->address[stage], frame->ld[stage]);
    int64_t chunk = fp8_lt_chunk(plan, &whole, frame->rows[stage]);
    if (chunk == 0)
        return fp8_fail(FP8_ERR_INTERNAL, "layer '%s', %s: a stage of %lld rows is too small",
                        plan->layer->name, fp8_pass_name(plan->pass),
                        (long long)frame->rows[stage]);
    for (int64_t first = 0; first < rows; first += chunk) {
        struct fp8_lt_problem problem = whole;
        int64_t count = fp8_min_i64(chunk, rows - first);
        fp8_lt_take_rows(&problem, args, first, count);
        FP8_TRY(fp8_lt_place_scales(plan, &problem, args, first));
        FP8_TRY(multiply(plan, &problem, FP8_LT_STAGED, range));
        FP8_TRY(store_rows(plan, frame, args, first, count));
    }
    return FP8_OK;
}

static bool is_aligned(const void *data, int64_t ld, fp8_dtype dtype)
{
    return (uintptr_t)data % FP8_LT_OUT_ALIGN == 0 &&
           ld * (int64_t)fp8_dtype_bytes(dtype) % FP8_LT_OUT_ALIGN == 0;
}

fp8_status fp8_lt_range_run(const struct fp8_gemm_plan *plan, int range,
                            const struct fp8_frame *frame, const fp8_value *args)
{
    bool accumulate = args[FP8_GEMM_accumulate].i != 0, bf16 = is_bf16(plan);
    enum fp8_lt_way way = accumulate ? FP8_LT_IN_PLACE_ADD : FP8_LT_IN_PLACE;
    struct fp8_lt_problem problem =
        fp8_lt_base_problem(plan, args, frame->address[plan->step->gemm->workspace],
                            gemm_workspace_bytes(plan, frame->tokens));
    problem.bias = args[FP8_GEMM_bias].p;
    problem.has_bias = problem.bias != NULL;
    problem.max_sms = frame->sms < plan->context->sms ? frame->sms : 0;
    problem.stream = frame->stream;
    problem.unaligned = bf16 && !(is_aligned(problem.a.data, problem.a.ld, problem.a.dtype) &&
                                  is_aligned(problem.b.data, problem.b.ld, problem.b.dtype));
    bool out_aligned = is_aligned(args[FP8_GEMM_out].p, args[FP8_GEMM_out_ld].i,
                                  plan->step->semantics.target_dtype);
    struct fp8_lt_problem in_place = problem;
    in_place.unaligned |= bf16 && !out_aligned;
    bool fits =
        plan->ranges[range].lt->variants[way][problem.has_bias][in_place.unaligned].count > 0 &&
        fp8_lt_way_exists(plan, way, problem.rows, problem.cols) && (bf16 || out_aligned);
    if (fits) {
        fp8_lt_write_in_place(&in_place, plan, args);
        in_place.accumulate = accumulate;
        FP8_TRY(place_bias(plan, frame, &in_place));
        FP8_TRY(fp8_lt_place_scales(plan, &in_place, args, 0));
        fp8_status status = multiply(plan, &in_place, way, range);
        if (status != FP8_ERR_CUBLASLT)
            return status;
    }
    return run_staged(plan, frame, args, problem, range);
}

const char *fp8_lt_range_describe(const struct fp8_gemm_plan *plan, int range, int64_t tokens,
                                  uint32_t *launches)
{
    int64_t rows = fp8_gemm_extent(plan, FP8_GEMM_rows, tokens);
    int64_t cols = fp8_gemm_extent(plan, FP8_GEMM_cols, tokens);
    const struct fp8_buffer *stage = &plan->layer->buffers[plan->step->gemm->stage];
    int64_t chunk = fp8_max_i64(1, fp8_dim_at(&stage->rows, tokens));
    const struct fp8_lt_range *asked = plan->ranges[range].lt;
    bool in_place = asked->variants[FP8_LT_IN_PLACE][plan->has_bias][0].count > 0 &&
                    fp8_lt_way_exists(plan, FP8_LT_IN_PLACE, rows, cols);
    *launches = in_place ? 1 : (uint32_t)(2 * fp8_ceil_div(rows, chunk));
    return asked->name;
}
