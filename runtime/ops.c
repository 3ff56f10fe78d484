/*
 * ops.c - the table of ops.h as data: names of the ops, names and types of their arguments.
 */
#include <string.h>

#include "runtime/ops.h"

struct op_arg {
    const char *name;
    enum fp8_arg_type type;
};

#define ARG(name, type) { #name, FP8_ARG_##type },
#define X(NAME, name, ARGS) [FP8_OP_##NAME] = { { ARGS(ARG) }, FP8_##NAME##_ARG_COUNT },
static const struct {
    struct op_arg args[FP8_OP_MAX_ARGS];
    int count;
} ops[FP8_OP_COUNT] = { FP8_OPS(X) };
#undef X
#undef ARG
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
