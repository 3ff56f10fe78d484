/*
 * bench_host_backend.c - speed of the host backend's GEMM and quantisation, per core.
 *
 *     bench_host_backend [threads] [repeats]
 *
 * Prints one JSON object a row. Rates are per core: work divided by the CPU time of the process, so
 * other load on the machine and the number of threads do not distort them; the best of the repeats
 * counts. The baselines are what tests need to stay quick: 10 GFLOP/s and 1 GB/s (of source) a
 * core.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gen/fp8gen.h"
#include "runtime/fp8.h"
#include "runtime/fp8_primitives.h"
#include "runtime/fp8_device.h"

#define MUST(call)                                                                                 \
    do {                                                                                           \
        if ((call) != FP8_OK) {                                                                    \
            fprintf(stderr, "%s: %s\n", #call, fp8_last_error());                                  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

struct bench {
    const char *recipe;
    fp8_context *context;
    fp8_layer *layer;
    int64_t m, n, k;
    int repeats;
    fp8_tensor x, w, y;
    fp8_operand x_quantized, weight;
    fp8_call call;
};

static double cpu_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static fp8_tensor make_tensor(struct bench *b, int64_t rows, int64_t cols)
{
    fp8_tensor tensor = { NULL, rows, cols, cols, FP8_DTYPE_BF16, 0 };
    MUST(fp8_memory_alloc(b->context, (size_t)(rows * cols) * 2, &tensor.data));
    uint32_t state = 1;
    for (int64_t i = 0; i < rows * cols; i++) { /* between 1 and 2, both signs */
        state = state * 1664525u + 1013904223u;
        ((uint16_t *)tensor.data)[i] = (uint16_t)(0x3F80u | (state >> 16 & 0x807Fu));
    }
    return tensor;
}

static fp8_operand make_operand(struct bench *b, fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    MUST(fp8_layer_bytes(b->layer, b->m, which, &operand.bytes));
    MUST(fp8_memory_alloc(b->context, operand.bytes, &operand.data));
    return operand;
}

static void quantize_x(struct bench *b)
{
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = FP8_ROLE_X;
    args.source = &b->x;
    args.operand = &b->x_quantized;
    args.call = b->call;
    MUST(fp8_quantize(b->layer, &args));
}

static void multiply(struct bench *b)
{
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = FP8_PASS_FPROP;
    args.a = &b->x_quantized;
    args.b = &b->weight;
    args.out = &b->y;
    args.call = b->call;
    MUST(fp8_gemm(b->layer, &args));
}

static double best_of(struct bench *b, void (*run)(struct bench *))
{
    double best = 1e30;
    for (int i = 0; i < b->repeats; i++) {
        double start = cpu_seconds();
        run(b);
        double seconds = cpu_seconds() - start;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static void print_row(const struct bench *b, const char *what, double value, const char *unit,
                      double baseline)
{
    printf("{\"bench\": \"host_backend\", \"recipe\": \"%s\", \"case\": \"%s\", \"M\": %lld, "
           "\"N\": %lld, \"K\": %lld, "
           "\"value\": %.2f, \"unit\": \"%s\", \"baseline\": %g, \"baseline_name\": \"needed\", "
           "\"ratio\": %.2f}\n",
           b->recipe, what, (long long)b->m, (long long)b->n, (long long)b->k, value, unit,
           baseline, value / baseline);
}

static void measure(struct bench *b)
{
    b->x = make_tensor(b, b->m, b->k);
    b->w = make_tensor(b, b->n, b->k);
    b->y = make_tensor(b, b->m, b->n);
    b->x_quantized = make_operand(b, FP8_BYTES_X);
    b->weight = make_operand(b, FP8_BYTES_WEIGHT);
    MUST(fp8_layer_bytes(b->layer, b->m, FP8_BYTES_WORKSPACE, &b->call.workspace_bytes));
    MUST(fp8_memory_alloc(b->context, b->call.workspace_bytes, &b->call.workspace));
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &b->w;
    args.version = 1;
    args.weight = &b->weight;
    args.call = b->call;
    MUST(fp8_weight_update(b->layer, &args));

    double seconds = best_of(b, quantize_x);
    print_row(b, "quantize, both copies", 2e-9 * (double)(b->m * b->k) / seconds, "GB/s per core",
              1);
    seconds = best_of(b, multiply);
    print_row(b, "gemm", 2e-9 * (double)(b->m * b->n) * (double)b->k / seconds, "GFLOP/s per core",
              10);

    void *all[] = { b->x.data,           b->w.data,      b->y.data,
                    b->x_quantized.data, b->weight.data, b->call.workspace };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        fp8_memory_free(b->context, all[i]);
}

/* One layer in a bundle without kernels, in a folder that is gone again at once. */
static void run(struct bench *b)
{
    char spec[256], folder[] = "/tmp/fp8gen-bench-XXXXXX", path[64], manifest[96];
    fp8gen *gen = NULL;
    fp8_bundle *bundle = NULL;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    snprintf(spec, sizeof spec,
             "return model \"bench\" { layers = { linear \"l\" { out_features = %lld, in_features "
             "= %lld, "
             "tokens = %lld, recipe = recipe.%s {} } } }",
             (long long)b->n, (long long)b->k, (long long)b->m, b->recipe);
    if (mkdtemp(folder) == NULL)
        exit(1);
    snprintf(path, sizeof path, "%s/bundle", folder);
    options.archs = "none";
    options.output_dir = path;
    if (fp8gen_open(NULL, &gen) != FP8GEN_OK ||
        fp8gen_load_text(gen, "bench.lua", spec, strlen(spec)) != FP8GEN_OK ||
        fp8gen_build(gen, &options) != FP8GEN_OK) {
        fprintf(stderr, "%s", gen != NULL ? fp8gen_diagnostics(gen) : "out of memory\n");
        exit(1);
    }
    fp8gen_close(gen);
    MUST(fp8_bundle_open(b->context, path, &bundle));
    snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
    unlink(manifest);
    snprintf(manifest, sizeof manifest, "%s/kernels", path);
    rmdir(manifest);
    rmdir(path);
    rmdir(folder);
    MUST(fp8_layer_create(bundle, "l", &b->layer));
    measure(b);
    fp8_layer_destroy(b->layer);
    fp8_bundle_close(bundle);
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][3] = {
        { 1024, 1024, 1024 }, { 2048, 2048, 2048 }, { 512, 2556, 1000 }, { 16, 4096, 4096 }
    };
    struct bench b = { .repeats = argc > 2 ? atoi(argv[2]) : 7 };
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = FP8_DEVICE_HOST;
    options.threads = argc > 1 ? atoi(argv[1]) : 1;
    MUST(fp8_context_create(&options, &b.context));
    static const char *const recipes[] = { "current", "rowwise", "block" };
    for (size_t i = 0; i < 3 * sizeof shapes / sizeof shapes[0]; i++) {
        b.recipe = recipes[i % 3];
        b.m = shapes[i / 3][0];
        b.n = shapes[i / 3][1];
        b.k = shapes[i / 3][2];
        run(&b);
    }
    fp8_context_destroy(b.context);
    return 0;
}
