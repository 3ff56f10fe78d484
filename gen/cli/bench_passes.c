/*
 * bench_passes.c - a layer with its tensors in every buffer set, and its passes as bench items.
 *
 * x, w and dy hold normal data; operands are filled once, so that a pass can be measured alone.
 * Each set has its own weight operand; the version counts up, so that a weight update is never
 * skipped.
 */
#include <string.h>

#include "gen/cli/bench_layer.h"
#include "runtime/fp8_primitives.h"

static const struct {
    const char *name;
    int bytes;
    bool of_tensors;
} recipes[] = {
    { "current", 6, true }, { "delayed", 4, true },           { "rowwise", 6, false },
    { "block", 4, false },  { "rowwise_hp_wgrad", 3, false }, { "bf16", 0, false },
};
enum { RECIPES = sizeof recipes / sizeof recipes[0] };

static int place_of(const char *recipe)
{
    for (int i = 0; i < RECIPES; i++)
        if (strcmp(recipes[i].name, recipe) == 0)
            return i;
    return 0;
}

int bench_recipe_bytes(const char *recipe)
{
    return recipes[place_of(recipe)].bytes;
}

bool bench_recipe_of_tensors(const char *recipe)
{
    return recipes[place_of(recipe)].of_tensors;
}

static bool is_bf16(const struct bench_layer *b)
{
    return strcmp(b->recipe, "bf16") == 0;
}

/* Whether wgrad multiplies x and dy as they are. */
static bool is_plain_wgrad(const struct bench_layer *b)
{
    return is_bf16(b) || strcmp(b->recipe, "rowwise_hp_wgrad") == 0;
}

static int make_operand(struct bench_layer *b, fp8_bytes which, struct bench_buffers *buffers,
                        fp8_operand *operands)
{
    size_t bytes = 0;
    fp8_status status = fp8_layer_bytes(b->layer, b->shape->m, which, &bytes);
    if (status)
        return bench_fp8_failed(status, b->shape, "size of an operand");
    int code = bench_buffers_create(b->bench, buffers, bytes, 0, 0);
    for (int set = 0; set < BENCH_SETS; set++) {
        operands[set] = (fp8_operand)FP8_OPERAND_INIT;
        operands[set].data = buffers->set[set].device;
        operands[set].bytes = bytes;
    }
    return code;
}

static int make_buffers(struct bench_layer *b, bool gemms)
{
    struct bench *bench = b->bench;
    size_t m = (size_t)b->shape->m, n = (size_t)b->shape->n, k = (size_t)b->shape->k, bytes = 0;
    int code = bench_buffers_create(bench, &b->x, m * k * 2, 1, 1);
    if (!code)
        code = bench_buffers_create(bench, &b->dy, m * n * 2, 0.001, 2);
    if (!code)
        code = bench_buffers_create(bench, &b->dbias, n * 4, 0, 0);
    if (!code)
        code = make_operand(b, FP8_BYTES_X, &b->x_bytes, b->x_quantized);
    if (!code)
        code = make_operand(b, FP8_BYTES_GRAD, &b->grad_bytes, b->grad);
    fp8_status status = fp8_layer_bytes(b->layer, b->shape->m, FP8_BYTES_WORKSPACE, &bytes);
    if (!code && status)
        code = bench_fp8_failed(status, b->shape, "size of the workspace");
    if (!code)
        code = cli_buffer_create(&bench->device, bytes, false, &b->workspace);
    if (!code && b->with_weight)
        code = bench_buffers_create(bench, &b->w, n * k * 2, 0.02, 3);
    if (!code && b->with_weight)
        code = make_operand(b, FP8_BYTES_WEIGHT, &b->weight_bytes, b->weight);
    if (!code && gemms)
        code = bench_buffers_create(bench, &b->y, m * n * fp8_dtype_bytes(b->info.y_dtype), 0, 0);
    if (!code && gemms)
        code = bench_buffers_create(bench, &b->dx, m * k * fp8_dtype_bytes(b->info.dx_dtype), 0, 0);
    if (!code && gemms)
        code = bench_buffers_create(bench, &b->dw, n * k * fp8_dtype_bytes(b->info.dw_dtype), 0, 0);
    if (!code && gemms)
        code = make_operand(b, FP8_BYTES_SAVED, &b->saved_bytes, b->saved);
    return code;
}

int bench_layer_create(struct bench_layer *b, struct bench *bench, const struct bench_shape *shape,
                       const char *recipe, bool gemms)
{
    memset(b, 0, sizeof *b);
    b->bench = bench;
    b->recipe = recipe;
    b->with_weight = gemms || shape->m == shape->n;
    b->shape = shape;
    b->info.size = sizeof b->info;
    fp8_status status = fp8_layer_create(bench->bundle, shape->name, &b->layer);
    if (!status)
        status = fp8_layer_describe(b->layer, &b->info);
    const fp8_layer *layers[] = { b->layer };
    bool is_delayed = strcmp(recipe, "delayed") == 0;
    if (!status && is_delayed)
        status = fp8_state_create(layers, 1, &b->state);
    int code = status ? bench_fp8_failed(status, shape, "creating the layer") : CLI_DONE;
    if (!code)
        code = make_buffers(b, gemms);
    bool quantizes = bench_recipe_bytes(recipe) > 0;
    for (int set = 0; !code && set < BENCH_SETS; set++) {
        code = quantizes ? bench_run_quantize_x(b, set) : CLI_DONE;
        if (!code && b->with_weight && quantizes)
            code = bench_run_weight(b, set);
        if (!code && gemms)
            code = bench_run_fprop(b, set);
        if (!code && quantizes)
            code = bench_run_quantize_dy(b, set);
    }
    status = !code && is_delayed ? fp8_state_advance(b->state, bench->device.stream) : FP8_OK;
    if (status)
        code = bench_fp8_failed(status, shape, "a step of delayed scaling");
    return code ? code : cli_device_synchronize(&bench->device);
}

void bench_layer_destroy(struct bench_layer *b)
{
    struct bench_buffers *buffers[] = { &b->x,           &b->w,         &b->dy,
                                        &b->y,           &b->dx,        &b->dw,
                                        &b->dbias,       &b->x_bytes,   &b->weight_bytes,
                                        &b->saved_bytes, &b->grad_bytes };
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        bench_buffers_destroy(b->bench, buffers[i]);
    cli_buffer_destroy(&b->bench->device, &b->workspace);
    fp8_state_destroy(b->state);
    fp8_layer_destroy(b->layer);
    b->state = NULL;
    b->layer = NULL;
}

/* ---- passes ---------------------------------------------------------------------------------- */

static fp8_call call_of(const struct bench_layer *b)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = b->workspace.device;
    call.workspace_bytes = b->workspace.bytes;
    call.stream = b->bench->device.stream;
    call.state = b->state;
    return call;
}

static fp8_tensor tensor_of(const struct bench_buffers *buffers, int set, int64_t rows,
                            int64_t cols, fp8_dtype dtype)
{
    return (fp8_tensor){ buffers->set[set].device, rows, cols, cols, dtype, 0 };
}

static int result(const struct bench_layer *b, fp8_status status, const char *what)
{
    return status ? bench_fp8_failed(status, b->shape, what) : CLI_DONE;
}

int bench_run_weight(void *user, int set)
{
    struct bench_layer *b = user;
    fp8_tensor w = tensor_of(&b->w, set, b->shape->n, b->shape->k, b->info.w_dtype);
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &w;
    args.version = ++b->version;
    args.weight = &b->weight[set];
    args.call = call_of(b);
    return result(b, fp8_weight_update(b->layer, &args), "weight update");
}

int bench_run_fprop(void *user, int set)
{
    struct bench_layer *b = user;
    fp8_tensor x = tensor_of(&b->x, set, b->shape->m, b->shape->k, b->info.x_dtype);
    fp8_tensor y = tensor_of(&b->y, set, b->shape->m, b->shape->n, b->info.y_dtype);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    fp8_tensor w = tensor_of(&b->w, set, b->shape->n, b->shape->k, FP8_DTYPE_BF16);
    args.x = &x;
    args.w = is_bf16(b) ? &w : NULL;
    args.weight = is_bf16(b) ? NULL : &b->weight[set];
    args.y = &y;
    args.saved = is_bf16(b) ? NULL : &b->saved[set];
    args.call = call_of(b);
    return result(b, fp8_layer_fprop(b->layer, &args), "fprop");
}

int bench_run_quantize_x(void *user, int set)
{
    struct bench_layer *b = user;
    fp8_tensor x = tensor_of(&b->x, set, b->shape->m, b->shape->k, b->info.x_dtype);
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = FP8_ROLE_X;
    args.source = &x;
    args.operand = &b->x_quantized[set];
    args.call = call_of(b);
    return result(b, fp8_quantize(b->layer, &args), "quantising x");
}

static int quantize_dy(struct bench_layer *b, int set, bool with_dbias)
{
    fp8_tensor dy = tensor_of(&b->dy, set, b->shape->m, b->shape->n, b->info.dy_dtype);
    fp8_tensor dbias = tensor_of(&b->dbias, set, 1, b->shape->n, FP8_DTYPE_FP32);
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.dy = &dy;
    args.saved = b->saved[set].data ? &b->saved[set] : NULL;
    args.grad = &b->grad[set];
    args.dbias = with_dbias ? &dbias : NULL;
    args.call = call_of(b);
    return result(b, fp8_layer_quantize_dy(b->layer, &args), "quantize_dy");
}

int bench_run_quantize_dy(void *user, int set)
{
    return quantize_dy(user, set, false);
}

int bench_run_quantize_dy_dbias(void *user, int set)
{
    return quantize_dy(user, set, true);
}

int bench_run_wgrad(void *user, int set)
{
    struct bench_layer *b = user;
    fp8_tensor dw = tensor_of(&b->dw, set, b->shape->n, b->shape->k, b->info.dw_dtype);
    fp8_wgrad_args args = FP8_WGRAD_ARGS_INIT;
    fp8_tensor x = tensor_of(&b->x, set, b->shape->m, b->shape->k, b->info.x_dtype);
    fp8_tensor dy = tensor_of(&b->dy, set, b->shape->m, b->shape->n, b->info.dy_dtype);
    if (is_plain_wgrad(b)) {
        args.x = &x;
        args.dy = &dy;
    }
    args.saved = is_bf16(b) ? NULL : &b->saved[set];
    args.grad = is_bf16(b) ? NULL : &b->grad[set];
    args.dw = &dw;
    args.call = call_of(b);
    return result(b, fp8_layer_wgrad(b->layer, &args), "wgrad");
}

int bench_run_dgrad(void *user, int set)
{
    struct bench_layer *b = user;
    fp8_tensor dx = tensor_of(&b->dx, set, b->shape->m, b->shape->k, b->info.dx_dtype);
    fp8_dgrad_args args = FP8_DGRAD_ARGS_INIT;
    fp8_tensor dy = tensor_of(&b->dy, set, b->shape->m, b->shape->n, b->info.dy_dtype);
    fp8_tensor w = tensor_of(&b->w, set, b->shape->n, b->shape->k, FP8_DTYPE_BF16);
    args.dy = is_bf16(b) ? &dy : NULL;
    args.w = is_bf16(b) ? &w : NULL;
    args.grad = is_bf16(b) ? NULL : &b->grad[set];
    args.weight = is_bf16(b) ? NULL : &b->weight[set];
    args.dx = &dx;
    args.call = call_of(b);
    return result(b, fp8_layer_dgrad(b->layer, &args), "dgrad");
}

static int run_gemm(struct bench_layer *b, fp8_pass pass, const fp8_operand *a,
                    const fp8_operand *second, const fp8_tensor *out)
{
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = pass;
    args.a = a;
    args.b = second;
    args.out = out;
    args.call = call_of(b);
    return result(b, fp8_gemm(b->layer, &args), fp8_pass_name(pass));
}

int bench_run_gemm_fprop(void *user, int set)
{
    struct bench_layer *b = user;
    if (is_bf16(b)) /* the pass is the product */
        return bench_run_fprop(user, set);
    fp8_tensor y = tensor_of(&b->y, set, b->shape->m, b->shape->n, b->info.y_dtype);
    return run_gemm(b, FP8_PASS_FPROP, &b->x_quantized[set], &b->weight[set], &y);
}

int bench_run_gemm_wgrad(void *user, int set)
{
    struct bench_layer *b = user;
    if (is_plain_wgrad(b))
        return bench_run_wgrad(user, set);
    fp8_tensor dw = tensor_of(&b->dw, set, b->shape->n, b->shape->k, b->info.dw_dtype);
    return run_gemm(b, FP8_PASS_WGRAD, &b->grad[set], &b->saved[set], &dw);
}

int bench_run_gemm_dgrad(void *user, int set)
{
    struct bench_layer *b = user;
    if (is_bf16(b))
        return bench_run_dgrad(user, set);
    fp8_tensor dx = tensor_of(&b->dx, set, b->shape->m, b->shape->k, b->info.dx_dtype);
    return run_gemm(b, FP8_PASS_DGRAD, &b->grad[set], &b->weight[set], &dx);
}
