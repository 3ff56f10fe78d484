/*
 * fp8_primitives.h - the parts of the passes, for callers that put them together by themselves:
 * quantise a tensor, its amax alone, a weight that is FP8 already, a transposed copy, values back,
 * one product.
 *
 * The laws of fp8.h hold; errors are those of the passes.
 */
#ifndef FP8_PRIMITIVES_H
#define FP8_PRIMITIVES_H

#include "fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Quantises a tensor by the layer's recipe for `role` into `operand` (row and/or transposed copy);
 * for an x that several layers share, or a gather of the caller's own. version is left 0. */
typedef struct fp8_quantize_args {
    uint32_t size;
    fp8_role role;
    uint32_t copies; /* FP8_COPY_*; 0 = all that the recipe has */
    uint32_t reserved0;
    const fp8_tensor *source; /* x[M,K], w[N,K] or dy[M,N] */
    fp8_operand *operand;
    uint32_t *found_inf; /* may be NULL */
    const float *amax;   /* device: the amax that the scale is taken from, instead of source's own;
                          * NULL: source's own. Recipes "current" and "delayed". It should be
                          * finite: +inf is taken as FLT_MAX, NaN and negative as 0 */
    fp8_call call;
    uint64_t reserved[4];
} fp8_quantize_args;

/* *amax = the largest finite |source[i,j]| (0 if there is none), or the larger of that and *amax:
 * for a caller that reduces amaxes over ranks, or over tensors, before it quantises. Layers of
 * recipes "current" and "delayed". */
typedef struct fp8_amax_args {
    uint32_t size;
    fp8_role role;
    uint32_t accumulate; /* 0: *amax =, 1: *amax = max(*amax, ...), a negative one counts as 0 */
    uint32_t reserved0;
    const fp8_tensor *source;
    float *amax;         /* device, 4-byte aligned */
    uint32_t *found_inf; /* may be NULL */
    fp8_call call;
    uint64_t reserved[4];
} fp8_amax_args;

/* A weight that is FP8 already, as a checkpoint has it: w = q * scale_inv, a scale for each stretch
 * of rows. A fused weight ([q; k; v]) keeps the scale of each part; several need a layer that
 * scales w by row (recipes "rowwise", "rowwise_hp_wgrad"), or with weight_scale shard and stretches
 * that begin at multiples of 128 rows; one also fits "current" and "delayed". Fills the row copy,
 * what fprop reads; fp8_transpose makes the other one where there is one scale, or one a shard.
 * The call is asynchronous, but scale_inv and rows are read before it returns.
 * FP8_ERR_SHAPE: the stretches do not cover w, a scale is missing, a stretch begins inside 128 rows
 * that have one scale; FP8_ERR_UNSUPPORTED: the recipe. */
typedef struct fp8_import_args {
    uint32_t size;
    int32_t count;          /* of stretches */
    const fp8_tensor *q;    /* [N,K], w_format; device */
    const float *scale_inv; /* [count], host: positive and finite */
    const int64_t *rows;    /* [count], host: of each stretch; NULL: one of N */
    uint64_t version;       /* as in fp8_weight_args */
    fp8_operand *weight;
    fp8_call call; /* workspace is not used */
    uint64_t reserved[4];
} fp8_import_args;

/* Makes the transposed copy of a filled operand from its row copy, without the tensor it came from:
 * the bytes and scales that quantising both copies would have given. operand->bytes must be enough
 * for both. Possible where the copies share their scales: one a tensor; the w of recipe "block";
 * a w with weight_scale shard, whose row scales are equal within 128 rows and become those of
 * 128 x 128 of the copy. Elsewhere each copy has scales of its own (scaling by row, x and dy of
 * recipe "block"): FP8_ERR_UNSUPPORTED. Does nothing if the copy is there. */
typedef struct fp8_transpose_args {
    uint32_t size;
    uint32_t reserved0;
    fp8_operand *operand;
    fp8_call call; /* workspace is not used */
    uint64_t reserved[4];
} fp8_transpose_args;

/* target = q * scale_inv, exactly, as fp32 [rows, cols]. From the row copy if it is there, else
 * from the transposed one. */
typedef struct fp8_dequantize_args {
    uint32_t size;
    uint32_t reserved0;
    const fp8_operand *operand;
    const fp8_tensor *target; /* fp32 */
    fp8_call call;
    uint64_t reserved[4];
} fp8_dequantize_args;

/* out = a b^T of the pass: fprop (a = x, b = w), dgrad (a = dy, b = w), wgrad (a = dy, b = x); the
 * operands carry the copies which that pass reads. No version check. Passes that multiply tensors
 * (compute "bf16", wgrad of "rowwise_hp_wgrad") have no such product: FP8_ERR_UNSUPPORTED. */
typedef struct fp8_gemm_args {
    uint32_t size;
    fp8_pass pass;
    uint32_t accumulate; /* wgrad only */
    uint32_t reserved0;
    const fp8_operand *a;
    const fp8_operand *b;
    const fp8_tensor *bias; /* fprop only; may be NULL */
    const fp8_tensor *out;
    fp8_call call;
    uint64_t reserved[4];
} fp8_gemm_args;

#define FP8_QUANTIZE_ARGS_INIT                                                                     \
    {                                                                                              \
        sizeof(fp8_quantize_args), FP8_ROLE_NONE, 0, 0, NULL, NULL, NULL, NULL, FP8_CALL_INIT,     \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_AMAX_ARGS_INIT                                                                         \
    {                                                                                              \
        sizeof(fp8_amax_args), FP8_ROLE_NONE, 0, 0, NULL, NULL, NULL, FP8_CALL_INIT,               \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_IMPORT_ARGS_INIT                                                                       \
    {                                                                                              \
        sizeof(fp8_import_args), 0, NULL, NULL, NULL, 0, NULL, FP8_CALL_INIT,                      \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_TRANSPOSE_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(fp8_transpose_args), 0, NULL, FP8_CALL_INIT,                                        \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_DEQUANTIZE_ARGS_INIT                                                                   \
    {                                                                                              \
        sizeof(fp8_dequantize_args), 0, NULL, NULL, FP8_CALL_INIT,                                 \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_GEMM_ARGS_INIT                                                                         \
    {                                                                                              \
        sizeof(fp8_gemm_args), FP8_PASS_FPROP, 0, 0, NULL, NULL, NULL, NULL, FP8_CALL_INIT,        \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

FP8_API fp8_status fp8_quantize(const fp8_layer *layer, const fp8_quantize_args *args);
FP8_API fp8_status fp8_amax(const fp8_layer *layer, const fp8_amax_args *args);
FP8_API fp8_status fp8_import(const fp8_layer *layer, const fp8_import_args *args);
FP8_API fp8_status fp8_transpose(const fp8_layer *layer, const fp8_transpose_args *args);
FP8_API fp8_status fp8_dequantize(const fp8_layer *layer, const fp8_dequantize_args *args);
FP8_API fp8_status fp8_gemm(const fp8_layer *layer, const fp8_gemm_args *args);

#ifdef __cplusplus
}
#endif
#endif /* FP8_PRIMITIVES_H */
