/*
 * test_args.c - every refusal of a pass: status, the sentence's words, and that nothing was
 * touched.
 *
 * One correct call of each kind is the base; each row of a table changes one thing of it.
 */
#include "tests/bundle/bundle_rig.h"

#include "runtime/bundle_format.h"

enum { M = 10, N = 37, K = 50 };

/* Everything that a call can be given, correct as it stands. */
struct world {
    fp8_tensor x, w, y, dy, dx, dw, bias, dbias, x32;
    fp8_operand weight, saved, grad, xq, fresh;
    fp8_call call;
    uint32_t found_inf[2];
    fp8_weight_args update;
    fp8_fprop_args fprop;
    fp8_quantize_dy_args quantize_dy;
    fp8_wgrad_args wgrad;
    fp8_dgrad_args dgrad;
    fp8_backward_args backward;
    fp8_quantize_args quantize;
    fp8_dequantize_args dequantize;
    fp8_gemm_args gemm;
};

static fp8_context *context;
static fp8_bundle *bundle;
static fp8_layer *layer, *no_bias;
static char *folder;
static void *blocks[64];
static int block_count;

static void *block(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(posix_memalign(&memory, 256, bytes + 64), 0);
    memset(memory, 0, bytes + 64);
    blocks[block_count++] = memory;
    return memory;
}

static fp8_tensor tensor(int64_t rows, int64_t cols, fp8_dtype dtype)
{
    return (fp8_tensor){ block((size_t)(rows * cols) * 4), rows, cols, cols, dtype, 0 };
}

static fp8_operand operand(fp8_bytes which)
{
    fp8_operand made = FP8_OPERAND_INIT;
    EXPECT_OK(fp8_layer_bytes(layer, M, which, &made.bytes));
    made.data = block(made.bytes);
    return made;
}

static void fill_args(struct world *w)
{
    w->update = (fp8_weight_args){ .size = sizeof w->update,
                                   .w = &w->w,
                                   .version = 8,
                                   .weight = &w->fresh,
                                   .found_inf = w->found_inf,
                                   .call = w->call };
    w->fprop = (fp8_fprop_args){ .size = sizeof w->fprop,
                                 .x = &w->x,
                                 .weight = &w->weight,
                                 .bias = &w->bias,
                                 .y = &w->y,
                                 .saved = &w->saved,
                                 .found_inf = w->found_inf,
                                 .call = w->call };
    w->quantize_dy = (fp8_quantize_dy_args){ .size = sizeof w->quantize_dy,
                                             .dy = &w->dy,
                                             .saved = &w->saved,
                                             .grad = &w->grad,
                                             .dbias = &w->dbias,
                                             .found_inf = w->found_inf,
                                             .call = w->call };
    w->wgrad = (fp8_wgrad_args){
        .size = sizeof w->wgrad, .saved = &w->saved, .grad = &w->grad, .dw = &w->dw, .call = w->call
    };
    w->dgrad = (fp8_dgrad_args){ .size = sizeof w->dgrad,
                                 .grad = &w->grad,
                                 .weight = &w->weight,
                                 .dx = &w->dx,
                                 .call = w->call };
    w->backward = (fp8_backward_args){ .size = sizeof w->backward,
                                       .dy = &w->dy,
                                       .saved = &w->saved,
                                       .weight = &w->weight,
                                       .grad = &w->grad,
                                       .dbias = &w->dbias,
                                       .dw = &w->dw,
                                       .dx = &w->dx,
                                       .call = w->call };
    w->quantize = (fp8_quantize_args){ .size = sizeof w->quantize,
                                       .role = FP8_ROLE_X,
                                       .source = &w->x,
                                       .operand = &w->xq,
                                       .call = w->call };
    w->dequantize = (fp8_dequantize_args){
        .size = sizeof w->dequantize, .operand = &w->xq, .target = &w->x32, .call = w->call
    };
    w->gemm = (fp8_gemm_args){ .size = sizeof w->gemm,
                               .pass = FP8_PASS_FPROP,
                               .a = &w->xq,
                               .b = &w->weight,
                               .bias = &w->bias,
                               .out = &w->y,
                               .call = w->call };
}

/* All passes once, correctly, so that every operand is filled. */
static void make_world(struct world *w)
{
    memset(w, 0, sizeof *w);
    w->x = tensor(M, K, FP8_DTYPE_BF16), w->w = tensor(N, K, FP8_DTYPE_BF16);
    w->y = tensor(M, N, FP8_DTYPE_BF16), w->dy = tensor(M, N, FP8_DTYPE_BF16);
    w->dx = tensor(M, K, FP8_DTYPE_BF16), w->dw = tensor(N, K, FP8_DTYPE_FP32);
    w->bias = tensor(1, N, FP8_DTYPE_BF16), w->dbias = tensor(1, N, FP8_DTYPE_FP32);
    w->x32 = tensor(M, K, FP8_DTYPE_FP32);
    w->weight = operand(FP8_BYTES_WEIGHT), w->saved = operand(FP8_BYTES_SAVED);
    w->grad = operand(FP8_BYTES_GRAD), w->xq = operand(FP8_BYTES_X),
    w->fresh = operand(FP8_BYTES_WEIGHT);
    EXPECT_OK(fp8_layer_bytes(layer, M, FP8_BYTES_WORKSPACE, &w->call.workspace_bytes));
    w->call.workspace = block(w->call.workspace_bytes);
    fill_args(w);
    w->update.weight = &w->weight, w->update.version = 7;
    EXPECT_OK(fp8_weight_update(layer, &w->update));
    EXPECT_OK(fp8_layer_fprop(layer, &w->fprop));
    EXPECT_OK(fp8_layer_quantize_dy(layer, &w->quantize_dy));
    EXPECT_OK(fp8_layer_wgrad(layer, &w->wgrad));
    EXPECT_OK(fp8_layer_dgrad(layer, &w->dgrad));
    EXPECT_OK(fp8_layer_backward(layer, &w->backward));
    EXPECT_OK(fp8_quantize(layer, &w->quantize));
    EXPECT_OK(fp8_dequantize(layer, &w->dequantize));
    EXPECT_OK(fp8_gemm(layer, &w->gemm));
    fill_args(w);
}

static int set_up(void **state)
{
    (void)state;
    folder = bundle_folder();
    json_t *manifest = bundle_manifest();
    bundle_write(manifest, folder);
    json_decref(manifest);
    context = bundle_context(FP8_DEVICE_HOST);
    EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
    EXPECT_OK(fp8_layer_create(bundle, "bias", &layer));
    EXPECT_OK(fp8_layer_create(bundle, "plain", &no_bias));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fp8_layer_destroy(no_bias);
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    bundle_remove(folder);
    while (block_count > 0)
        free(blocks[--block_count]);
    return 0;
}

/* ---- one change, one refusal ---- */

static struct world world;
static fp8_tensor changed;
static fp8_operand other;

/* Runs `change` on a copy of the world's args, then the call, and compares all operands
 * afterwards. */
#define REFUSED(status, part, change, call)                                                        \
    do {                                                                                           \
        struct world before = world;                                                               \
        change;                                                                                    \
        fp8_operand operands[] = { world.weight, world.saved, world.grad, world.xq, world.fresh }; \
        EXPECT_REFUSED(status, part, call);                                                        \
        const fp8_operand after[] = { world.weight, world.saved, world.grad, world.xq,             \
                                      world.fresh };                                               \
        assert_memory_equal(operands, after, sizeof after);                                        \
        world = before;                                                                            \
    } while (0)

#define FPROP fp8_layer_fprop(layer, &world.fprop)
#define UPDATE fp8_weight_update(layer, &world.update)
#define QUANTIZE_DY fp8_layer_quantize_dy(layer, &world.quantize_dy)
#define WGRAD fp8_layer_wgrad(layer, &world.wgrad)
#define DGRAD fp8_layer_dgrad(layer, &world.dgrad)
#define BACKWARD fp8_layer_backward(layer, &world.backward)
#define QUANTIZE fp8_quantize(layer, &world.quantize)
#define DEQUANTIZE fp8_dequantize(layer, &world.dequantize)
#define GEMM fp8_gemm(layer, &world.gemm)

static void structs_and_flags(void **state)
{
    (void)state;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "fprop: layer is NULL", fp8_layer_fprop(NULL, &world.fprop));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "fprop: args is NULL", fp8_layer_fprop(layer, NULL));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "weight_update: layer is NULL", fp8_weight_update(NULL, NULL));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "wgrad: args is NULL", fp8_layer_wgrad(layer, NULL));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "backward: args is NULL", fp8_layer_backward(layer, NULL));
    REFUSED(FP8_ERR_ARGUMENT, "args->size is 0", world.fprop.size = 0, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "args->size is 7", world.update.size = 7, UPDATE);
    REFUSED(FP8_ERR_ARGUMENT, "args->reserved", world.dgrad.reserved[3] = 1, DGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "args->reserved0", world.fprop.reserved0 = 1, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "args->reserved0", world.quantize_dy.reserved0 = 1, QUANTIZE_DY);
    REFUSED(FP8_ERR_ARGUMENT, "accumulate_dbias is 2", world.backward.accumulate_dbias = 2,
            BACKWARD);
    REFUSED(FP8_ERR_ARGUMENT, "call.flags is 2", world.fprop.call.flags = 2, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "w is given and weight->version is", world.fprop.w = &world.w, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "the tensor x is given", world.wgrad.x = &world.x, WGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "the tensor dy is given", world.wgrad.dy = &world.dy, WGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "the tensor dy is given", world.dgrad.dy = &world.dy, DGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "the tensor w is given", world.dgrad.w = &world.w, DGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "the tensor x is given", world.backward.x = &world.x, BACKWARD);
    REFUSED(FP8_ERR_ARGUMENT, "the tensor w is given", world.backward.w = &world.w, BACKWARD);
    REFUSED(FP8_ERR_ARGUMENT, "args->reserved0", world.quantize.reserved0 = 1, QUANTIZE);
    REFUSED(FP8_ERR_ARGUMENT, "args->reserved0", world.dequantize.reserved0 = 1, DEQUANTIZE);
    REFUSED(FP8_ERR_ARGUMENT, "args->reserved0", world.gemm.reserved0 = 1, GEMM);
    REFUSED(FP8_ERR_ARGUMENT, "max_sms is -1", world.fprop.call.max_sms = -1, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "call.reserved", world.wgrad.call.reserved = 1, WGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "max_sms is -2", world.dequantize.call.max_sms = -2, DEQUANTIZE);
    REFUSED(FP8_ERR_ARGUMENT, "accumulate is 2", world.wgrad.accumulate = 2, WGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "accumulate_dw is 2", world.backward.accumulate_dw = 2, BACKWARD);
    REFUSED(FP8_ERR_ARGUMENT, "accumulate_dbias is 3", world.quantize_dy.accumulate_dbias = 3,
            QUANTIZE_DY);
    REFUSED(FP8_ERR_ARGUMENT, "stale_ok is 9", world.dgrad.stale_ok = 9, DGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "copies is 4", world.update.copies = 4, UPDATE);
    REFUSED(FP8_ERR_ARGUMENT, "copies is 8", world.quantize_dy.copies = 8, QUANTIZE_DY);
    REFUSED(FP8_ERR_ARGUMENT, "version is 0", world.update.version = 0, UPDATE);
    REFUSED(FP8_ERR_ARGUMENT, "role is 0", world.quantize.role = FP8_ROLE_NONE, QUANTIZE);
    REFUSED(FP8_ERR_ARGUMENT, "pass is 0", world.gemm.pass = FP8_PASS_WEIGHT, GEMM);
    REFUSED(FP8_ERR_ARGUMENT, "only wgrad accumulates", world.gemm.accumulate = 1, GEMM);
    REFUSED(FP8_ERR_ARGUMENT, "only fprop has one", world.gemm.pass = FP8_PASS_DGRAD, GEMM);
    REFUSED(FP8_ERR_ALIGNMENT, "found_inf is",
            world.fprop.found_inf = (uint32_t *)(void *)((char *)world.found_inf + 2), FPROP);
    REFUSED(FP8_ERR_WORKSPACE, "FP8_BYTES_WORKSPACE", world.fprop.call.workspace_bytes--, FPROP);
    REFUSED(FP8_ERR_WORKSPACE, "10 tokens take", world.dgrad.call.workspace = NULL, DGRAD);
    REFUSED(FP8_ERR_WORKSPACE, "0 tokens take", world.update.call.workspace_bytes = 100, UPDATE);
}

static void tensors(void **state)
{
    (void)state;
    REFUSED(FP8_ERR_ARGUMENT, "fprop: y is NULL; pass a tensor of 10 x 37 bf16",
            world.fprop.y = NULL, FPROP);
    REFUSED(FP8_ERR_SHAPE, "fprop: y is 9 x 37, but layer 'bias' takes 10 x 37 here",
            (changed = world.y, changed.rows = 9, world.fprop.y = &changed), FPROP);
    REFUSED(FP8_ERR_SHAPE, "x is 10 x 51",
            (changed = world.x, changed.cols = 51, world.fprop.x = &changed), FPROP);
    REFUSED(FP8_ERR_SHAPE, "w is 50 x 37",
            (changed = world.w, changed.rows = K, changed.cols = N, world.update.w = &changed),
            UPDATE);
    REFUSED(FP8_ERR_SHAPE, "x->rows is -1",
            (changed = world.x, changed.rows = -1, world.fprop.x = &changed), FPROP);
    REFUSED(FP8_ERR_TOKENS,
            "dy->rows is 301 tokens, but layer 'bias' was built for max_tokens = 300",
            (changed = world.dy, changed.rows = 301, world.quantize_dy.dy = &changed), QUANTIZE_DY);
    REFUSED(FP8_ERR_DTYPE, "dw is bf16, but layer 'bias' takes fp32",
            (changed = world.dw, changed.dtype = FP8_DTYPE_BF16, world.wgrad.dw = &changed), WGRAD);
    REFUSED(FP8_ERR_DTYPE, "x is none",
            (changed = world.x, changed.dtype = (fp8_dtype)99, world.fprop.x = &changed), FPROP);
    REFUSED(FP8_ERR_SHAPE, "row stride (ld) of 0 elements",
            (changed = world.dy, changed.ld = 0, world.backward.dy = &changed), BACKWARD);
    REFUSED(FP8_ERR_SHAPE, "row stride (ld) of 36 elements, but its rows have 37",
            (changed = world.dy, changed.ld = 36, world.backward.dy = &changed), BACKWARD);
    REFUSED(FP8_ERR_SHAPE, "row stride (ld) of 49 elements, but its rows have 50",
            (changed = world.x, changed.rows = 2, changed.ld = 49, world.fprop.x = &changed),
            FPROP);
    REFUSED(FP8_ERR_SHAPE, "beyond the address space",
            (changed = world.dx, changed.ld = INT64_MAX / 2, world.dgrad.dx = &changed), DGRAD);
    REFUSED(FP8_ERR_SHAPE, "beyond the address space",
            (changed = world.dx, changed.ld = INT64_MAX / M, world.dgrad.dx = &changed), DGRAD);
    REFUSED(FP8_ERR_ARGUMENT, "dx->data is NULL, but it has 10 x 50 elements",
            (changed = world.dx, changed.data = NULL, world.dgrad.dx = &changed), DGRAD);
    REFUSED(
        FP8_ERR_ALIGNMENT, "not a multiple of 4, the size of a fp32 element",
        (changed = world.dw, changed.data = (char *)changed.data + 2, world.wgrad.dw = &changed),
        WGRAD);
    REFUSED(FP8_ERR_ALIGNMENT, "not a multiple of 2",
            (changed = world.x, changed.data = (char *)changed.data + 1, world.fprop.x = &changed),
            FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "x->reserved",
            (changed = world.x, changed.reserved = 1, world.fprop.x = &changed), FPROP);
    REFUSED(FP8_ERR_SHAPE, "bias is 1 x 36",
            (changed = world.bias, changed.cols = 36, world.fprop.bias = &changed), FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "bias is NULL, but layer 'bias' has a bias", world.fprop.bias = NULL,
            FPROP);
    REFUSED(
        FP8_ERR_DTYPE, "dbias is bf16",
        (changed = world.dbias, changed.dtype = FP8_DTYPE_BF16, world.backward.dbias = &changed),
        BACKWARD);
    REFUSED(
        FP8_ERR_DTYPE, "target is bf16",
        (changed = world.x32, changed.dtype = FP8_DTYPE_BF16, world.dequantize.target = &changed),
        DEQUANTIZE);
    REFUSED(FP8_ERR_ARGUMENT, "not both", world.fprop.x_quantized = &world.xq, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "neither", world.fprop.x = NULL, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "dy is NULL", world.quantize_dy.dy = NULL, QUANTIZE_DY);
    REFUSED(FP8_ERR_ARGUMENT, "source is NULL", world.quantize.source = NULL, QUANTIZE);
}

static void operands(void **state)
{
    (void)state;
    static const fp8_operand empty = FP8_OPERAND_INIT;
    REFUSED(FP8_ERR_ARGUMENT, "weight is NULL", world.fprop.weight = NULL, FPROP);
    REFUSED(FP8_ERR_OPERAND, "weight is not filled; weight_update or quantize fills it",
            world.fprop.weight = &empty, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "weight->size is 0",
            (other = world.weight, other.size = 0, world.fprop.weight = &other), FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "weight->reserved",
            (other = world.weight, other.reserved[1] = 1, world.fprop.weight = &other), FPROP);
    REFUSED(FP8_ERR_OPERAND, "weight holds a quantised dy, but w is wanted",
            world.dgrad.weight = &world.grad, DGRAD);
    REFUSED(FP8_ERR_OPERAND, "unknown role",
            (other = world.weight, other.role = (fp8_role)9, world.fprop.weight = &other), FPROP);
    REFUSED(FP8_ERR_SHAPE, "weight was filled from 36 x 50",
            (other = world.weight, other.rows = 36, world.fprop.weight = &other), FPROP);
    REFUSED(FP8_ERR_DTYPE, "grad is e4m3, but layer 'bias' takes e5m2",
            (other = world.grad, other.dtype = FP8_DTYPE_E4M3, world.wgrad.grad = &other), WGRAD);
    REFUSED(FP8_ERR_OPERAND, "weight has the row copy, but the transposed copy is needed",
            (other = world.weight, other.copies = FP8_COPY_ROW, world.dgrad.weight = &other),
            DGRAD);
    REFUSED(FP8_ERR_OPERAND, "grad has the transposed copy, but the row copy is needed",
            (other = world.grad, other.copies = FP8_COPY_TRANSPOSED, world.dgrad.grad = &other),
            DGRAD);
    REFUSED(FP8_ERR_OPERAND, "but 37 x 50 with the row and transposed copies takes",
            (other = world.weight, other.bytes = 256, world.fprop.weight = &other), FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "weight->data is NULL",
            (other = world.weight, other.data = NULL, world.fprop.weight = &other), FPROP);
    REFUSED(
        FP8_ERR_ALIGNMENT, "not a multiple of 256",
        (other = world.weight, other.data = (char *)other.data + 128, world.fprop.weight = &other),
        FPROP);
    REFUSED(FP8_ERR_OPERAND, "saved has 100 bytes", world.saved.bytes = 100, FPROP);
    REFUSED(FP8_ERR_ALIGNMENT, "saved->data", world.saved.data = (char *)world.saved.data + 16,
            FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "saved->size is 1", world.saved.size = 1, FPROP);
    REFUSED(FP8_ERR_ARGUMENT, "grad is NULL", world.quantize_dy.grad = NULL, QUANTIZE_DY);
    REFUSED(FP8_ERR_ARGUMENT, "grad is NULL", world.backward.grad = NULL, BACKWARD);
    REFUSED(FP8_ERR_ARGUMENT, "saved is NULL", world.backward.saved = NULL, BACKWARD);
    REFUSED(FP8_ERR_ARGUMENT, "weight is NULL", world.backward.weight = NULL, BACKWARD);
    REFUSED(FP8_ERR_SHAPE, "saved was filled from 9 x 50",
            (other = world.saved, other.rows = 9, world.quantize_dy.saved = &other), QUANTIZE_DY);
    REFUSED(FP8_ERR_SHAPE, "grad was filled from 10 x 37",
            (other = world.saved, other.rows = 9, world.wgrad.saved = &other), WGRAD);
    REFUSED(FP8_ERR_OPERAND, "x_quantized has the transposed copy, but the row copy is needed",
            (other = world.saved, world.fprop.x = NULL, world.fprop.saved = NULL,
             world.fprop.x_quantized = &other),
            FPROP);
    REFUSED(FP8_ERR_OPERAND, "the row and transposed copy is needed",
            (other = world.xq, other.copies = FP8_COPY_ROW, world.fprop.x = NULL,
             world.fprop.x_quantized = &other),
            FPROP);
    REFUSED(FP8_ERR_OPERAND, "operand is not filled", world.dequantize.operand = &empty,
            DEQUANTIZE);
    REFUSED(FP8_ERR_TOKENS, "saved->rows is 400",
            (other = world.saved, other.rows = 400, world.wgrad.saved = &other), WGRAD);
}

/* An operand of another role says so, also where its rows are more than max_tokens. */
static void roles(void **state)
{
    (void)state;
    REFUSED(FP8_ERR_OPERAND, "fprop: x_quantized holds a quantised w, but x is wanted here",
            (other = world.weight, other.rows = 400, world.fprop.x = NULL,
             world.fprop.x_quantized = &other),
            FPROP);
    REFUSED(FP8_ERR_OPERAND, "gemm: a holds a quantised w, but x is wanted here",
            (other = world.weight, other.rows = 400, world.gemm.a = &other), GEMM);
    REFUSED(FP8_ERR_OPERAND, "wgrad: saved holds a quantised w, but x is wanted here",
            (other = world.weight, other.rows = 400, world.wgrad.saved = &other), WGRAD);
    REFUSED(FP8_ERR_OPERAND, "dgrad: grad holds a quantised w, but dy is wanted here",
            (other = world.weight, other.rows = 400, world.dgrad.grad = &other), DGRAD);
    REFUSED(FP8_ERR_TOKENS, "a->rows is 400",
            (other = world.xq, other.rows = 400, world.gemm.a = &other), GEMM);
}

static void versions(void **state)
{
    (void)state;
    REFUSED(FP8_ERR_VERSION,
            "grad comes from a forward with weight version 6, but the weight given has "
            "version 7",
            (other = world.grad, other.version = 6, world.dgrad.grad = &other), DGRAD);
    REFUSED(FP8_ERR_VERSION, "backward: grad comes from a forward with weight version 5",
            (other = world.saved, other.version = 5, world.backward.saved = &other), BACKWARD);
    struct world before = world;
    other = world.grad, other.version = 6, world.dgrad.grad = &other, world.dgrad.stale_ok = 1;
    EXPECT_OK(DGRAD);
    world = before;
    other = world.grad, other.version = 0, world.dgrad.grad = &other; /* not known */
    EXPECT_OK(DGRAD);
    world = before;
    other = world.weight, other.version = 0, world.dgrad.weight = &other;
    EXPECT_OK(DGRAD);
    world = before;
    other = world.saved, other.version = 5; /* no dgrad, no question */
    world.backward.saved = &other, world.backward.dx = NULL, world.backward.weight = NULL;
    EXPECT_OK(BACKWARD);
    assert_int_equal(world.grad.copies, FP8_COPY_TRANSPOSED);
    assert_int_equal(world.grad.version, 5);
    world = before;
    /* an equal version does nothing: the wrong w is not looked at beyond its struct */
    memset(world.w.data, 0x40, N * K * 2);
    char first = *((char *)world.weight.data + 256);
    world.update.weight = &world.weight, world.update.version = 7;
    EXPECT_OK(UPDATE);
    assert_int_equal(*((char *)world.weight.data + 256), first);
    world.update.version = 8;
    EXPECT_OK(UPDATE);
    assert_true(*((char *)world.weight.data + 256) != first);
    assert_int_equal(world.weight.version, 8);
    memset(world.w.data, 0, N * K * 2);
    world = before;
    EXPECT_OK(fp8_weight_update(layer, &(fp8_weight_args){ .size = sizeof(fp8_weight_args),
                                                           .w = &world.w,
                                                           .version = 9,
                                                           .weight = &world.weight,
                                                           .call = world.call }));
    world.weight.version = 7;
}

/* The slot holds what a slot of its own would hold. */
static void expect_quantised(const fp8_operand *slot, const fp8_tensor *w)
{
    fp8_operand own = operand(FP8_BYTES_WEIGHT);
    fp8_weight_args args = world.update;
    args.w = w, args.weight = &own, args.version = 1;
    EXPECT_OK(fp8_weight_update(layer, &args));
    assert_memory_equal(slot->data, own.data, own.bytes);
}

static void two_weights_share_a_slot(void **state)
{
    (void)state;
    fp8_tensor w[2] = { tensor(N, K, FP8_DTYPE_BF16), tensor(N, K, FP8_DTYPE_BF16) };
    for (int i = 0; i < N * K; i++) {
        ((uint16_t *)w[0].data)[i] = (uint16_t)(0x3f00 + i % 97);
        ((uint16_t *)w[1].data)[i] = (uint16_t)(0x3e80 + i % 89);
    }
    fp8_operand slot = operand(FP8_BYTES_WEIGHT);
    fp8_weight_args args = world.update;
    args.weight = &slot;
    /* a version of its own for each weight and step */
    for (uint64_t step = 1; step <= 2; step++) {
        for (uint64_t index = 0; index < 2; index++) {
            args.w = &w[index], args.version = step * 2 + index;
            EXPECT_OK(fp8_weight_update(layer, &args));
            assert_int_equal(slot.version, step * 2 + index);
            expect_quantised(&slot, &w[index]);
        }
    }
    /* one version for all weights, and a slot that is cleared before another weight takes it */
    args.version = 9;
    for (int index = 0; index < 2; index++) {
        const fp8_operand used = slot;
        slot = (fp8_operand)FP8_OPERAND_INIT;
        slot.data = used.data, slot.bytes = used.bytes;
        args.w = &w[index];
        EXPECT_OK(fp8_weight_update(layer, &args));
        expect_quantised(&slot, &w[index]);
    }
}

/* An equal version is current only in an operand that has the copies wanted and is of this
 * layer. */
static void an_equal_version_may_lack_something(void **state)
{
    (void)state;
    fp8_tensor w = tensor(N, K, FP8_DTYPE_BF16);
    for (int i = 0; i < N * K; i++)
        ((uint16_t *)w.data)[i] = (uint16_t)(0x3f00 + i % 97);
    fp8_operand slot = operand(FP8_BYTES_WEIGHT);
    fp8_weight_args args = world.update;
    args.weight = &slot, args.w = &w, args.version = 5;
    static const uint32_t wanted[] = { FP8_COPY_ROW, FP8_COPY_TRANSPOSED, FP8_COPY_BOTH,
                                       FP8_COPY_ROW };
    static const uint32_t there[] = { FP8_COPY_ROW, FP8_COPY_TRANSPOSED, FP8_COPY_BOTH,
                                      FP8_COPY_BOTH };
    for (int i = 0; i < 4; i++) {
        args.copies = wanted[i];
        EXPECT_OK(fp8_weight_update(layer, &args));
        assert_int_equal(slot.copies, there[i]);
    }
    expect_quantised(&slot, &w);
    args.copies = FP8_COPY_BOTH;
    const fp8_operand good = slot;
    for (int i = 0; i < 4; i++) {
        slot.rows += i == 0, slot.cols += i == 1;
        slot.dtype = i == 2 ? FP8_DTYPE_E5M2 : slot.dtype;
        slot.role = i == 3 ? FP8_ROLE_X : slot.role;
        memset(slot.data, 0, slot.bytes);
        EXPECT_OK(fp8_weight_update(layer, &args));
        assert_memory_equal(&slot, &good, sizeof slot);
        expect_quantised(&slot, &w);
    }
    args.version = 6, args.call.flags = FP8_CALL_EVALUATE; /* no state: there is nothing to note */
    EXPECT_OK(fp8_weight_update(layer, &args));
    assert_int_equal(slot.evaluated, 0);
}

/* Scales that lay elsewhere, and a mark of evaluation, end with what they belonged to. */
static void what_is_filled_anew_has_its_own_scales(void **state)
{
    (void)state;
    float elsewhere[16] = { 3.0f };
    fp8_operand slot = operand(FP8_BYTES_WEIGHT);
    fp8_weight_args args = world.update;
    args.weight = &slot, args.version = 5;
    for (int i = 0; i < 2; i++) {
        slot.scales = elsewhere, slot.evaluated = 1;
        if (i == 0)
            EXPECT_OK(fp8_weight_update(layer, &args));
        world.quantize.role = FP8_ROLE_W, world.quantize.source = &world.w;
        world.quantize.operand = &slot;
        if (i == 1)
            EXPECT_OK(QUANTIZE);
        assert_null(slot.scales);
        assert_int_equal(slot.evaluated, 0);
        assert_true(elsewhere[0] == 3.0f);
        expect_quantised(&slot, &world.w);
        memset(slot.data, 0, slot.bytes);
    }
    fill_args(&world);
}

static void a_view_of_a_shared_x(void **state)
{
    (void)state;
    struct world before = world;
    void *own = world.saved.data;
    world.fprop.x = NULL, world.fprop.x_quantized = &world.xq;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "give found_inf to fp8_quantize", FPROP);
    world.fprop.found_inf = NULL;
    EXPECT_OK(FPROP);
    assert_ptr_equal(world.saved.data, world.xq.data);
    assert_int_equal(world.saved.copies, FP8_COPY_BOTH);
    assert_int_equal(world.saved.version, 7);
    assert_int_equal(world.xq.version, 0);
    assert_ptr_not_equal(world.saved.data, own);
    EXPECT_OK(BACKWARD);
    world = before;
}

static void only_what_is_wanted_is_made(void **state)
{
    (void)state;
    struct world before = world;
    world.fprop.saved = NULL;
    EXPECT_OK(FPROP);
    world.backward.dw = NULL, world.backward.saved = NULL;
    EXPECT_OK(BACKWARD);
    assert_int_equal(world.grad.copies, FP8_COPY_ROW);
    assert_int_equal(world.grad.version, 0);
    world = before;
    world.backward.dw = NULL, world.backward.dx = NULL, world.backward.saved = NULL;
    world.backward.weight = NULL, world.backward.grad = NULL;
    EXPECT_OK(BACKWARD);
    world.backward.dbias = NULL;
    EXPECT_OK(BACKWARD);
    world = before;
}

static void a_layer_without_bias(void **state)
{
    (void)state;
    uint16_t memory[96] = { 0 };
    fp8_tensor dy = tensor(M, 96, FP8_DTYPE_BF16), x = tensor(M, 72, FP8_DTYPE_BF16);
    fp8_tensor w = tensor(96, 72, FP8_DTYPE_BF16), y = tensor(M, 96, FP8_DTYPE_BF16);
    const fp8_tensor bias = { memory, 1, 96, 96, FP8_DTYPE_BF16, 0 };
    const fp8_tensor dbias = { block(96 * 4), 1, 96, 96, FP8_DTYPE_FP32, 0 };
    fp8_operand grad = FP8_OPERAND_INIT, weight = FP8_OPERAND_INIT;
    fp8_call call = FP8_CALL_INIT;
    EXPECT_OK(fp8_layer_bytes(no_bias, M, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    call.workspace = block(call.workspace_bytes);
    EXPECT_OK(fp8_layer_bytes(no_bias, M, FP8_BYTES_GRAD, &grad.bytes));
    EXPECT_OK(fp8_layer_bytes(no_bias, M, FP8_BYTES_WEIGHT, &weight.bytes));
    grad.data = block(grad.bytes), weight.data = block(weight.bytes);
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.dy = &dy, args.grad = &grad, args.dbias = &dbias, args.call = call;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "dbias is given, but layer 'plain' has no bias",
                   fp8_layer_quantize_dy(no_bias, &args));
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &w, update.weight = &weight, update.version = 1, update.call = call;
    EXPECT_OK(fp8_weight_update(no_bias, &update));
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &x, fprop.weight = &weight, fprop.y = &y, fprop.bias = &bias, fprop.call = call;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "bias is given, but layer 'plain' has no bias",
                   fp8_layer_fprop(no_bias, &fprop));
}

static void sizes(void **state)
{
    (void)state;
    size_t bytes = 1, last = 0;
    EXPECT_REFUSED(FP8_ERR_TOKENS, "max_tokens = 300",
                   fp8_layer_bytes(layer, 301, FP8_BYTES_X, &bytes));
    assert_int_equal(bytes, 0);
    EXPECT_REFUSED(FP8_ERR_SHAPE, "tokens is -1", fp8_layer_bytes(layer, -1, FP8_BYTES_X, &bytes));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "which is 8", fp8_layer_bytes(layer, 1, (fp8_bytes)8, &bytes));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "bytes is NULL", fp8_layer_bytes(layer, 1, FP8_BYTES_X, NULL));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "layer is NULL",
                   fp8_layer_bytes(NULL, 1, FP8_BYTES_X, &bytes));
    for (int which = 0; which < 8; which++) {
        for (int64_t m = last = 0; m <= 300; m++) {
            EXPECT_OK(fp8_layer_bytes(layer, m, (fp8_bytes)which, &bytes));
            assert_true(bytes >= last);
            last = bytes;
        }
    }
}

static void set_world(void **state)
{
    (void)state;
    make_world(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(set_world),
        cmocka_unit_test(structs_and_flags),
        cmocka_unit_test(tensors),
        cmocka_unit_test(operands),
        cmocka_unit_test(roles),
        cmocka_unit_test(versions),
        cmocka_unit_test(two_weights_share_a_slot),
        cmocka_unit_test(an_equal_version_may_lack_something),
        cmocka_unit_test(what_is_filled_anew_has_its_own_scales),
        cmocka_unit_test(a_view_of_a_shared_x),
        cmocka_unit_test(only_what_is_wanted_is_made),
        cmocka_unit_test(a_layer_without_bias),
        cmocka_unit_test(sizes),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
