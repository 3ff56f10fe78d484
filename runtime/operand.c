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

static int64_t copy_bytes(int64_t rows, int64_t ld_cols)
{
    int64_t bytes;
    if (__builtin_mul_overflow(fp8_round_up(rows, FP8_PAD_ROWS), fp8_round_up(ld_cols, FP8_PAD_LD),
                               &bytes) ||
        bytes > bytes_limit / 4)
        return -1;
    return (int64_t)fp8_align_up((size_t)bytes, FP8_PART_ALIGN);
}

int64_t fp8_operand_bytes(int64_t rows, int64_t cols, uint32_t copies)
{
    if (rows < 0 || cols < 0 || rows > bytes_limit || cols > bytes_limit)
        return -1;
    int64_t bytes = FP8_PART_ALIGN;
    int64_t row = copies & FP8_COPY_ROW ? copy_bytes(rows, cols) : 0;
    int64_t transposed = copies & FP8_COPY_TRANSPOSED ? copy_bytes(cols, rows) : 0;
    return row < 0 || transposed < 0 ? -1 : bytes + row + transposed;
}

void fp8_operand_layout(void *data, int64_t rows, int64_t cols, uint32_t copies,
                        fp8_operand_view *view)
{
    uint8_t *at = data;
    memset(view, 0, sizeof *view);
    view->scales = (float *)(void *)at;
    at += FP8_PART_ALIGN;
    view->row_ld = fp8_round_up(cols, FP8_PAD_LD);
    view->transposed_ld = fp8_round_up(rows, FP8_PAD_LD);
    if (copies & FP8_COPY_ROW) {
        view->row = at;
        at += copy_bytes(rows, cols);
    }
    if (copies & FP8_COPY_TRANSPOSED)
        view->transposed = at;
}

void fp8_operand_fill(fp8_operand *operand, const struct fp8_layer_plan *plan, fp8_role role,
                      int64_t tokens, uint32_t copies, uint64_t version)
{
    operand->role = role;
    operand->dtype = plan->formats[role];
    operand->copies = copies;
    operand->rows = role == FP8_ROLE_W ? plan->out_features : tokens;
    operand->cols = role == FP8_ROLE_DY ? plan->out_features : plan->in_features;
    operand->version = version;
}

void fp8_operand_clear(fp8_operand *operand)
{
    operand->role = FP8_ROLE_NONE;
    operand->dtype = FP8_DTYPE_NONE;
    operand->copies = 0;
    operand->rows = 0;
    operand->cols = 0;
    operand->version = 0;
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
    if (operand->reserved[0] | operand->reserved[1] | operand->reserved[2] | operand->reserved[3])
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "operand_parts: operand->reserved is not 0; start from FP8_OPERAND_INIT");
    if (operand->copies & ~(uint32_t)FP8_COPY_BOTH)
        return fp8_fail(FP8_ERR_OPERAND,
                        "operand_parts: operand->copies is %u; it holds FP8_COPY_ROW, "
                        "FP8_COPY_TRANSPOSED or both",
                        operand->copies);
    if (operand->role == FP8_ROLE_NONE || !operand->data)
        return fp8_fail(FP8_ERR_OPERAND, "operand_parts: the operand is not filled");
    int64_t bytes = fp8_operand_bytes(operand->rows, operand->cols, operand->copies);
    if (bytes < 0 || (uint64_t)bytes > operand->bytes)
        return fp8_fail(FP8_ERR_OPERAND,
                        "operand_parts: %lld x %lld with copies %u takes %lld bytes, but the "
                        "operand has %zu",
                        (long long)operand->rows, (long long)operand->cols, operand->copies,
                        (long long)bytes, operand->bytes);
    fp8_operand_layout(operand->data, operand->rows, operand->cols, operand->copies, view);
    return FP8_OK;
}
