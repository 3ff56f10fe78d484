/*
 * cublaslt.c - the baseline of the benchmarks: a GEMM by the best of all cuBLASLt algorithms.
 *
 * In: matrices in every buffer set. Out: the fastest of up to 128 algorithms that the heuristic
 * offers, each measured on the rotated buffers; one that fails is passed over. cuBLASLt is
 * column-major, so out[rows, cols] row-major is its D[cols, rows], its A is our b and its B our a.
 * The functions come from the copy of the library that libfp8 opened; the header gives types only.
 */
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/cublaslt.h"

#define MAX_ALGORITHMS 128
#define WORKSPACE_BYTES ((size_t)64 << 20)

struct functions {
    __typeof__(&cublasLtCreate) create;
    __typeof__(&cublasLtDestroy) destroy;
    __typeof__(&cublasLtMatmul) matmul;
    __typeof__(&cublasLtMatmulAlgoGetHeuristic) heuristic;
    __typeof__(&cublasLtMatmulDescCreate) desc_create;
    __typeof__(&cublasLtMatmulDescDestroy) desc_destroy;
    __typeof__(&cublasLtMatmulDescSetAttribute) desc_set;
    __typeof__(&cublasLtMatrixLayoutCreate) layout_create;
    __typeof__(&cublasLtMatrixLayoutDestroy) layout_destroy;
    __typeof__(&cublasLtMatmulPreferenceCreate) preference_create;
    __typeof__(&cublasLtMatmulPreferenceDestroy) preference_destroy;
    __typeof__(&cublasLtMatmulPreferenceSetAttribute) preference_set;
};

static const struct {
    const char *name;
    size_t offset;
} symbols[] = {
    { "cublasLtCreate", offsetof(struct functions, create) },
    { "cublasLtDestroy", offsetof(struct functions, destroy) },
    { "cublasLtMatmul", offsetof(struct functions, matmul) },
    { "cublasLtMatmulAlgoGetHeuristic", offsetof(struct functions, heuristic) },
    { "cublasLtMatmulDescCreate", offsetof(struct functions, desc_create) },
    { "cublasLtMatmulDescDestroy", offsetof(struct functions, desc_destroy) },
    { "cublasLtMatmulDescSetAttribute", offsetof(struct functions, desc_set) },
    { "cublasLtMatrixLayoutCreate", offsetof(struct functions, layout_create) },
    { "cublasLtMatrixLayoutDestroy", offsetof(struct functions, layout_destroy) },
    { "cublasLtMatmulPreferenceCreate", offsetof(struct functions, preference_create) },
    { "cublasLtMatmulPreferenceDestroy", offsetof(struct functions, preference_destroy) },
    { "cublasLtMatmulPreferenceSetAttribute", offsetof(struct functions, preference_set) },
};

struct baseline {
    struct bench *bench;
    struct functions f;
    cublasLtHandle_t handle;
    struct cli_buffer workspace;
};

struct baseline_gemm {
    struct baseline *owner;
    struct baseline_gemm_shape shape;
    cublasLtMatmulDesc_t desc[BENCH_SETS];
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulHeuristicResult_t algorithms[MAX_ALGORITHMS];
    int count, measured, current;
};

static int lt_failed(cublasStatus_t status, const char *what)
{
    cli_error("cuBLASLt baseline: %s failed with status %d", what, (int)status);
    return CLI_MACHINE;
}

/* ---- the library ----------------------------------------------------------------------------- */

int baseline_create(struct bench *bench, struct baseline **baseline)
{
    struct baseline *b = calloc(1, sizeof *b);
    *baseline = NULL;
    if (!b) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    b->bench = bench;
    int code = CLI_DONE;
    for (size_t i = 0; !code && i < sizeof symbols / sizeof symbols[0]; i++) {
        void *address = NULL;
        fp8_status status =
            fp8_library_symbol(FP8_LIBRARY_CUBLASLT, symbols[i].name, &address, NULL);
        if (status)
            code = cli_fp8_failed(status, "opening cuBLASLt for the baseline");
        else
            memcpy((char *)&b->f + symbols[i].offset, &address, sizeof address);
    }
    if (!code)
        code = cli_buffer_create(&bench->device, WORKSPACE_BYTES, false, &b->workspace);
    if (!code) {
        cublasStatus_t status = b->f.create(&b->handle);
        if (status)
            code = lt_failed(status, "cublasLtCreate");
    }
    if (code)
        baseline_destroy(b);
    else
        *baseline = b;
    return code;
}

void baseline_destroy(struct baseline *b)
{
    if (!b)
        return;
    if (b->handle)
        b->f.destroy(b->handle);
    cli_buffer_destroy(&b->bench->device, &b->workspace);
    free(b);
}

/* ---- one GEMM -------------------------------------------------------------------------------- */

static cudaDataType_t type_of(fp8_dtype dtype)
{
    switch (dtype) {
    case FP8_DTYPE_E4M3:
        return CUDA_R_8F_E4M3;
    case FP8_DTYPE_E5M2:
        return CUDA_R_8F_E5M2;
    case FP8_DTYPE_FP32:
        return CUDA_R_32F;
    case FP8_DTYPE_FP16:
        return CUDA_R_16F;
    default:
        return CUDA_R_16BF;
    }
}

/* A row-major [vectors, depth] matrix is column-major [depth, vectors], and one stored across the
 * other way about. */
static cublasStatus_t make_layout(const struct baseline *b, const struct baseline_matrix *m,
                                  int64_t vectors, int64_t depth, cublasLtMatrixLayout_t *layout)
{
    uint64_t rows = (uint64_t)(m->across ? vectors : depth);
    uint64_t cols = (uint64_t)(m->across ? depth : vectors);
    return b->f.layout_create(layout, type_of(m->dtype), rows, cols, m->ld);
}

static cublasStatus_t make_desc(const struct baseline_gemm *g, int set, cublasLtMatmulDesc_t *desc)
{
    const struct functions *f = &g->owner->f;
    const struct baseline_gemm_shape *s = &g->shape;
    cublasOperation_t a = s->b.across ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublasOperation_t b = s->a.across ? CUBLAS_OP_T : CUBLAS_OP_N;
    int8_t fast = s->fast_accumulation;
    cublasStatus_t status = f->desc_create(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status)
        status = f->desc_set(*desc, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a);
    if (!status)
        status = f->desc_set(*desc, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b);
    if (!status && s->b.scale_inv[set])
        status = f->desc_set(*desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &s->b.scale_inv[set],
                             sizeof s->b.scale_inv[set]);
    if (!status && s->a.scale_inv[set])
        status = f->desc_set(*desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &s->a.scale_inv[set],
                             sizeof s->a.scale_inv[set]);
    if (!status && s->a.scale_inv[set])
        status = f->desc_set(*desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    return status;
}

static cublasStatus_t describe(struct baseline_gemm *g)
{
    const struct baseline_gemm_shape *s = &g->shape;
    cublasStatus_t status = make_layout(g->owner, &s->b, s->cols, s->depth, &g->a);
    if (!status)
        status = make_layout(g->owner, &s->a, s->rows, s->depth, &g->b);
    if (!status)
        status = make_layout(g->owner, &s->out, s->rows, s->cols, &g->out);
    for (int set = 0; !status && set < BENCH_SETS; set++)
        status = make_desc(g, set, &g->desc[set]);
    return status;
}

static cublasStatus_t ask_heuristic(struct baseline_gemm *g)
{
    const struct functions *f = &g->owner->f;
    cublasLtMatmulPreference_t preference = NULL;
    size_t bytes = WORKSPACE_BYTES;
    cublasStatus_t status = f->preference_create(&preference);
    if (!status)
        status = f->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                   sizeof bytes);
    if (!status)
        status = f->heuristic(g->owner->handle, g->desc[0], g->a, g->b, g->out, g->out, preference,
                              MAX_ALGORITHMS, g->algorithms, &g->count);
    if (preference)
        f->preference_destroy(preference);
    return status;
}

static cublasStatus_t enqueue(const struct baseline_gemm *g, int algorithm, int set)
{
    const struct baseline *o = g->owner;
    const struct baseline_gemm_shape *s = &g->shape;
    float one = 1, beta = s->accumulate ? 1 : 0;
    return o->f.matmul(o->handle, g->desc[set], &one, s->b.data[set], g->a, s->a.data[set], g->b,
                       &beta, s->out.data[set], g->out, s->out.data[set], g->out,
                       &g->algorithms[algorithm].algo, o->workspace.device, WORKSPACE_BYTES,
                       (cudaStream_t)o->bench->device.stream);
}

int baseline_gemm_run(void *user, int set)
{
    const struct baseline_gemm *g = user;
    cublasStatus_t status = enqueue(g, g->current, set);
    return status ? lt_failed(status, "cublasLtMatmul") : CLI_DONE;
}

/* Seconds of one run of the algorithm: the better of two turns over all sets, after one that only
 * warms; negative if it does not run. */
static int time_algorithm(struct baseline_gemm *g, int algorithm, fp8_event *events[2],
                          double *seconds)
{
    const struct cli_device *device = &g->owner->bench->device;
    fp8_status status = FP8_OK;
    *seconds = -1;
    if (g->algorithms[algorithm].state || enqueue(g, algorithm, 0))
        return CLI_DONE;
    for (int turn = 0; !status && turn < 2; turn++) {
        double turn_seconds = 0;
        status = fp8_event_record(events[0], device->stream);
        for (int set = 0; set < BENCH_SETS; set++) {
            if (enqueue(g, algorithm, set)) {
                *seconds = -1;
                return CLI_DONE;
            }
        }
        if (!status)
            status = fp8_event_record(events[1], device->stream);
        if (!status)
            status = fp8_event_seconds(events[0], events[1], &turn_seconds);
        turn_seconds /= BENCH_SETS;
        if (!status && (*seconds < 0 || turn_seconds < *seconds))
            *seconds = turn_seconds;
    }
    return status ? cli_fp8_failed(status, "measuring a cuBLASLt algorithm") : CLI_DONE;
}

static int find_fastest(struct baseline_gemm *g)
{
    fp8_context *context = g->owner->bench->device.context;
    fp8_event *events[2] = { NULL, NULL };
    double best = -1;
    fp8_status status = fp8_event_create(context, &events[0]);
    if (!status)
        status = fp8_event_create(context, &events[1]);
    int code = status ? cli_fp8_failed(status, "creating an event") : CLI_DONE;
    for (int i = 0; !code && i < g->count; i++) {
        double seconds;
        cli_progress("cuBLASLt baseline: algorithm %d of %d", i + 1, g->count);
        code = time_algorithm(g, i, events, &seconds);
        if (code || seconds < 0)
            continue;
        g->measured++;
        if (best < 0 || seconds < best) {
            best = seconds;
            g->current = i;
        }
    }
    fp8_event_destroy(events[0]);
    fp8_event_destroy(events[1]);
    return code;
}

int baseline_gemm_open(struct baseline *baseline, const struct baseline_gemm_shape *shape,
                       struct baseline_gemm **gemm)
{
    struct baseline_gemm *g = calloc(1, sizeof *g);
    *gemm = NULL;
    if (!g) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    g->owner = baseline;
    g->shape = *shape;
    cublasStatus_t status = describe(g);
    if (status) {
        baseline_gemm_destroy(g);
        return lt_failed(status, "describing a GEMM");
    }
    if (ask_heuristic(g) || g->count <= 0)
        baseline_gemm_destroy(g); /* none for this shape */
    else
        *gemm = g;
    return CLI_DONE;
}

int baseline_gemm_create(struct baseline *baseline, const struct baseline_gemm_shape *shape,
                         struct baseline_gemm **gemm)
{
    int code = baseline_gemm_open(baseline, shape, gemm);
    if (!code && *gemm)
        code = find_fastest(*gemm);
    if (*gemm && (code || !(*gemm)->measured)) {
        baseline_gemm_destroy(*gemm);
        *gemm = NULL;
    }
    return code;
}

int baseline_gemm_offered(const struct baseline_gemm *gemm)
{
    return gemm->count;
}

bool baseline_gemm_enqueue(const struct baseline_gemm *gemm, int algorithm, int set)
{
    return !gemm->algorithms[algorithm].state && !enqueue(gemm, algorithm, set);
}

void baseline_gemm_hex(const struct baseline_gemm *gemm, int algorithm, char hex[129])
{
    unsigned char bytes[64] = { 0 };
    const cublasLtMatmulAlgo_t *algo = &gemm->algorithms[algorithm].algo;
    memcpy(bytes, algo, sizeof *algo < sizeof bytes ? sizeof *algo : sizeof bytes);
    for (int i = 0; i < 64; i++)
        sprintf(hex + 2 * (size_t)i, "%02x", bytes[i]);
}

void baseline_gemm_destroy(struct baseline_gemm *g)
{
    if (!g)
        return;
    const struct functions *f = &g->owner->f;
    for (int set = 0; set < BENCH_SETS; set++) {
        if (g->desc[set])
            f->desc_destroy(g->desc[set]);
    }
    cublasLtMatrixLayout_t layouts[] = { g->a, g->b, g->out };
    for (int i = 0; i < 3; i++) {
        if (layouts[i])
            f->layout_destroy(layouts[i]);
    }
    free(g);
}

int baseline_gemm_algorithms(const struct baseline_gemm *gemm)
{
    return gemm->measured;
}
