/*
 * ops.c - the table of ops.h as data: names of the ops, names and types of their arguments.
 */
#include <string.h>

#include "runtime/ops.h"

struct op_arg {
    const char *name;
    enum fp8_arg_type type;
};
#define X(name, type) { #name, FP8_ARG_##type },
static const struct op_arg amax_args[] = { FP8_OP_ARGS_AMAX(X) };
static const struct op_arg quantize_args[] = { FP8_OP_ARGS_QUANTIZE(X) };
static const struct op_arg store_args[] = { FP8_OP_ARGS_STORE(X) };
static const struct op_arg dequantize_args[] = { FP8_OP_ARGS_DEQUANTIZE(X) };
static const struct op_arg gemm_args[] = { FP8_OP_ARGS_GEMM(X) };
#undef X

static const struct {
    const struct op_arg *args;
    int count;
} ops[FP8_OP_COUNT] = {
    [FP8_OP_AMAX] = { amax_args, FP8_AMAX_ARG_COUNT },
    [FP8_OP_QUANTIZE] = { quantize_args, FP8_QUANTIZE_ARG_COUNT },
    [FP8_OP_STORE] = { store_args, FP8_STORE_ARG_COUNT },
    [FP8_OP_DEQUANTIZE] = { dequantize_args, FP8_DEQUANTIZE_ARG_COUNT },
    [FP8_OP_GEMM] = { gemm_args, FP8_GEMM_ARG_COUNT },
};
#define X(NAME, name, ARGS) name,
const char *const fp8_op_names[FP8_OP_COUNT] = { FP8_OPS(X) };
#undef X

int fp8_op_arg(enum fp8_op op, const char *name)
{
    for (int i = 0; i < ops[op].count; i++) {
        if (strcmp(ops[op].args[i].name, name) == 0)
            return i;
    }
    return -1;
}

int fp8_op_arg_count(enum fp8_op op)
{
    return ops[op].count;
}

const char *fp8_op_arg_name(enum fp8_op op, int index)
{
    return ops[op].args[index].name;
}

enum fp8_arg_type fp8_op_arg_type(enum fp8_op op, int index)
{
    return ops[op].args[index].type;
}
