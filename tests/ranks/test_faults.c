/*
 * test_faults.c - four ranks with a model, one of which does something else: what the others are
 * told.
 *
 * Ranks are threads on the host. Rank 2 calls a backward twice, leaves between a gather and the
 * product that needs it, fails in a hook of its own, or just has other tokens than the others,
 * which is no fault. On the others a call fails with a sentence that names a rank and the
 * collective; nothing waits for the timeout, and the next run on new communicators is clean.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/ranks/model_rig.h"

enum { LAYERS = 2, RANKS = 4, ODD = 2, TOKENS = 24, TIMEOUT = 30, MOST_TAKEN = 64 };
enum fault { NONE, OTHER_TOKENS, BACKWARD_TWICE, LEAVES, HOOK_FAILS };

static char bundle[256];

static const char spec[] =
    "return model \"faults\" { tokens = 32, mesh = { fsdp = 4 }, layers = {\n"
    "linear \"a\" { in_features = 48, out_features = 40, bias = true },\n"
    "linear \"b\" { in_features = 33, out_features = 130 },\n"
    "} }\n";

/* A rank at work, and all memory that it took. */
struct bench {
    struct rank *rank;
    fp8_bundle *bundle;
    fp8_layer *layers[LAYERS];
    fp8_layer_info info[LAYERS];
    fp8_model *model;
    fp8_tensor w[LAYERS], bias[LAYERS], dw[LAYERS], dbias[LAYERS];
    fp8_operand saved[LAYERS], grad[LAYERS];
    fp8_call call;
    int64_t tokens;
    void *taken[MOST_TAKEN];
    int taken_count;
};

static void *take(struct bench *b, size_t bytes)
{
    void *memory = NULL;
    if (b->taken_count == MOST_TAKEN)
        return NULL;
    if (fp8_memory_alloc(b->rank->context, bytes, &memory) == FP8_OK && bytes)
        memset(memory, 0x11, bytes);
    b->taken[b->taken_count++] = memory;
    return memory;
}

static fp8_tensor tensor_of(struct bench *b, int64_t rows, int64_t cols, fp8_dtype dtype)
{
    return (fp8_tensor){
        take(b, (size_t)(rows * cols) * fp8_dtype_bytes(dtype)), rows, cols, cols, dtype, 0
    };
}

static fp8_operand operand_of(struct bench *b, int i, fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    if (fp8_layer_bytes(b->layers[i], TOKENS + ODD, which, &operand.bytes) == FP8_OK)
        operand.data = take(b, operand.bytes);
    return operand;
}

static fp8_status refuse(void *user, const fp8_hook_request *request, fp8_tensor *tensor)
{
    (void)user, (void)request, (void)tensor;
    return FP8_ERR_NOT_FOUND;
}

static bool open_bench(struct bench *b, enum fault fault)
{
    fp8_model_layer layers[LAYERS];
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    fp8_hooks hooks = FP8_HOOKS_INIT;
    size_t workspace = 0;
    hooks.output = refuse;
    b->tokens = TOKENS + (fault == OTHER_TOKENS && b->rank->rank == ODD ? ODD : 0);
    if (fp8_bundle_open(b->rank->context, bundle, &b->bundle) != FP8_OK)
        return false;
    for (int i = 0; i < LAYERS; i++) {
        size_t bytes = 0;
        b->info[i].size = sizeof b->info[i];
        if (fp8_layer_create(b->bundle, fp8_bundle_layer_name(b->bundle, i), &b->layers[i]) !=
                FP8_OK ||
            fp8_layer_describe(b->layers[i], &b->info[i]) != FP8_OK ||
            fp8_layer_bytes(b->layers[i], TOKENS + ODD, FP8_BYTES_WORKSPACE, &bytes) != FP8_OK)
            return false;
        workspace = bytes > workspace ? bytes : workspace;
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = b->layers[i];
        layers[i].hooks = fault == HOOK_FAILS && b->rank->rank == ODD && i == 1 ? &hooks : NULL;
    }
    options.layers = layers;
    options.layer_count = LAYERS;
    options.context = b->rank->context;
    options.comm = b->rank->comm;
    options.hash = "faults";
    b->call = (fp8_call)FP8_CALL_INIT;
    b->call.workspace = take(b, workspace);
    b->call.workspace_bytes = workspace;
    return fp8_model_create(&options, &b->model) == FP8_OK;
}

static fp8_status update(struct bench *b)
{
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    for (int i = 0; i < LAYERS; i++) {
        int64_t first, count;
        if (fp8_model_rows(b->model, i, &first, &count) != FP8_OK)
            return FP8_ERR_ARGUMENT;
        const int64_t k = b->info[i].in_features;
        b->w[i] = tensor_of(b, count, k, b->info[i].w_dtype);
        b->bias[i] = tensor_of(b, 1, count, FP8_DTYPE_BF16);
        b->dw[i] = tensor_of(b, count, k, b->info[i].dw_dtype);
        b->dbias[i] = tensor_of(b, 1, count, FP8_DTYPE_FP32);
        b->saved[i] = operand_of(b, i, FP8_BYTES_SAVED);
        b->grad[i] = operand_of(b, i, FP8_BYTES_GRAD);
    }
    args.w = b->w;
    args.bias = b->bias;
    args.version = 1;
    args.call = b->call;
    return fp8_model_update(b->model, &args);
}

static fp8_status forward(struct bench *b, int i)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    fp8_tensor x = tensor_of(b, b->tokens, b->info[i].in_features, b->info[i].x_dtype);
    fp8_tensor y = tensor_of(b, b->tokens, b->info[i].out_features, b->info[i].y_dtype);
    args.x = &x;
    args.y = &y;
    args.saved = &b->saved[i];
    args.call = b->call;
    return fp8_model_fprop(b->model, i, &args);
}

static fp8_status backward(struct bench *b, int i)
{
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    fp8_tensor dy = tensor_of(b, b->tokens, b->info[i].out_features, b->info[i].dy_dtype);
    fp8_tensor dx = tensor_of(b, b->tokens, b->info[i].in_features, b->info[i].dx_dtype);
    passes.dy = &dy;
    passes.dx = &dx;
    passes.saved = &b->saved[i];
    passes.grad = &b->grad[i];
    passes.call = b->call;
    args.backward = &passes;
    args.dw = &b->dw[i];
    args.dbias = b->info[i].has_bias ? &b->dbias[i] : NULL;
    return fp8_model_backward(b->model, i, &args);
}

/* A step up to the first call that fails, whose status it returns. */
static fp8_status step(struct bench *b, enum fault fault)
{
    const bool odd = b->rank->rank == ODD;
    fp8_status status = update(b);
    if (status == FP8_OK)
        status = forward(b, 0);
    if (status == FP8_OK && odd && fault == LEAVES) {
        status = fp8_model_gather(b->model, 1, FP8_PASS_FPROP);
        fp8_comm_abort(b->rank->comm, "killed");
        return status == FP8_OK ? FP8_ERR_COMM : status;
    }
    if (status == FP8_OK)
        status = forward(b, 1);
    if (odd && fault == HOOK_FAILS && status != FP8_OK)
        fp8_comm_abort(b->rank->comm, fp8_last_error());
    for (int i = LAYERS - 1; i >= 0 && status == FP8_OK; i--) {
        status = backward(b, i);
        if (status == FP8_OK && odd && fault == BACKWARD_TWICE && i == 1)
            status = backward(b, i);
    }
    if (status == FP8_OK)
        status = fp8_model_join(b->model, NULL);
    return status == FP8_OK ? fp8_comm_wait(b->rank->comm, NULL) : status;
}

static void body(struct rank *rank)
{
    const enum fault fault = *(const enum fault *)rank->user;
    struct bench b = { .rank = rank };
    rank_check(rank, open_bench(&b, fault));
    fp8_status status = step(&b, fault);
    if (fault == NONE || fault == OTHER_TOKENS) {
        rank_check(rank, status == FP8_OK);
    } else if (rank->rank == ODD) {
        rank_check(rank, status != FP8_OK);
        rank_check(rank, fault != HOOK_FAILS ||
                             (status == FP8_ERR_NOT_FOUND && says("output hook", "'b'", NULL)));
    } else {
        rank_check(rank, status == FP8_ERR_COMM);
        rank_check(rank, says("rank 2", NULL));
        /* what failed stays failed, with the reason */
        rank_check(rank, fp8_comm_poll(rank->comm) == FP8_ERR_COMM);
    }
    fp8_model_destroy(b.model);
    for (int i = 0; i < LAYERS; i++)
        fp8_layer_destroy(b.layers[i]);
    fp8_bundle_close(b.bundle);
    while (b.taken_count > 0)
        fp8_memory_free(rank->context, b.taken[--b.taken_count]);
}

static void test_faults(void **state)
{
    (void)state;
    static const enum fault order[] = { NONE, BACKWARD_TWICE, NONE, LEAVES,
                                        NONE, HOOK_FAILS,     NONE, OTHER_TOKENS };
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        struct timespec start, end;
        enum fault fault = order[i];
        clock_gettime(CLOCK_MONOTONIC, &start);
        ranks_run(RANKS, TIMEOUT, body, &fault);
        clock_gettime(CLOCK_MONOTONIC, &end);
        assert_true(end.tv_sec - start.tv_sec < TIMEOUT / 2); /* found at once, not by the clock */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_faults) };
    ranks_bundle(spec, "none", bundle);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    ranks_bundle_drop(bundle);
    return failed;
}
