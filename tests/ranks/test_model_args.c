/*
 * test_model_args.c - what a model refuses, on one rank of the host: each wrong argument with its
 * sentence, before anything is done, and the model goes on.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8_model.h"
#include "runtime/fp8_state.h"
#include "tests/ranks/rig.h"

enum { A, B, H, C, LAYERS, M = 5, N = 40, K = 72, WORKSPACE = 1 << 22 };

/* B's two copies of w are gathered apart; H's weight is a hook's; C has no bias. */
static const char spec[] =
    "return model \"args\" { tokens = 8, bias = true, layers = {\n"
    "  linear \"a\" { in_features = 72, out_features = 40, grad_weight = \"bf16\" },\n"
    "  linear \"b\" { in_features = 72, out_features = 40, recipe = recipe.rowwise {} },\n"
    "  linear \"h\" { in_features = 72, out_features = 40, compute = \"bf16\" },\n"
    "  linear \"c\" { in_features = 72, out_features = 40, bias = false,\n"
    "               recipe = recipe.delayed { history_length = 2 } },\n"
    "} }\n";

static struct {
    char path[256];
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_comm *comm;
    fp8_hooks hooks;
    fp8_model_layer layers[LAYERS];
    fp8_model_options options;
    fp8_model *model;
    fp8_tensor w, bias, x, y, dx, dw, dbias;
    fp8_operand saved, grad;
    fp8_call call;
} o;

static void expect(fp8_status got, fp8_status want, const char *part, int line)
{
    if (got != want || (want != FP8_OK && !strstr(fp8_last_error(), part)))
        fail_msg("line %d: status %s, wanted %s with '%s': %s", line, fp8_status_name(got),
                 fp8_status_name(want), part, fp8_last_error());
}

#define GOOD(call) expect((call), FP8_OK, "", __LINE__)
#define REFUSED(part, call) expect((call), FP8_ERR_ARGUMENT, part, __LINE__)
#define REFUSED_AS(status, part, call) expect((call), (status), part, __LINE__)

static fp8_tensor tensor(int64_t rows, int64_t cols, fp8_dtype dtype)
{
    void *data = calloc((size_t)(rows * cols), 4);
    assert_non_null(data);
    return (fp8_tensor){ data, rows, cols, cols, dtype, 0 };
}

static fp8_operand operand(const fp8_layer *layer, fp8_bytes which)
{
    fp8_operand made = FP8_OPERAND_INIT;
    GOOD(fp8_layer_bytes(layer, M, which, &made.bytes));
    made.data = aligned_alloc(256, made.bytes);
    assert_non_null(made.data);
    return made;
}

static fp8_status weight_hook(void *user, const fp8_hook_request *request, fp8_weight_view *view)
{
    (void)user;
    view->tensor = request->is_bias ? o.bias : o.w;
    view->version = 1;
    return FP8_OK;
}

static int set_up(void **state)
{
    (void)state;
    fp8_context_options context = FP8_CONTEXT_OPTIONS_INIT;
    fp8_comm_options comm = FP8_COMM_OPTIONS_INIT;
    context.device = FP8_DEVICE_HOST, context.threads = 1;
    ranks_bundle(spec, "none", o.path);
    GOOD(fp8_context_create(&context, &o.context));
    GOOD(fp8_bundle_open(o.context, o.path, &o.bundle));
    GOOD(fp8_comm_create(o.context, &comm, &o.comm));
    o.hooks = (fp8_hooks)FP8_HOOKS_INIT;
    o.hooks.weight = weight_hook;
    for (int i = 0; i < LAYERS; i++) {
        fp8_layer *layer;
        GOOD(fp8_layer_create(o.bundle, fp8_bundle_layer_name(o.bundle, i), &layer));
        o.layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        o.layers[i].layer = layer;
    }
    o.layers[H].hooks = &o.hooks;
    o.options = (fp8_model_options)FP8_MODEL_OPTIONS_INIT;
    o.options.context = o.context, o.options.comm = o.comm;
    o.options.layers = o.layers, o.options.layer_count = LAYERS;
    GOOD(fp8_model_create(&o.options, &o.model));
    o.w = tensor(N, K, FP8_DTYPE_BF16), o.bias = tensor(1, N, FP8_DTYPE_BF16);
    o.x = tensor(M, K, FP8_DTYPE_BF16), o.y = tensor(M, N, FP8_DTYPE_BF16);
    o.dx = tensor(M, K, FP8_DTYPE_BF16), o.dw = tensor(N, K, FP8_DTYPE_FP32);
    o.dbias = tensor(1, N, FP8_DTYPE_FP32);
    o.saved = operand(o.layers[0].layer, FP8_BYTES_SAVED);
    o.grad = operand(o.layers[0].layer, FP8_BYTES_GRAD);
    o.call = (fp8_call)FP8_CALL_INIT;
    o.call.workspace = malloc(WORKSPACE), o.call.workspace_bytes = WORKSPACE;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fp8_tensor *tensors[] = { &o.w, &o.bias, &o.x, &o.y, &o.dx, &o.dw, &o.dbias };
    for (int i = 0; i < 7; i++)
        free(tensors[i]->data);
    free(o.saved.data), free(o.grad.data), free(o.call.workspace);
    fp8_model_destroy(o.model);
    for (int i = 0; i < LAYERS; i++)
        fp8_layer_destroy((fp8_layer *)(uintptr_t)o.layers[i].layer);
    fp8_comm_destroy(o.comm);
    fp8_bundle_close(o.bundle);
    fp8_context_destroy(o.context);
    ranks_bundle_drop(o.path);
    return 0;
}

/* ---- options ---- */

#define OPTION(change, part)                                                                       \
    do {                                                                                           \
        fp8_model_options wrong = o.options;                                                       \
        fp8_model *made = o.model;                                                                 \
        wrong.change;                                                                              \
        REFUSED(part, fp8_model_create(&wrong, &made));                                            \
        assert_null(made);                                                                         \
    } while (0)

static void test_options(void **state)
{
    (void)state;
    fp8_model *none;
    REFUSED("options is NULL", fp8_model_create(NULL, &none));
    REFUSED("model is NULL", fp8_model_create(&o.options, NULL));
    OPTION(size--, "options->size");
    OPTION(reserved0 = 1, "reserved words are 0");
    OPTION(reserved[3] = 1, "reserved words are 0");
    OPTION(context = NULL, "context is NULL");
    OPTION(layers = NULL, "layers is NULL");
    OPTION(layer_count = 0, "layer_count is 0");
    OPTION(layer_count = 65537, "layer_count is 65537");
    OPTION(slots = -1, "slots is -1");
    OPTION(backward = (fp8_model_weights)3, "backward is 3");
    OPTION(grads = (fp8_model_grads)-1, "grads is -1");
    OPTION(no_prefetch = 2, "no_prefetch is 2");
    OPTION(transposed_shards = 7, "transposed_shards is 7");
    OPTION(comm_sms = -4, "comm_sms is -4");
    OPTION(reduce_by = (fp8_model_reduce)3, "reduce_by is 3");
    OPTION(comm = NULL, "layer 0 ('a') has no weight hook");
    fp8_model_bytes bytes = { 0 };
    REFUSED("its size is not", fp8_model_measure(&o.options, &bytes));
    REFUSED("bytes is NULL", fp8_model_measure(&o.options, NULL));
}

#define LAYER(change, part)                                                                        \
    do {                                                                                           \
        const fp8_model_layer good = o.layers[1];                                                  \
        fp8_model *made = NULL;                                                                    \
        o.layers[1].change;                                                                        \
        REFUSED(part, fp8_model_create(&o.options, &made));                                        \
        o.layers[1] = good;                                                                        \
    } while (0)

static void test_layers(void **state)
{
    (void)state;
    fp8_hooks hooks = o.hooks;
    hooks.size = 8;
    LAYER(size = 0, "size of layer 1 is 0");
    LAYER(reserved[0] = 1, "size of layer 1");
    LAYER(layer = NULL, "layer 1 is NULL");
    LAYER(hooks = &hooks, "hooks->size of layer 1 is 8");
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *other;
    fp8_model *none;
    options.device = FP8_DEVICE_HOST, options.threads = 1;
    GOOD(fp8_context_create(&options, &other));
    o.options.context = other;
    REFUSED("comm is of another context", fp8_model_create(&o.options, &none));
    o.options.comm = NULL;
    REFUSED("layer 0 ('a') is of another context", fp8_model_create(&o.options, &none));
    o.options.context = o.context, o.options.comm = o.comm;
    fp8_context_destroy(other);
}

/* ---- calls ---- */

static fp8_model_update_args update_args(fp8_tensor w[LAYERS], uint64_t version)
{
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    for (int i = 0; i < LAYERS; i++)
        w[i] = o.w;
    args.w = w, args.version = version, args.call = o.call;
    return args;
}

static void test_update(void **state)
{
    (void)state;
    fp8_tensor w[LAYERS], bias[LAYERS] = { o.bias, o.bias, o.bias, o.bias };
    const fp8_model_update_args good = update_args(w, 3);
    fp8_model_update_args args = good;
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &o.x, fprop.y = &o.y, fprop.bias = &o.bias, fprop.call = o.call;
    REFUSED_AS(FP8_ERR_VERSION, "'a' has no values yet", fp8_model_fprop(o.model, 0, &fprop));
    REFUSED("model is NULL", fp8_model_update(NULL, &args));
    REFUSED("args is NULL", fp8_model_update(o.model, NULL));
    args.reserved[2] = 1;
    REFUSED("reserved words", fp8_model_update(o.model, &args));
    args = good, args.version = 0;
    REFUSED("version is 0", fp8_model_update(o.model, &args));
    args = good, args.w = NULL;
    REFUSED("w is NULL", fp8_model_update(o.model, &args));
    args = good, w[C].rows = N - 1;
    REFUSED_AS(FP8_ERR_SHAPE, "layer 'c' takes 40 x 72", fp8_model_update(o.model, &args));
    w[C].rows = N, args.bias = bias, bias[1].cols = N + 1;
    REFUSED_AS(FP8_ERR_SHAPE, "bias is 1 x 41", fp8_model_update(o.model, &args));
    bias[1].cols = N;
    fp8_state *own = NULL;
    GOOD(fp8_state_create(&o.layers[C].layer, 1, &own));
    args.call.state = own;
    REFUSED("call.state is given", fp8_model_update(o.model, &args));
    args.call.state = NULL;
    GOOD(fp8_model_update(o.model, &args));
    REFUSED("state is NULL", fp8_model_advance(o.model, NULL, NULL));
    REFUSED("model is NULL", fp8_model_advance(NULL, own, NULL));
    GOOD(fp8_model_advance(o.model, own, NULL));
    fp8_state_destroy(own);
}

static void test_fprop(void **state)
{
    (void)state;
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &o.x, args.y = &o.y, args.saved = &o.saved, args.call = o.call;
    REFUSED("layer is -1", fp8_model_fprop(o.model, -1, &args));
    REFUSED("layers 0 to 3", fp8_model_fprop(o.model, LAYERS, &args));
    REFUSED("args is NULL", fp8_model_fprop(o.model, 0, NULL));
    args.size = 1;
    REFUSED("library's size", fp8_model_fprop(o.model, 0, &args));
    args.size = sizeof args, args.weight = &o.grad;
    REFUSED("has a weight", fp8_model_fprop(o.model, 0, &args));
    args.weight = NULL, args.reserved[0] = 1;
    REFUSED("reserved is not 0", fp8_model_fprop(o.model, 0, &args));
    args.reserved[0] = 0, args.y = NULL;
    REFUSED("y is NULL", fp8_model_fprop(o.model, 0, &args));
    args.y = &o.y;
    GOOD(fp8_model_fprop(o.model, 0, &args));
}

#define PASSES(change, part)                                                                       \
    do {                                                                                           \
        const fp8_backward_args good = passes;                                                     \
        passes.change;                                                                             \
        REFUSED(part, fp8_model_backward(o.model, 0, &args));                                      \
        passes = good;                                                                             \
    } while (0)
#define GIVEN(layer, change, part)                                                                 \
    do {                                                                                           \
        const fp8_model_backward_args good = args;                                                 \
        args.change;                                                                               \
        REFUSED(part, fp8_model_backward(o.model, layer, &args));                                  \
        args = good;                                                                               \
    } while (0)

static void test_backward(void **state)
{
    (void)state;
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    passes.dy = &o.y, passes.saved = &o.saved, passes.grad = &o.grad, passes.dx = &o.dx;
    passes.call = o.call;
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    args.backward = &passes, args.dw = &o.dw, args.dbias = &o.dbias;
    REFUSED("args or args->backward is NULL", fp8_model_backward(o.model, 0, NULL));
    GIVEN(0, size = 0, "not of this library's sizes");
    GIVEN(0, reserved0 = 1, "args or args->backward");
    GIVEN(0, reserved[1] = 1, "model_backward: args->reserved is not 0");
    GIVEN(0, backward = NULL, "args->backward is NULL");
    GIVEN(0, reduce = 2, "reduce is 2");
    GIVEN(0, accumulate = 2, "accumulate is 2");
    GIVEN(0, reduce = 0, "reduce is 0, but dw is given");
    GIVEN(H, reduce = 1, "a hook has its weight");
    GIVEN(C, reduce = 1, "layer 'c' has no bias");
    PASSES(size = 0, "not of this library's sizes");
    PASSES(reserved[2] = 1, "model_backward, backward: args->reserved is not 0");
    PASSES(weight = &o.saved, "backward->weight is given");
    PASSES(dy = NULL, "backward->dy is NULL");
    o.dw.dtype = FP8_DTYPE_BF16;
    args.accumulate = 1;
    REFUSED_AS(FP8_ERR_DTYPE, "kept in fp32", fp8_model_backward(o.model, 0, &args));
    args.accumulate = 0;
    GOOD(fp8_model_backward(o.model, 0, &args));
    o.dw.dtype = FP8_DTYPE_FP16;
    REFUSED_AS(FP8_ERR_DTYPE, "dw is fp16", fp8_model_backward(o.model, 0, &args));
    o.dw.dtype = FP8_DTYPE_FP32;
    GOOD(fp8_model_backward(o.model, 0, &args));
    o.dw.rows = N + 1;
    REFUSED_AS(FP8_ERR_SHAPE, "dw is 41 x 72", fp8_model_backward(o.model, 0, &args));
    o.dw.rows = N;
    /* where nothing is wanted, dy is looked at all the same */
    const fp8_tensor wrong = { o.y.data, M, N + 1, N + 1, FP8_DTYPE_BF16, 0 };
    args.dw = NULL, args.dbias = NULL, passes.dx = NULL;
    GOOD(fp8_model_backward(o.model, 0, &args));
    passes.dy = &wrong;
    REFUSED_AS(FP8_ERR_SHAPE, "dy is 5 x 41", fp8_model_backward(o.model, 0, &args));
}

static void test_held(void **state)
{
    (void)state;
    fp8_tensor w[LAYERS];
    fp8_model_update_args update = update_args(w, 9);
    const fp8_operand *weight = &o.saved;
    REFUSED("weight is NULL", fp8_model_acquire(o.model, 0, FP8_PASS_FPROP, &o.call, NULL));
    REFUSED("call is NULL", fp8_model_acquire(o.model, 0, FP8_PASS_FPROP, NULL, &weight));
    assert_null(weight);
    REFUSED("pass is 3", fp8_model_acquire(o.model, 0, FP8_PASS_WGRAD, &o.call, &weight));
    REFUSED("pass is 0", fp8_model_gather(o.model, 0, FP8_PASS_WEIGHT));
    REFUSED_AS(FP8_ERR_UNSUPPORTED, "there is no operand",
               fp8_model_acquire(o.model, H, FP8_PASS_FPROP, &o.call, &weight));
    REFUSED("'b' is not acquired", fp8_model_release(o.model, 1, NULL));
    GOOD(fp8_model_acquire(o.model, 1, FP8_PASS_FPROP, &o.call, &weight));
    assert_non_null(weight);
    REFUSED("'b' is acquired; release it first", fp8_model_update(o.model, &update));
    REFUSED("options->backward = FP8_WEIGHTS_KEEP",
            fp8_model_acquire(o.model, 1, FP8_PASS_DGRAD, &o.call, &weight));
    GOOD(fp8_model_acquire(o.model, 0, FP8_PASS_FPROP, &o.call, &weight));
    REFUSED("all 2 slots are held while layer 'c' needs one",
            fp8_model_acquire(o.model, C, FP8_PASS_FPROP, &o.call, &weight));
    GOOD(fp8_model_gather(o.model, C, FP8_PASS_FPROP)); /* does nothing */
    GOOD(fp8_model_release(o.model, 1, NULL));
    GOOD(fp8_model_release(o.model, 0, NULL));
    GOOD(fp8_model_acquire(o.model, 1, FP8_PASS_DGRAD, &o.call, &weight));
    GOOD(fp8_model_release(o.model, 1, NULL));
    GOOD(fp8_model_update(o.model, &update));
}

static void test_trace(void **state)
{
    (void)state;
    int32_t count = -1;
    fp8_model_span span;
    REFUSED("capacity is -1", fp8_model_trace(o.model, -1, NULL));
    REFUSED("capacity is 1048577", fp8_model_trace(o.model, (1 << 20) + 1, NULL));
    GOOD(fp8_model_trace(o.model, 4, NULL));
    REFUSED("count is NULL", fp8_model_spans(o.model, &span, NULL));
    REFUSED("count is -1", fp8_model_spans(o.model, &span, &count));
    count = 1;
    REFUSED("spans is NULL", fp8_model_spans(o.model, NULL, &count));
    GOOD(fp8_model_spans(o.model, &span, &count));
    assert_int_equal(count, 0);
    GOOD(fp8_model_trace(o.model, 0, NULL));
    REFUSED("has no layer 4", fp8_model_rows(o.model, LAYERS, NULL, NULL));
    GOOD(fp8_model_rows(o.model, 0, NULL, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),  cmocka_unit_test(test_layers),
        cmocka_unit_test(test_update),   cmocka_unit_test(test_fprop),
        cmocka_unit_test(test_backward), cmocka_unit_test(test_held),
        cmocka_unit_test(test_trace),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
