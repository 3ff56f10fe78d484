/*
 * gemm_lt.c - the entry points of cuBLASLt and the descriptors of one product.
 *
 * In: a problem of gemm_lt.h. Out: algorithms, or an enqueued product. Descriptors are built on the
 * stack for each call (a few dozen nanoseconds an attribute), so that nothing is shared between
 * threads and nothing is allocated. Scales are given by device pointer: scale_inv of each operand,
 * which the quantise kernel of the same stream writes. Split-K may reduce in fp32 only: one
 * rounding, and the same bits in every run.
 */
#include "runtime/gemm_lt.h"

#include <stdio.h>
#include <string.h>

#include "runtime/driver.h"
#include "runtime/dynlib.h"

/* X(member, symbol) with the prototype of the header. */
#define LT_TABLE(X)                                                                                \
    X(create, cublasLtCreate)                                                                      \
    X(destroy, cublasLtDestroy)                                                                    \
    X(get_version, cublasLtGetVersion)                                                             \
    X(matmul, cublasLtMatmul)                                                                      \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic)                                                   \
    X(check, cublasLtMatmulAlgoCheck)                                                              \
    X(desc_init, cublasLtMatmulDescInit_internal)                                                  \
    X(desc_set, cublasLtMatmulDescSetAttribute)                                                    \
    X(layout_init, cublasLtMatrixLayoutInit_internal)                                              \
    X(preference_init, cublasLtMatmulPreferenceInit_internal)                                      \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute)                                        \
    X(config_get, cublasLtMatmulAlgoConfigGetAttribute)                                            \
    X(status_name, cublasLtGetStatusName)

struct fp8_lt {
    cublasLtHandle_t handle;
    uint64_t version;
#define X(member, symbol) __typeof__(&symbol) member;
    LT_TABLE(X)
#undef X
};

static const uint64_t oldest_version = 120000; /* FP8 with scales by pointer, fast accumulation */

static fp8_status open_table(struct fp8_lt *lt)
{
    const struct fp8_dynlib *library;
    char message[FP8_DYNLIB_MESSAGE_SIZE];
    const struct fp8_dynlib_symbol symbols[] = {
#define X(member, symbol) { #symbol, &lt->member, false },
        LT_TABLE(X)
#undef X
    };
    FP8_TRY(fp8_library_open(FP8_LIBRARY_CUBLASLT, &library));
    if (!fp8_dynlib_symbols(library, symbols, sizeof symbols / sizeof symbols[0], message,
                            sizeof message))
        return fp8_fail(FP8_ERR_LIBRARY, "%s", message);
    lt->version = lt->get_version();
    if (lt->version < oldest_version)
        return fp8_fail(FP8_ERR_LIBRARY, "%s is cuBLASLt %llu; %llu (CUDA 12) or newer is needed",
                        library->path, (unsigned long long)lt->version,
                        (unsigned long long)oldest_version);
    return FP8_OK;
}

fp8_status fp8_lt_create(const struct fp8_context *context, struct fp8_lt **lt)
{
    *lt = NULL;
    struct fp8_lt *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_fail_memory("cuBLASLt", sizeof *made);
    fp8_status status = open_table(made);
    if (status == FP8_OK) {
        cublasStatus_t result = made->create(&made->handle);
        if (result != CUBLAS_STATUS_SUCCESS)
            status = fp8_fail(
                result == CUBLAS_STATUS_ALLOC_FAILED ? FP8_ERR_MEMORY : FP8_ERR_CUBLASLT,
                "cublasLtCreate on device %d: %s", context->device, made->status_name(result));
    }
    if (status != FP8_OK) {
        fp8_release(made);
        return status;
    }
    *lt = made;
    return FP8_OK;
}

void fp8_lt_destroy(struct fp8_lt *lt)
{
    if (!lt)
        return;
    (void)lt->destroy(lt->handle);
    fp8_release(lt);
}

uint64_t fp8_lt_version(const struct fp8_lt *lt)
{
    return lt->version;
}

/* ---- descriptors ---- */

struct descriptors {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a; /* the library's A is our b, and the other way round */
    cublasLtMatrixLayoutOpaque_t b;
    cublasLtMatrixLayoutOpaque_t out;
};

static cudaDataType_t data_type(fp8_dtype dtype)
{
    switch (dtype) {
    case FP8_DTYPE_E4M3:
        return CUDA_R_8F_E4M3;
    case FP8_DTYPE_E5M2:
        return CUDA_R_8F_E5M2;
    case FP8_DTYPE_BF16:
        return CUDA_R_16BF;
    case FP8_DTYPE_FP16:
        return CUDA_R_16F;
    default:
        return CUDA_R_32F;
    }
}

/* Attributes and values of CUDA 12.9, which older headers lack. */
enum { DESC_A_SCALE_MODE = 31, DESC_B_SCALE_MODE = 32 };
enum { SCALE_SCALAR = 0, SCALE_VECTOR_128 = 4, SCALE_BLOCK_128 = 5 };

static int32_t scale_mode(const struct fp8_lt_operand *operand)
{
    switch (operand->scaling) {
    case FP8_SCALING_BLOCK:
        return SCALE_VECTOR_128;
    case FP8_SCALING_TILE:
        return SCALE_BLOCK_128;
    default:
        return SCALE_SCALAR;
    }
}

static cublasStatus_t set_op(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
                             cublasLtMatmulDesc_t op)
{
    const struct fp8_lt_operand *a = &problem->b, *b = &problem->a;
    const cublasOperation_t a_op = a->transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t b_op = b->transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int8_t fast = problem->fast;
    const int32_t sms = problem->max_sms, bias_type = CUDA_R_16BF;
    const int32_t a_mode = scale_mode(a), b_mode = scale_mode(b);
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const bool scaled = a->scaling != FP8_SCALING_NONE;
    const struct {
        cublasLtMatmulDescAttributes_t attribute;
        const void *value;
        size_t size;
        bool wanted;
    } list[] = {
        { CUBLASLT_MATMUL_DESC_TRANSA, &a_op, sizeof a_op, true },
        { CUBLASLT_MATMUL_DESC_TRANSB, &b_op, sizeof b_op, true },
        { CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast, scaled },
        { CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a->scales, sizeof a->scales, scaled },
        { CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b->scales, sizeof b->scales, scaled },
        { (cublasLtMatmulDescAttributes_t)DESC_A_SCALE_MODE, &a_mode, sizeof a_mode,
          a_mode != SCALE_SCALAR },
        { (cublasLtMatmulDescAttributes_t)DESC_B_SCALE_MODE, &b_mode, sizeof b_mode,
          b_mode != SCALE_SCALAR },
        { CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms, sms > 0 },
        { CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue, problem->has_bias },
        { CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type, problem->has_bias },
        { CUBLASLT_MATMUL_DESC_BIAS_POINTER, &problem->bias, sizeof problem->bias,
          problem->has_bias },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        if (!list[i].wanted)
            continue;
        cublasStatus_t status = lt->desc_set(op, list[i].attribute, list[i].value, list[i].size);
        if (status != CUBLAS_STATUS_SUCCESS)
            return status;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* An operand of `rows` rows as it lies in memory, column-major. */
static cublasStatus_t describe_operand(const struct fp8_lt *lt, const struct fp8_lt_operand *o,
                                       int64_t rows, int64_t depth,
                                       cublasLtMatrixLayoutOpaque_t *layout)
{
    uint64_t along = (uint64_t)(o->transposed ? rows : depth);
    uint64_t lines = (uint64_t)(o->transposed ? depth : rows);
    return lt->layout_init(layout, sizeof *layout, data_type(o->dtype), along, lines, o->ld);
}

static cublasStatus_t describe(const struct fp8_lt *lt, const struct fp8_lt_problem *p,
                               struct descriptors *d)
{
    cublasStatus_t status = lt->desc_init(&d->op, sizeof d->op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_op(lt, p, &d->op);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_operand(lt, &p->b, p->cols, p->depth, &d->a);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_operand(lt, &p->a, p->rows, p->depth, &d->b);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt->layout_init(&d->out, sizeof d->out, data_type(p->out_dtype), (uint64_t)p->cols,
                                 (uint64_t)p->rows, p->out_ld);
    return status;
}

/* ---- asking and running ---- */

/* FP8 buffers are the runtime's own: rows begin at multiples of 128 bytes. */
enum { MOST_CHOICES = 16, FP8_ALIGNMENT = 128, ALIGNMENT = 16 };

static cublasStatus_t set_preference(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
                                     cublasLtMatmulPreference_t preference)
{
    const bool own = problem->a.dtype != FP8_DTYPE_BF16, odd = problem->unaligned;
    const uint32_t operand = own ? FP8_ALIGNMENT : odd ? 2 : ALIGNMENT;
    const uint32_t out = odd ? (uint32_t)fp8_dtype_bytes(problem->out_dtype) : ALIGNMENT;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint64_t workspace = problem->workspace_bytes;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t size;
    } list[] = {
        { CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace },
        { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &operand, sizeof operand },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &operand, sizeof operand },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out, sizeof out },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out, sizeof out },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        cublasStatus_t status =
            lt->preference_set(preference, list[i].attribute, list[i].value, list[i].size);
        if (status != CUBLAS_STATUS_SUCCESS)
            return status;
    }
    return CUBLAS_STATUS_SUCCESS;
}

int fp8_lt_ask(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
               struct fp8_lt_choice *choices, int most)
{
    struct descriptors d;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t results[MOST_CHOICES];
    int found = 0, kept = 0;
    if (most > MOST_CHOICES)
        most = MOST_CHOICES;
    cublasStatus_t status = describe(lt, problem, &d);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt->preference_init(&preference, sizeof preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_preference(lt, problem, &preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt->heuristic(lt->handle, &d.op, &d.a, &d.b, &d.out, &d.out, &preference, most,
                               results, &found);
    if (status != CUBLAS_STATUS_SUCCESS)
        return 0;
    for (int i = 0; i < found; i++) {
        if (results[i].state != CUBLAS_STATUS_SUCCESS ||
            results[i].workspaceSize > problem->workspace_bytes)
            continue;
        choices[kept++].algo = results[i].algo;
    }
    return kept;
}

bool fp8_lt_check(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
                  const uint64_t algo[8], struct fp8_lt_choice *choice)
{
    struct descriptors d;
    cublasLtMatmulHeuristicResult_t result = { .state = CUBLAS_STATUS_NOT_SUPPORTED };
    cublasLtMatmulAlgo_t given;
    _Static_assert(sizeof given == 8 * sizeof *algo, "an algorithm is 64 bytes");
    memcpy(&given, algo, sizeof given);
    if (describe(lt, problem, &d) != CUBLAS_STATUS_SUCCESS ||
        lt->check(lt->handle, &d.op, &d.a, &d.b, &d.out, &d.out, &given, &result) !=
            CUBLAS_STATUS_SUCCESS ||
        result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > problem->workspace_bytes)
        return false;
    choice->algo = given;
    return true;
}

bool fp8_lt_try(const struct fp8_lt *lt, const struct fp8_lt_problem *problem,
                const struct fp8_lt_choice *choice, const char **reason)
{
    static const float one = 1.0f, zero = 0.0f;
    struct descriptors d;
    cublasStatus_t status = describe(lt, problem, &d);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt->matmul(lt->handle, &d.op, &one, problem->b.data, &d.a, problem->a.data, &d.b,
                            problem->accumulate ? &one : &zero, problem->out, &d.out, problem->out,
                            &d.out, &choice->algo, problem->workspace, problem->workspace_bytes,
                            problem->stream);
    if (status == CUBLAS_STATUS_SUCCESS)
        return true;
    *reason = lt->status_name(status);
    return false;
}

void fp8_lt_name(const struct fp8_lt *lt, const struct fp8_lt_choice *choice, char *text,
                 size_t size)
{
    int32_t id = -1;
    uint32_t tile = 0, stages = 0;
    uint16_t cluster = 0;
    size_t written;
    (void)lt->config_get(&choice->algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written);
    (void)lt->config_get(&choice->algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &written);
    (void)lt->config_get(&choice->algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages,
                         &written);
    (void)lt->config_get(&choice->algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster,
                         sizeof cluster, &written);
    snprintf(text, size, "cublaslt algo %d, tile %u, stages %u, cluster %u", id, tile, stages,
             cluster);
}
