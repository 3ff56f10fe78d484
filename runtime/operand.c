/*
 * operand.c - where the parts of an operand lie: arithmetic on plain data.
 *
 * The layout is the one that fp8.h documents; the manifest's buffers say the same and are compared
 * with it when a bundle is opened, so that the two cannot drift apart. No device, no memory is
 * touched.
 */
#include <string.h>

#include "runtime/internal.h"

static const int64_t bytes_limit = (int64_t)1 << 62;

/* rows x cols elements as a part; -1 beyond the limit. */
static int64_t part_bytes(int64_t rows, int64_t cols, int64_t size)
{
    int64_t bytes;
    if (__builtin_mul_overflow(rows, cols, &bytes) || bytes > bytes_limit / 16)
        return -1;
    return (int64_t)fp8_align_up((size_t)(bytes * size), FP8_PART_ALIGN);
}

static int64_t copy_bytes(int64_t rows, int64_t depth)
{
    return part_bytes(fp8_round_up(rows, FP8_PAD_ROWS), fp8_round_up(depth, FP8_PAD_LD), 1);
}

/* Elements from row to row of the scales of a copy; their rows. */
static int64_t scales_ld(fp8_scaling scaling, int64_t rows, int64_t depth, int64_t *scale_rows)
{
    switch (scaling) {
    case FP8_SCALING_ROW:
        *scale_rows = 1;
        return fp8_round_up(rows, FP8_PAD_ROW_SCALES);
    case FP8_SCALING_BLOCK:
        *scale_rows = fp8_ceil_div(depth, FP8_BLOCK);
        return fp8_round_up(rows, FP8_PAD_BLOCK_SCALES);
    case FP8_SCALING_TILE:
        *scale_rows = fp8_ceil_div(rows, FP8_BLOCK);
        return fp8_round_up(fp8_ceil_div(depth, FP8_BLOCK), FP8_PAD_TILE_SCALES);
    case FP8_SCALING_TENSOR:
    case FP8_SCALING_NONE:
        break;
    }
    *scale_rows = 0;
    return 0;
}

/* A copy with its scales. */
struct copy {
    int64_t scale_rows, scales_ld, scale_bytes, bytes;
};

static struct copy copy_of(fp8_scaling scaling, int64_t rows, int64_t depth)
{
    struct copy copy;
    copy.scales_ld = scales_ld(scaling, rows, depth, &copy.scale_rows);
    copy.scale_bytes = part_bytes(copy.scale_rows, copy.scales_ld, (int64_t)sizeof(float));
    copy.bytes = copy_bytes(rows, depth);
    return copy;
}

int64_t fp8_operand_bytes(const struct fp8_shape *shape)
{
    int64_t bytes = FP8_PART_ALIGN;
    if (shape->rows < 0 || shape->cols < 0 || shape->rows > bytes_limit ||
        shape->cols > bytes_limit)
        return -1;
    if (shape->copies & FP8_COPY_ROW) {
        struct copy copy = copy_of(shape->scalings[FP8_ROW_COPY], shape->rows, shape->cols);
        if (copy.scale_bytes < 0 || copy.bytes < 0)
            return -1;
        bytes += copy.scale_bytes + copy.bytes;
    }
    if (shape->copies & FP8_COPY_TRANSPOSED) {
        struct copy copy = copy_of(shape->scalings[FP8_TRANSPOSED_COPY], shape->cols, shape->rows);
        if (copy.scale_bytes < 0 || copy.bytes < 0)
            return -1;
        bytes += copy.scale_bytes + copy.bytes;
    }
    return bytes;
}

void fp8_operand_layout(const fp8_operand *operand, fp8_operand_view *view)
{
    uint8_t *at = operand->data;
    memset(view, 0, sizeof *view);
    view->scales = operand->scales ? (float *)(uintptr_t)operand->scales : (float *)(void *)at;
    at += FP8_PART_ALIGN;
    struct copy row = copy_of(operand->row_scaling, operand->rows, operand->cols);
    struct copy transposed = copy_of(operand->transposed_scaling, operand->cols, operand->rows);
    view->row_ld = fp8_round_up(operand->cols, FP8_PAD_LD);
    view->transposed_ld = fp8_round_up(operand->rows, FP8_PAD_LD);
    view->row_scales_ld = row.scales_ld;
    view->transposed_scales_ld = transposed.scales_ld;
    if (operand->copies & FP8_COPY_ROW) {
        view->row_scales = row.scales_ld ? (float *)(void *)at : NULL;
        at += row.scale_bytes;
        view->row = at;
        at += row.bytes;
    }
    if (operand->copies & FP8_COPY_TRANSPOSED) {
        view->transposed_scales = transposed.scales_ld ? (float *)(void *)at : NULL;
        view->transposed = at + transposed.scale_bytes;
    }
}

struct fp8_shape fp8_operand_shape(const struct fp8_layer_plan *plan, fp8_role role, int64_t tokens,
                                   uint32_t copies)
{
    return (struct fp8_shape){
        .rows = role == FP8_ROLE_W ? plan->out_features : tokens,
        .cols = role == FP8_ROLE_DY ? plan->out_features : plan->in_features,
        .copies = copies & fp8_operand_copies(plan, role),
        .scalings = { plan->scalings[role][FP8_ROW_COPY],
                      plan->scalings[role][FP8_TRANSPOSED_COPY] },
    };
}

void fp8_operand_fill(fp8_operand *operand, const struct fp8_layer_plan *plan, fp8_role role,
                      int64_t tokens, uint32_t copies, uint64_t version)
{
    const struct fp8_shape shape = fp8_operand_shape(plan, role, tokens, copies);
    operand->role = role;
    operand->dtype = plan->formats[role];
    operand->copies = shape.copies;
    operand->row_scaling = shape.scalings[FP8_ROW_COPY];
    operand->transposed_scaling = shape.scalings[FP8_TRANSPOSED_COPY];
    operand->rows = shape.rows;
    operand->cols = shape.cols;
    operand->version = version;
    operand->evaluated = 0;
    operand->scales = NULL;
}

void fp8_operand_clear(fp8_operand *operand)
{
    operand->role = FP8_ROLE_NONE;
    operand->dtype = FP8_DTYPE_NONE;
    operand->copies = 0;
    operand->row_scaling = FP8_SCALING_TENSOR;
    operand->transposed_scaling = FP8_SCALING_TENSOR;
    operand->rows = 0;
    operand->cols = 0;
    operand->version = 0;
    operand->evaluated = 0;
    operand->scales = NULL;
}

fp8_status fp8_operand_parts(const fp8_operand *operand, fp8_operand_view *view)
{
    if (!view)
        return fp8_fail(FP8_ERR_ARGUMENT, "operand_parts: view is NULL");
    memset(view, 0, sizeof *view);
    if (!operand)
        return fp8_fail(FP8_ERR_ARGUMENT, "operand_parts: operand is NULL");
    if (operand->size != sizeof *operand)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "operand_parts: operand->size is %u, this library's is %zu; start from "
                        "FP8_OPERAND_INIT",
                        operand->size, sizeof *operand);
    if (operand->reserved[0] | operand->reserved[1])
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "operand_parts: operand->reserved is not 0; start from FP8_OPERAND_INIT");
    if (operand->copies & ~(uint32_t)FP8_COPY_BOTH)
        return fp8_fail(FP8_ERR_OPERAND,
                        "operand_parts: operand->copies is %u; it holds FP8_COPY_ROW, "
                        "FP8_COPY_TRANSPOSED or both",
                        operand->copies);
    if (operand->role == FP8_ROLE_NONE || !operand->data)
        return fp8_fail(FP8_ERR_OPERAND, "operand_parts: the operand is not filled");
    if ((unsigned)operand->row_scaling > FP8_SCALING_NONE ||
        (unsigned)operand->transposed_scaling > FP8_SCALING_NONE)
        return fp8_fail(FP8_ERR_OPERAND, "operand_parts: the scalings %d and %d are none of fp8.h",
                        (int)operand->row_scaling, (int)operand->transposed_scaling);
    const struct fp8_shape shape = {
        operand->rows,
        operand->cols,
        operand->copies,
        { operand->row_scaling, operand->transposed_scaling },
    };
    int64_t bytes = fp8_operand_bytes(&shape);
    if (bytes < 0 || (uint64_t)bytes > operand->bytes)
        return fp8_fail(FP8_ERR_OPERAND,
                        "operand_parts: %lld x %lld with copies %u takes %lld bytes, but the "
                        "operand has %zu",
                        (long long)operand->rows, (long long)operand->cols, operand->copies,
                        (long long)bytes, operand->bytes);
    fp8_operand_layout(operand, view);
    return FP8_OK;
}
