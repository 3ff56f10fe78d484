/*
 * gemm_cublaslt.c - a product through cuBLASLt: which algorithm, in place or through the stage.
 *
 * At creation the heuristic is asked once for every way to write the output; its candidates are
 * kept in its order, behind a measured one where the plan has one for this version of the library.
 * A call tries them until one is accepted and remembers that one; the memory is one atomic per way,
 * so threads need no lock. If all refuse, the heuristic is asked for the exact problem; only then
 * the call fails. The library loads a kernel when it runs it first, perhaps inside the capture of a
 * graph: the first run of each algorithm is in the relaxed capture mode.
 *
 * The output goes in place where cuBLASLt's rules allow it (address, ld and row bytes multiples of
 * 16). Elsewhere it goes to the stage, whose rows are padded, in chunks of rows, and a store kernel
 * takes it from there: nothing outside the caller's tensor is ever touched. A 16-bit output that
 * accumulates is staged in fp32 too, so that it is rounded once.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/gemm_lt.h"
#include "runtime/gemm_plan.h"

enum { CHOICES = 8, COLS_PAD = 16, DEPTH_PAD = 16, OUT_ALIGN = 16 };

/* Ways to write the output; each exists without and with a bias. */
enum way { IN_PLACE, IN_PLACE_ADD, STAGED, WAY_COUNT };
static const char *const way_names[WAY_COUNT] = { "in place", "in place, accumulating", "staged" };

struct variant {
    _Atomic int good;         /* the choice that worked last */
    _Atomic unsigned started; /* bit = choice: it was run before */
    int count;
    bool is_measured; /* the first is the plan's, the others the heuristic's */
    struct fp8_lt_choice choices[CHOICES];
};

struct fp8_lt_range {
    struct variant variants[WAY_COUNT][2]; /* [has_bias] */
    char name[96];
};

/* ---- problems ---- */

static int64_t element_bytes(const struct fp8_gemm_plan *plan)
{
    return (int64_t)fp8_dtype_bytes(plan->step->semantics.target_dtype);
}

static fp8_dtype stage_dtype(const struct fp8_gemm_plan *plan)
{
    return plan->step->gemm->overwrite.stage_dtype;
}

/* Whether the spec's dtypes allow this way at all. */
static bool way_exists(const struct fp8_gemm_plan *plan, enum way way, int64_t cols)
{
    const struct fp8_gemm_step *gemm = plan->step->gemm;
    if (way == STAGED)
        return true;
    if (cols * element_bytes(plan) % OUT_ALIGN != 0)
        return false;
    if (way == IN_PLACE)
        return true;
    return gemm->may_accumulate &&
           gemm->accumulate.stage_dtype == plan->step->semantics.target_dtype;
}

/* Everything about the problem but its pointers and what the way decides. */
static struct fp8_lt_problem base_problem(const struct fp8_gemm_plan *plan, const fp8_value *args)
{
    return (struct fp8_lt_problem){
        .a_dtype = plan->step->semantics.source_dtype,
        .b_dtype = plan->step->semantics.second_dtype,
        .fast = plan->step->gemm->fast,
        .rows = args[FP8_GEMM_rows].i,
        .cols = args[FP8_GEMM_cols].i,
        .depth = fp8_round_up(args[FP8_GEMM_depth].i, DEPTH_PAD),
        .a_ld = args[FP8_GEMM_a_ld].i,
        .b_ld = args[FP8_GEMM_b_ld].i,
        .a = args[FP8_GEMM_a].p,
        .b = args[FP8_GEMM_b].p,
        .a_scales = args[FP8_GEMM_a_scales].p,
        .b_scales = args[FP8_GEMM_b_scales].p,
    };
}

static void write_in_place(struct fp8_lt_problem *problem, const struct fp8_gemm_plan *plan,
                           const fp8_value *args)
{
    problem->out_dtype = plan->step->semantics.target_dtype;
    problem->out = args[FP8_GEMM_out].p;
    problem->out_ld = args[FP8_GEMM_out_ld].i;
}

static void write_staged(struct fp8_lt_problem *problem, const struct fp8_gemm_plan *plan,
                         void *stage, int64_t stage_ld, int64_t stage_rows)
{
    problem->accumulate = false;
    problem->out_dtype = stage_dtype(plan);
    problem->out = stage;
    problem->out_ld = stage_ld;
    problem->cols = fp8_round_up(problem->cols, COLS_PAD);
    problem->rows = fp8_min_i64(problem->rows, stage_rows);
}

/* ---- creation ---- */

static size_t gemm_workspace_bytes(const struct fp8_gemm_plan *plan, int64_t tokens)
{
    const struct fp8_buffer *buffer = &plan->layer->buffers[plan->step->gemm->workspace];
    return (size_t)(fp8_dim_at(&buffer->rows, tokens) * fp8_dim_at(&buffer->cols, tokens)) *
           fp8_dtype_bytes(buffer->dtype);
}

static struct fp8_lt_problem problem_at(const struct fp8_gemm_plan *plan, enum way way, bool bias,
                                        int64_t tokens)
{
    fp8_value args[FP8_GEMM_ARG_COUNT];
    for (int i = 0; i < FP8_GEMM_ARG_COUNT; i++)
        args[i].i = fp8_gemm_extent(plan, i, tokens);
    struct fp8_lt_problem problem = base_problem(plan, args);
    const struct fp8_buffer *stage = &plan->layer->buffers[plan->step->gemm->stage];
    problem.has_bias = bias;
    problem.accumulate = way == IN_PLACE_ADD;
    problem.max_sms = plan->context->max_sms;
    problem.workspace_bytes = gemm_workspace_bytes(plan, tokens);
    if (way == STAGED)
        write_staged(&problem, plan, NULL, fp8_dim_at(&stage->cols, tokens),
                     fp8_dim_at(&stage->rows, tokens));
    else
        write_in_place(&problem, plan, args);
    return problem;
}

/* The M that stands for a range: the spec's usual one if it lies within, else the largest. */
static int64_t tokens_of_range(const struct fp8_layer_plan *layer, const struct fp8_range *range)
{
    bool usual = layer->tokens >= range->min_tokens && layer->tokens <= range->max_tokens;
    return usual ? layer->tokens : range->max_tokens;
}

static void log_way(const struct fp8_gemm_plan *plan, const struct fp8_range *range, enum way way,
                    bool bias, const struct variant *variant)
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
                         enum way way, const struct fp8_lt_problem *problem,
                         struct variant *variant)
{
    const struct fp8_lt *lt = plan->context->lt;
    if (way != STAGED && choice->version > 0 && (uint64_t)choice->version == fp8_lt_version(lt) &&
        fp8_lt_check(lt, problem, choice->algo, &variant->choices[0]))
        variant->is_measured = true;
    variant->count = variant->is_measured;
    variant->count +=
        fp8_lt_ask(lt, problem, variant->choices + variant->count, CHOICES - variant->count);
}

static fp8_status ask(const struct fp8_gemm_plan *plan, int index, struct fp8_lt_range *asked)
{
    const struct fp8_range *range = &plan->step->gemm->ranges[index];
    int64_t tokens = tokens_of_range(plan->layer, range);
    int64_t cols = fp8_gemm_extent(plan, FP8_GEMM_cols, tokens);
    for (int bias = 0; bias <= plan->has_bias; bias++) {
        int found = 0;
        for (int way = 0; way < WAY_COUNT; way++) {
            struct variant *variant = &asked->variants[way][bias];
            if (!way_exists(plan, (enum way)way, cols))
                continue;
            struct fp8_lt_problem problem = problem_at(plan, (enum way)way, bias, tokens);
            fill_variant(plan, plan->ranges[index].choice, (enum way)way, &problem, variant);
            log_way(plan, range, (enum way)way, bias, variant);
            if (way != IN_PLACE_ADD)
                found += variant->count;
            if (variant->count > 0 && !asked->name[0])
                fp8_lt_name(plan->context->lt, &variant->choices[0], asked->name,
                            sizeof asked->name);
        }
        if (found == 0)
            return fp8_fail(FP8_ERR_CUBLASLT,
                            "layer '%s', %s: cuBLASLt offers no algorithm for M = %lld, N = %lld, "
                            "K = %lld (%s)%s",
                            plan->layer->name, fp8_pass_name(plan->pass), (long long)tokens,
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
    return ask(plan, range, *made);
}

void fp8_lt_range_destroy(struct fp8_lt_range *range)
{
    fp8_release(range);
}

/* ---- running ---- */

static void log_refusal(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                        enum way way, const struct fp8_lt_choice *choice, const char *reason)
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
                        enum way way, struct variant *variant, const char **reason)
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
                      enum way way, const char **reason)
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
                           enum way way, int range)
{
    struct variant *variant = &plan->ranges[range].lt->variants[way][problem->has_bias];
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

/* A bias that is not aligned, or too short for padded columns, is moved to where it is both. */
static fp8_status place_bias(const struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                             int64_t cols, struct fp8_lt_problem *problem)
{
    if (!problem->has_bias)
        return FP8_OK;
    if ((uintptr_t)problem->bias % OUT_ALIGN == 0 && problem->cols == cols)
        return FP8_OK;
    void *moved = frame->address[plan->step->gemm->stage_bias];
    if (problem->bias == moved)
        return FP8_OK;
    FP8_TRY(fp8_copy_bytes(plan->context, moved, problem->bias,
                           (size_t)cols * fp8_dtype_bytes(FP8_DTYPE_BF16), frame->stream));
    problem->bias = moved;
    return FP8_OK;
}

static fp8_status run_staged(const struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                             const fp8_value *args, struct fp8_lt_problem problem, int range)
{
    const struct fp8_gemm_step *gemm = plan->step->gemm;
    const struct fp8_kernel *store =
        args[FP8_GEMM_accumulate].i ? gemm->accumulate.kernel : gemm->overwrite.kernel;
    int64_t rows = args[FP8_GEMM_rows].i, cols = args[FP8_GEMM_cols].i;
    int64_t out_ld = args[FP8_GEMM_out_ld].i;
    int64_t stage_ld = frame->ld[gemm->stage], chunk = frame->rows[gemm->stage];
    write_staged(&problem, plan, frame->address[gemm->stage], stage_ld, chunk);
    FP8_TRY(place_bias(plan, frame, cols, &problem));
    for (int64_t first = 0; first < rows; first += chunk) {
        problem.rows = fp8_min_i64(chunk, rows - first);
        problem.a = (const char *)args[FP8_GEMM_a].p + first * problem.a_ld;
        FP8_TRY(multiply(plan, &problem, STAGED, range));
        const fp8_value store_args[FP8_STORE_ARG_COUNT] = {
            [FP8_STORE_source].p = problem.out,
            [FP8_STORE_source_ld].i = stage_ld,
            [FP8_STORE_target].p =
                (char *)args[FP8_GEMM_out].p + first * out_ld * element_bytes(plan),
            [FP8_STORE_target_ld].i = out_ld,
            [FP8_STORE_rows].i = problem.rows,
            [FP8_STORE_cols].i = cols,
        };
        FP8_TRY(fp8_kernel_run(plan->context, store, store_args, frame->stream, frame->sms));
    }
    return FP8_OK;
}

fp8_status fp8_lt_range_run(const struct fp8_gemm_plan *plan, int range,
                            const struct fp8_frame *frame, const fp8_value *args)
{
    bool accumulate = args[FP8_GEMM_accumulate].i != 0;
    enum way way = accumulate ? IN_PLACE_ADD : IN_PLACE;
    struct fp8_lt_problem problem = base_problem(plan, args);
    problem.bias = args[FP8_GEMM_bias].p;
    problem.has_bias = problem.bias != NULL;
    problem.max_sms = frame->sms < plan->context->sms ? frame->sms : 0;
    problem.workspace = frame->address[plan->step->gemm->workspace];
    problem.workspace_bytes = gemm_workspace_bytes(plan, frame->tokens);
    problem.stream = frame->stream;
    bool fits = plan->ranges[range].lt->variants[way][problem.has_bias].count > 0 &&
                way_exists(plan, way, problem.cols) &&
                (uintptr_t)args[FP8_GEMM_out].p % OUT_ALIGN == 0 &&
                args[FP8_GEMM_out_ld].i * element_bytes(plan) % OUT_ALIGN == 0;
    if (fits) {
        struct fp8_lt_problem in_place = problem;
        write_in_place(&in_place, plan, args);
        in_place.accumulate = accumulate;
        FP8_TRY(place_bias(plan, frame, problem.cols, &in_place));
        fp8_status status = multiply(plan, &in_place, way, range);
        if (status != FP8_ERR_CUBLASLT)
            return status;
        problem.bias = in_place.bias;
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
    if (asked->variants[IN_PLACE][plan->has_bias].count > 0) {
        *launches = 1;
    } else {
        bool bias_moves = plan->has_bias && cols % COLS_PAD != 0;
        *launches = (uint32_t)(2 * fp8_ceil_div(rows, chunk) + bias_moves);
    }
    return asked->name;
}
