/*
 * gemm_generated.c - a product by a kernel of the bundle: its tensor maps and its launch.
 *
 * In: the evaluated arguments of a gemm step. The maps are encoded for each call, on the stack: M,
 * the caller's addresses and leading dims change from call to call, and encoding is a few hundred
 * nanoseconds of host time. Any address and leading dim of out is served: where TMA cannot write
 * it, the kernel's threads do.
 */
#include "runtime/gemm_plan.h"

#include <stdio.h>
#include <string.h>

#include "runtime/driver.h"

_Static_assert(sizeof(CUtensorMap) == FP8_TENSOR_MAP_BYTES, "a tensor map has 128 bytes");

/* TMA: bytes from row to row. */
static const int64_t pitch_limit = (int64_t)1 << 40;

const char *fp8_generated_refusal(const struct fp8_gemm_plan *plan, const struct fp8_range *range,
                                  const struct fp8_choice *choice)
{
    static const int extents[] = { FP8_GEMM_rows, FP8_GEMM_cols, FP8_GEMM_depth };
    if (!choice->overwrite->function || (choice->add && !choice->add->function))
        return "the bundle has no cubin of it for this GPU";
    for (int i = 0; i < 3; i++) { /* the kernel counts with 32 bits, up to a tile beyond the end */
        if (fp8_gemm_extent(plan, extents[i], range->max_tokens) > INT32_MAX - 1024)
            return "an extent is beyond 32 bits";
    }
    return NULL;
}

struct view {
    void *data;
    int64_t rows, cols; /* elements */
    int64_t pitch;      /* bytes */
    fp8_dtype dtype;
};

static CUtensorMapDataType map_type(fp8_dtype dtype)
{
    switch (dtype) {
    case FP8_DTYPE_BF16:
        return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case FP8_DTYPE_FP16:
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case FP8_DTYPE_FP32:
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
        return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    }
}

static fp8_status encode(const struct fp8_context *context, const struct fp8_kernel *kernel,
                         enum fp8_parameter which, const struct view *view, CUtensorMap *map)
{
    const struct fp8_box *box = &kernel->boxes[which - FP8_PARAMETER_MAP_A];
    const cuuint64_t extents[2] = { (cuuint64_t)view->cols, (cuuint64_t)view->rows };
    const cuuint64_t pitches[1] = { (cuuint64_t)view->pitch };
    const cuuint32_t sides[2] = { (cuuint32_t)box->inner, (cuuint32_t)box->outer };
    const cuuint32_t steps[2] = { 1, 1 };
    CUresult result = context->driver->tensor_map_encode(
        map, map_type(view->dtype), 2, view->data, extents, pitches, sides, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS)
        return FP8_OK;
    return fp8_fail_cuda(
        context->driver, result,
        "kernel '%s': the tensor map of %lld x %lld %s, %lld bytes from row to row", kernel->name,
        (long long)view->rows, (long long)view->cols, fp8_dtype_name(view->dtype),
        (long long)view->pitch);
}

/* Whether TMA can write this output: address, pitch and row are whole steps of 16 bytes (a row that
 * ends within a step would have the rest of the step written too: measured), and it adds in the
 * output's own dtype. */
static bool is_mappable(const struct fp8_kernel *kernel, const struct view *out)
{
    if (kernel->semantics.accumulate && out->dtype != FP8_DTYPE_FP32)
        return false;
    int64_t row_bytes = out->cols * (int64_t)fp8_dtype_bytes(out->dtype);
    return (uintptr_t)out->data % FP8_MAP_ALIGN == 0 && out->pitch % FP8_MAP_ALIGN == 0 &&
           row_bytes % FP8_MAP_ALIGN == 0 && out->pitch < pitch_limit;
}

/* What the parameters point to. */
struct parameters {
    CUtensorMap maps[FP8_MAP_COUNT]; /* a, b, out */
    fp8_value values[FP8_GEMM_ARG_COUNT];
    int32_t out_by_map;
};

static fp8_status fill(const struct fp8_context *context, const struct fp8_kernel *kernel,
                       const fp8_value *args, struct parameters *p)
{
    int64_t rows = args[FP8_GEMM_rows].i, cols = args[FP8_GEMM_cols].i;
    int64_t depth = args[FP8_GEMM_depth].i;
    int64_t out_ld = rows > 1 ? args[FP8_GEMM_out_ld].i : cols;
    fp8_dtype dtype = kernel->semantics.target_dtype;
    const struct view a = { args[FP8_GEMM_a].p, rows, depth, args[FP8_GEMM_a_ld].i,
                            FP8_DTYPE_UINT8 };
    const struct view b = { args[FP8_GEMM_b].p, cols, depth, args[FP8_GEMM_b_ld].i,
                            FP8_DTYPE_UINT8 };
    const struct view out = { args[FP8_GEMM_out].p, rows, cols,
                              out_ld * (int64_t)fp8_dtype_bytes(dtype), dtype };
    FP8_TRY(encode(context, kernel, FP8_PARAMETER_MAP_A, &a, &p->maps[0]));
    FP8_TRY(encode(context, kernel, FP8_PARAMETER_MAP_B, &b, &p->maps[1]));
    p->out_by_map = is_mappable(kernel, &out);
    if (p->out_by_map)
        FP8_TRY(encode(context, kernel, FP8_PARAMETER_MAP_OUT, &out, &p->maps[2]));
    else
        memset(&p->maps[2], 0, sizeof p->maps[2]);
    memcpy(p->values, args, sizeof p->values);
    p->values[FP8_GEMM_out_ld].i = out_ld;
    return FP8_OK;
}

fp8_status fp8_generated_run(const struct fp8_context *context, const struct fp8_choice *choice,
                             const struct fp8_frame *frame, const fp8_value *args)
{
    const struct fp8_kernel *kernel = args[FP8_GEMM_accumulate].i ? choice->add : choice->overwrite;
    struct parameters p;
    void *list[FP8_OP_MAX_ARGS];
    FP8_TRY(fill(context, kernel, args, &p));
    for (int i = 0; i < kernel->arg_count; i++) {
        int index = kernel->arg_index[i];
        if (index == FP8_PARAMETER_OUT_BY_MAP)
            list[i] = &p.out_by_map;
        else if (index >= FP8_PARAMETER_MAP_A)
            list[i] = &p.maps[index - FP8_PARAMETER_MAP_A];
        else
            list[i] = &p.values[index];
    }
    return fp8_kernel_launch(context, kernel, fp8_kernel_grid(context, kernel, args, frame->sms),
                             list, frame->stream);
}
