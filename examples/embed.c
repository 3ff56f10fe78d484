/*
 * embed.c - one layer of a bundle from C: forward and backward on the caller's own buffers.
 *
 *     fp8gen build specs/llama3_8b.lua --arch sm_90a -o llama3_8b
 *     example_embed llama3_8b qkv [tokens]
 *
 * Runs on GPU 0 if there is one that the bundle has kernels for, else on the host: the calls are
 * the same. What is worth seeing is in run(): quantise the weight once per step, fprop fills
 * `saved`, backward reads it and leaves dx, dw and dbias. All of it lies in buffers that the caller
 * sized with fp8_layer_bytes, so that nothing is allocated while training.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fp8.h>
#include <fp8_device.h>

/* Stops at the first failed call and says what the library says. */
#define CHECK(call)                                                                                \
    do {                                                                                           \
        fp8_status status_ = (call);                                                               \
        if (status_ != FP8_OK) {                                                                   \
            fprintf(stderr, "%s: %s error: %s\n  remedy: %s\n", #call, fp8_status_name(status_),   \
                    fp8_last_error(), fp8_status_remedy(status_));                                 \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static float float_of_bf16(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof(value));
    return value;
}

static float float_of_fp16(uint16_t bits)
{
    int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    float size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? ldexpf((float)mantissa, -24)
                                 : ldexpf((float)(mantissa | 1024), exponent - 25);
    return bits & 0x8000u ? -size : size;
}

static uint16_t bf16_of_float(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    return (uint16_t)((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
}

/* A tensor in the context's memory, and the same values here. */
struct pair {
    fp8_tensor tensor;
    void *values;
};

static size_t bytes_of(const fp8_tensor *tensor)
{
    return (size_t)(tensor->rows * tensor->cols) * fp8_dtype_bytes(tensor->dtype);
}

static float value_at(const struct pair *p, int64_t row, int64_t col)
{
    int64_t i = row * p->tensor.cols + col;
    if (p->tensor.dtype == FP8_DTYPE_BF16)
        return float_of_bf16(((const uint16_t *)p->values)[i]);
    if (p->tensor.dtype == FP8_DTYPE_FP16)
        return float_of_fp16(((const uint16_t *)p->values)[i]);
    return ((const float *)p->values)[i];
}

static struct pair make(fp8_context *context, fp8_dtype dtype, int64_t rows, int64_t cols)
{
    struct pair p = { { NULL, rows, cols, cols, dtype, 0 }, NULL };
    CHECK(fp8_memory_alloc(context, bytes_of(&p.tensor), &p.tensor.data));
    p.values = calloc(1, bytes_of(&p.tensor) + 1);
    if (!p.values)
        exit(1);
    return p;
}

/* Values between 0 and amplitude, the same in every run. All have one sign, so that sums do not
 * cancel and can be compared by eye. */
static struct pair make_input(fp8_context *context, fp8_dtype dtype, int64_t rows, int64_t cols,
                              float amplitude)
{
    struct pair p = make(context, dtype, rows, cols);
    uint32_t state = (uint32_t)(rows * 31 + cols);
    for (int64_t i = 0; i < rows * cols; ++i) {
        state = state * 1664525u + 1013904223u;
        float value = amplitude * ((float)(state >> 8) / 16777216.0f);
        if (dtype == FP8_DTYPE_BF16)
            ((uint16_t *)p.values)[i] = bf16_of_float(value);
        else
            ((float *)p.values)[i] = value;
    }
    CHECK(fp8_memory_copy(context, p.tensor.data, p.values, bytes_of(&p.tensor), NULL));
    return p;
}

static fp8_operand make_operand(fp8_context *context, const fp8_layer *layer, int64_t tokens,
                                fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    CHECK(fp8_layer_bytes(layer, tokens, which, &operand.bytes));
    CHECK(fp8_memory_alloc(context, operand.bytes, &operand.data));
    return operand;
}

static void show(fp8_context *context, const char *name, struct pair *p, double expected)
{
    CHECK(fp8_memory_copy(context, p->values, p->tensor.data, bytes_of(&p->tensor), NULL));
    CHECK(fp8_stream_synchronize(context, NULL));
    printf("  %-6s %7lld x %-7lld [0,0] = %12.6f   without FP8: %12.6f\n", name,
           (long long)p->tensor.rows, (long long)p->tensor.cols, value_at(p, 0, 0), expected);
}

static void run(fp8_context *context, const fp8_layer *layer, const fp8_layer_info *info,
                int64_t tokens)
{
    const int64_t m = tokens, n = info->out_features, k = info->in_features;
    struct pair x = make_input(context, info->x_dtype, m, k, 1.0f);
    struct pair w = make_input(context, info->w_dtype, n, k, 0.02f);
    struct pair dy = make_input(context, info->dy_dtype, m, n, 0.001f);
    struct pair y = make(context, info->y_dtype, m, n);
    struct pair dx = make(context, info->dx_dtype, m, k);
    struct pair dw = make(context, info->dw_dtype, n, k);
    struct pair bias = make_input(context, info->bias_dtype, info->has_bias, n, 0.1f);
    struct pair dbias = make(context, info->dbias_dtype, info->has_bias, n);

    fp8_operand weight = make_operand(context, layer, m, FP8_BYTES_WEIGHT);
    fp8_operand saved = make_operand(context, layer, m, FP8_BYTES_SAVED);
    fp8_operand grad = make_operand(context, layer, m, FP8_BYTES_GRAD);
    fp8_call call = FP8_CALL_INIT;
    CHECK(fp8_layer_bytes(layer, m, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    CHECK(fp8_memory_alloc(context, call.workspace_bytes, &call.workspace));

    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &w.tensor;
    update.version = 1; /* another one for each weight and each optimizer step */
    update.weight = &weight;
    update.call = call;
    CHECK(fp8_weight_update(layer, &update));

    fp8_fprop_args forward = FP8_FPROP_ARGS_INIT;
    forward.x = &x.tensor;
    forward.weight = &weight;
    forward.bias = info->has_bias ? &bias.tensor : NULL;
    forward.y = &y.tensor;
    forward.saved = &saved;
    forward.call = call;
    CHECK(fp8_layer_fprop(layer, &forward));

    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &dy.tensor;
    backward.saved = &saved;
    backward.weight = &weight;
    backward.grad = &grad;
    backward.dbias = info->has_bias ? &dbias.tensor : NULL;
    backward.dw = &dw.tensor;
    backward.dx = &dx.tensor;
    backward.call = call;
    CHECK(fp8_layer_backward(layer, &backward));

    double y00 = info->has_bias ? value_at(&bias, 0, 0) : 0.0, dx00 = 0.0, dw00 = 0.0,
           dbias00 = 0.0;
    for (int64_t i = 0; i < k; ++i)
        y00 += (double)value_at(&x, 0, i) * value_at(&w, 0, i);
    for (int64_t i = 0; i < n; ++i)
        dx00 += (double)value_at(&dy, 0, i) * value_at(&w, i, 0);
    for (int64_t i = 0; i < m; ++i)
        dw00 += (double)value_at(&dy, i, 0) * value_at(&x, i, 0);
    for (int64_t i = 0; i < m; ++i)
        dbias00 += value_at(&dy, i, 0);
    printf("  (sums of one sign: with accumulation 'fast' y may come out some per cent low)\n");
    show(context, "y", &y, y00);
    show(context, "dx", &dx, dx00);
    show(context, "dw", &dw, dw00);
    if (info->has_bias)
        show(context, "dbias", &dbias, dbias00);

    void *memory[] = { x.tensor.data,  w.tensor.data,    dy.tensor.data,    y.tensor.data,
                       dx.tensor.data, dw.tensor.data,   weight.data,       saved.data,
                       grad.data,      bias.tensor.data, dbias.tensor.data, call.workspace };
    void *values[] = { x.values,  w.values,  dy.values,   y.values,
                       dx.values, dw.values, bias.values, dbias.values };
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); ++i)
        fp8_memory_free(context, memory[i]);
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); ++i)
        free(values[i]);
}

/* A bundle on GPU 0, or, where that does not work, on the host. */
static fp8_bundle *open_anywhere(const char *path, fp8_context **context)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_bundle *bundle = NULL;
    if (fp8_context_create(&options, context) == FP8_OK) {
        if (fp8_bundle_open(*context, path, &bundle) == FP8_OK)
            return bundle;
        printf("not on the GPU: %s\n", fp8_last_error());
        fp8_context_destroy(*context);
    }
    options.device = FP8_DEVICE_HOST;
    CHECK(fp8_context_create(&options, context));
    CHECK(fp8_bundle_open(*context, path, &bundle));
    return bundle;
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: %s BUNDLE LAYER [TOKENS]\n", argv[0]);
        return 2;
    }
    fp8_context *context;
    fp8_bundle *bundle = open_anywhere(argv[1], &context);
    fp8_layer *layer;
    CHECK(fp8_layer_create(bundle, argv[2], &layer));

    fp8_device_info device = { .size = sizeof(device) };
    fp8_layer_info info = { .size = sizeof(info) };
    CHECK(fp8_context_info(context, &device));
    CHECK(fp8_layer_describe(layer, &info));
    int64_t tokens = argc == 4 ? atoll(argv[3]) : 64;
    printf("%s on %s: %lld tokens, %lld -> %lld features\n", info.name, device.name,
           (long long)tokens, (long long)info.in_features, (long long)info.out_features);
    run(context, layer, &info, tokens);

    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    return 0;
}
