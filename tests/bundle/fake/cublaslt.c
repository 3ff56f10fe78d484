/*
 * cublaslt.c - the fake cuBLASLt: see fake.h.
 *
 * Its rules are those of FP8 on compute capability 9.0, with scales of a tensor and of 128 or
 * 128x128, and those of bf16, which has no others than the alignment that was promised.
 */
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>

#include "fake.h"

#define EXPORT __attribute__((visibility("default")))

static struct fake_lt state = { .offered = 3, .version = FAKE_LT_VERSION };

EXPORT struct fake_lt *fake_lt_state(void);
struct fake_lt *fake_lt_state(void)
{
    return &state;
}

/* What lies in the opaque structs. */
struct op {
    cublasOperation_t a_op, b_op;
    const float *a_scale, *b_scale;
    const void *bias;
    cublasLtEpilogue_t epilogue;
    int32_t bias_type, sms, a_mode, b_mode;
    int8_t fast;
};
enum { SCALAR = 0, LINES_128 = 4, BLOCKS_128 = 5 }; /* modes of scales */
struct layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};
struct preference {
    uint64_t workspace;
    uint32_t reduction, alignment[4];
};
_Static_assert(sizeof(struct op) <= sizeof(cublasLtMatmulDescOpaque_t), "op");
_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "layout");
_Static_assert(sizeof(struct preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "preference");

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = malloc(16);
    if (!*handle)
        return CUBLAS_STATUS_ALLOC_FAILED;
    state.live++;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    state.live--;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void)
{
    return state.version;
}

EXPORT const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "CUBLAS_STATUS_INVALID_VALUE";
    }
}

EXPORT cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                                      cublasComputeType_t compute,
                                                      cudaDataType_t scale)
{
    if (size < sizeof(struct op) || compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F)
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(desc, 0, size);
    ((struct op *)desc)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void *value, size_t size)
{
    struct op *op = (struct op *)desc;
    const struct {
        cublasLtMatmulDescAttributes_t attribute;
        void *field;
        size_t size;
    } fields[] = {
        { CUBLASLT_MATMUL_DESC_TRANSA, &op->a_op, 4 },
        { CUBLASLT_MATMUL_DESC_TRANSB, &op->b_op, 4 },
        { CUBLASLT_MATMUL_DESC_FAST_ACCUM, &op->fast, 1 },
        { CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &op->a_scale, 8 },
        { CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &op->b_scale, 8 },
        { CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &op->a_mode, 4 },
        { CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &op->b_mode, 4 },
        { CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &op->sms, 4 },
        { CUBLASLT_MATMUL_DESC_EPILOGUE, &op->epilogue, 4 },
        { CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &op->bias_type, 4 },
        { CUBLASLT_MATMUL_DESC_BIAS_POINTER, &op->bias, 8 },
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].attribute != attribute)
            continue;
        bool is_mode = attribute == CUBLASLT_MATMUL_DESC_A_SCALE_MODE ||
                       attribute == CUBLASLT_MATMUL_DESC_B_SCALE_MODE;
        if (fields[i].size != size || (is_mode && state.version < 120900))
            return CUBLAS_STATUS_INVALID_VALUE;
        memcpy(fields[i].field, value, size);
        return CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                        cudaDataType type, uint64_t rows,
                                                        uint64_t cols, int64_t ld)
{
    if (size < sizeof(struct layout))
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(layout, 0, size);
    *(struct layout *)layout = (struct layout){ type, rows, cols, ld };
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                            size_t size)
{
    memset(preference, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
    const void *value, size_t size)
{
    struct preference *p = (struct preference *)preference;
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && size == 8)
        memcpy(&p->workspace, value, size);
    else if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK && size == 4)
        memcpy(&p->reduction, value, size);
    else if (attribute >= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
             attribute <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES && size == 4)
        memcpy(&p->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, size);
    else
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

static int64_t bytes_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 1;
}

static bool is_fp8(cudaDataType_t type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static bool scales_fit(const struct op *op, const struct layout *d)
{
    int a = op->a_mode, b = op->b_mode;
    if (a == SCALAR)
        return a == b;
    /* the library has no 128x128 with 128x128; rows are whole vectors */
    return (a == LINES_128 || a == BLOCKS_128) && b == LINES_128 && !op->fast && d->cols % 8 == 0 &&
           (a == BLOCKS_128 || d->rows % 8 == 0);
}

static bool fp8_fits(const struct op *op, const struct layout *a, const struct layout *b,
                     const struct layout *d)
{
    int64_t element = bytes_of(d->type);
    return op->a_op == CUBLAS_OP_T && op->b_op == CUBLAS_OP_N && is_fp8(b->type) &&
           !(a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2) && a->rows % 16 == 0 &&
           a->ld % 16 == 0 && b->ld % 16 == 0 && d->ld * element % 16 == 0 &&
           (int64_t)d->rows * element % 16 == 0 && scales_fit(op, d);
}

/* The library multiplies bf16 into bf16 and fp32 only. */
static bool bf16_fits(const struct op *op, const struct layout *a, const struct layout *b,
                      const struct layout *d)
{
    return a->type == CUDA_R_16BF && b->type == CUDA_R_16BF && d->type != CUDA_R_16F &&
           !op->a_scale && !op->b_scale && !op->fast && op->a_mode == SCALAR &&
           op->b_mode == SCALAR;
}

/* Of the dtype of D, but bf16 for FP8 into fp32. */
static bool bias_fits(const struct op *op, const struct layout *a, const struct layout *d)
{
    bool bf16 = d->type == CUDA_R_16BF || (d->type == CUDA_R_32F && is_fp8(a->type));
    return op->epilogue == CUBLASLT_EPILOGUE_BIAS &&
           op->bias_type == (int32_t)(bf16 ? CUDA_R_16BF : d->type);
}

static uint64_t depth_of(cublasOperation_t op, const struct layout *layout, bool along)
{
    return (op == CUBLAS_OP_N) == along ? layout->rows : layout->cols;
}

/* The rules that need no pointers. */
static bool shape_fits(const struct op *op, const struct layout *a, const struct layout *b,
                       const struct layout *d)
{
    uint64_t m = depth_of(op->a_op, a, true), k = depth_of(op->a_op, a, false);
    bool kinds = is_fp8(a->type) ? fp8_fits(op, a, b, d) : bf16_fits(op, a, b, d);
    return kinds && !is_fp8(d->type) && m == d->rows && k > 0 && m > 0 && d->cols > 0 &&
           depth_of(op->b_op, b, true) == k && depth_of(op->b_op, b, false) == d->cols &&
           a->ld >= (int64_t)a->rows && b->ld >= (int64_t)b->rows && d->ld >= (int64_t)d->rows &&
           (op->epilogue == CUBLASLT_EPILOGUE_DEFAULT || bias_fits(op, a, d));
}

static bool aligned(const void *pointer, uintptr_t to)
{
    return pointer && (uintptr_t)pointer % to == 0;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int most, cublasLtMatmulHeuristicResult_t results[],
    int *found)
{
    const struct preference *p = (const struct preference *)preference;
    *found = 0;
    __atomic_add_fetch(&state.queries, 1, __ATOMIC_RELAXED);
    if (!handle || c != d || p->reduction != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
        return CUBLAS_STATUS_INVALID_VALUE;
    uint32_t promised = p->alignment[0];
    for (int i = 0; i < 4; i++)
        promised = p->alignment[i] < promised ? p->alignment[i] : promised;
    if (promised < 16 && is_fp8(((struct layout *)a)->type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (state.no_algorithm ||
        (state.no_bias && ((struct op *)op)->epilogue == CUBLASLT_EPILOGUE_BIAS) ||
        !shape_fits((struct op *)op, (struct layout *)a, (struct layout *)b, (struct layout *)d))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < state.offered && i < most; i++) {
        memset(&results[i], 0, sizeof results[i]);
        results[i].algo.data[0] = (uint64_t)(state.first + i);
        results[i].algo.data[1] = promised;
        results[i].workspaceSize = 1024;
        results[i].state = CUBLAS_STATUS_SUCCESS;
        *found = i + 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t *algo,
                                              cublasLtMatmulHeuristicResult_t *result)
{
    __atomic_add_fetch(&state.checks, 1, __ATOMIC_RELAXED);
    if (!handle || c != d || algo->data[0] >= FAKE_ALGORITHMS ||
        !shape_fits((struct op *)op, (struct layout *)a, (struct layout *)b, (struct layout *)d))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    memset(result, 0, sizeof *result);
    result->algo = *algo;
    result->workspaceSize = 1024;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(
    const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute, void *value,
    size_t size, size_t *written)
{
    memset(value, 0, size);
    if (attribute == CUBLASLT_ALGO_CONFIG_ID)
        *(int32_t *)value = (int32_t)algo->data[0];
    *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

/* What was promised when the algorithm was asked for; FP8 needs 16 bytes always. */
static bool alignments_fit(const struct op *op, const struct layout *const layouts[3],
                           const void *const pointers[3], uint64_t promised)
{
    if (is_fp8(layouts[0]->type))
        return aligned(pointers[0], 16) && aligned(pointers[1], 16) && aligned(pointers[2], 16) &&
               (!op->a_scale || aligned(op->a_scale, 16)) &&
               (!op->b_scale || aligned(op->b_scale, 16)); /* NULL: 1 */
    for (int i = 0; i < 3; i++) {
        uintptr_t to = promised > 16 ? 16 : (uintptr_t)promised,
                  element = (uintptr_t)bytes_of(layouts[i]->type);
        if (to < element)
            to = element;
        if (!aligned(pointers[i], to) || (uintptr_t)layouts[i]->ld * element % to != 0)
            return false;
    }
    return true;
}

static void run_product(void *product)
{
    if (state.multiply)
        state.multiply(product);
}

static cublasStatus_t refuse(int64_t *counter)
{
    __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

EXPORT cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
    cublasLtMatrixLayout_t a_desc, const void *b, cublasLtMatrixLayout_t b_desc, const void *beta,
    const void *c, cublasLtMatrixLayout_t c_desc, void *d, cublasLtMatrixLayout_t d_desc,
    const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    const struct op *op = (const struct op *)desc;
    const struct layout *la = (struct layout *)a_desc, *lb = (struct layout *)b_desc;
    const struct layout *ld = (struct layout *)d_desc;
    bool bias = op->epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (!handle || !algo || *(const float *)alpha != 1.0f)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!shape_fits(op, la, lb, ld) || c != d || c_desc != d_desc ||
        !alignments_fit(op, (const struct layout *const[]){ la, lb, ld },
                        (const void *const[]){ a, b, d }, algo->data[1]) ||
        (bias && !aligned(op->bias, 16)) || !aligned(workspace, 256) || workspace_bytes < 1024)
        return refuse(&state.rules);
    if ((int)algo->data[0] < state.refusing)
        return refuse(&state.refusals);
    if (state.load && !(state.loaded >> algo->data[0] & 1)) {
        if (!state.load())
            return CUBLAS_STATUS_INTERNAL_ERROR;
        state.loaded |= 1ull << algo->data[0];
    }
    const struct fake_product product = {
        .a_type = la->type,
        .b_type = lb->type,
        .d_type = ld->type,
        .m = (int64_t)ld->rows,
        .n = (int64_t)ld->cols,
        .k = (int64_t)depth_of(op->a_op, la, false),
        .lda = la->ld,
        .ldb = lb->ld,
        .ldd = ld->ld,
        .a = a,
        .b = b,
        .d = d,
        .a_scale = op->a_scale,
        .b_scale = op->b_scale,
        .a_mode = op->a_mode,
        .b_mode = op->b_mode,
        .a_across = op->a_op == CUBLAS_OP_N,
        .b_across = op->b_op == CUBLAS_OP_T,
        .bias = bias ? op->bias : NULL,
        .accumulate = *(const float *)beta != 0.0f,
        .fast = op->fast,
        .sms = op->sms,
    };
    __atomic_add_fetch(&state.products, 1, __ATOMIC_RELAXED);
    if (op->a_mode != SCALAR)
        __atomic_add_fetch(&state.by_block, 1, __ATOMIC_RELAXED);
    else if (!is_fp8(la->type))
        __atomic_add_fetch(&state.of_bf16, 1, __ATOMIC_RELAXED);
    else if (op->a_scale == NULL && op->b_scale == NULL)
        __atomic_add_fetch(&state.unscaled, 1, __ATOMIC_RELAXED);
    state.last_algorithm = (int)algo->data[0];
    if (!state.record || !state.record(stream, run_product, &product, sizeof product))
        run_product((void *)&product);
    return CUBLAS_STATUS_SUCCESS;
}
