/*
 * bench_host.c - `fp8gen bench host`: microseconds of host time that one call of each pass takes.
 *
 * The clock stands around one call; nothing is synchronised inside, but after every few calls (outside
 * the clock) the stream is drained, so that a full launch queue never blocks the call that is measured.
 * The baseline of fprop is a framework's bf16 linear in the same run, where there is one; of the other
 * passes with a GEMM, and else of fprop, one bf16 cublasLtMatmul with a fixed algorithm. The number of
 * launches says what the pass does in that time. With a spec, how long its model takes to start.
 */
#include <stdio.h>
#include <stdlib.h>

#include "gen/cli/bench_host.h"
#include "gen/cli/cublaslt.h"

enum { CALLS_MOST = 2000, CALLS_LEAST = 200, CALLS_BEFORE_DRAIN = 16 };

static const struct bench_shape standard[] = {
    { 256, 1024, 1024, "" },  { 1000, 2556, 1000, "" }, { 1024, 1024, 1024, "" },
    { 2048, 2048, 2048, "" }, { 4096, 4096, 4096, "" }, { 8192, 8192, 8192, "" },
};

int bench_host_calls(const struct bench_shape *shape)
{
    double flops = 2.0 * (double)shape->m * (double)shape->n * (double)shape->k;
    double calls = 2e14 / flops; /* about a second on a large GPU */
    return calls > CALLS_MOST ? CALLS_MOST : calls < CALLS_LEAST ? CALLS_LEAST : (int)calls;
}

static int time_calls(struct bench_layer *ours, int (*call)(void *user, int set), void *user,
                      double *median)
{
    struct bench *bench = ours->bench;
    int calls = bench_host_calls(ours->shape);
    double *samples = calloc((size_t)calls, sizeof *samples);
    int code = samples ? CLI_DONE : CLI_MACHINE;
    if (code)
        cli_error("out of memory");
    for (int i = -calls / 10; !code && i < calls; i++) { /* the first tenth only warms */
        if (i % CALLS_BEFORE_DRAIN == 0)
            code = cli_device_synchronize(&bench->device);
        double start = cli_seconds();
        if (!code)
            code = call(user, (i + calls) % BENCH_SETS);
        if (!code && i >= 0)
            samples[i] = cli_seconds() - start;
    }
    if (!code)
        code = cli_device_synchronize(&bench->device);
    if (!code)
        *median = cli_median(samples, calls);
    free(samples);
    return code;
}

/* Host seconds of one bf16 cublasLtMatmul of the layer's forward; negative if there is no algorithm. */
static int time_baseline(struct bench_layer *ours, double *seconds)
{
    struct baseline *baseline = NULL;
    struct baseline_gemm *gemm = NULL;
    const struct bench_shape *s = ours->shape;
    struct baseline_gemm_shape shape = { .rows = s->m, .cols = s->n, .depth = s->k };
    shape.a = (struct baseline_matrix){ .dtype = FP8_DTYPE_BF16, .ld = s->k };
    shape.b = (struct baseline_matrix){ .dtype = FP8_DTYPE_BF16, .ld = s->k };
    shape.out = (struct baseline_matrix){ .dtype = FP8_DTYPE_BF16, .ld = s->n };
    for (int set = 0; set < BENCH_SETS; set++) {
        shape.a.data[set] = ours->x.set[set].device;
        shape.b.data[set] = ours->w.set[set].device;
        shape.out.data[set] = ours->y.set[set].device;
    }
    *seconds = -1;
    int code = baseline_create(ours->bench, &baseline);
    if (!code)
        code = baseline_gemm_create(baseline, &shape, &gemm);
    if (!code && gemm)
        code = time_calls(ours, baseline_gemm_run, gemm, seconds);
    baseline_gemm_destroy(gemm);
    baseline_destroy(baseline);
    return code;
}

/* A time to compare with, in microseconds; negative: there is none. */
struct compared {
    double value;
    const char *name;
};

static void print_row(const struct bench_layer *ours, fp8_pass pass, double seconds, int launches,
                      struct compared with)
{
    struct bench_result row = { .bench = "host",
                                .name = "host time of a call",
                                .pass = fp8_pass_name(pass),
                                .shape = ours->shape,
                                .unit = "us",
                                .value = seconds * 1e6,
                                .baseline = with.value,
                                .baseline_name = with.value >= 0 ? with.name : NULL,
                                .lower_is_better = true,
                                .launches = launches };
    bench_result_print(ours->bench, &row);
}

static void print_cublaslt(const struct bench_layer *ours, struct compared cublaslt,
                           struct compared framework)
{
    struct bench_result row = { .bench = "host",
                                .name = "host time of one bf16 cublasLtMatmul",
                                .pass = "fprop",
                                .shape = ours->shape,
                                .unit = "us",
                                .value = cublaslt.value,
                                .baseline = framework.value,
                                .baseline_name = framework.value >= 0 ? framework.name : NULL,
                                .lower_is_better = true,
                                .launches = 1 };
    if (cublaslt.value >= 0)
        bench_result_print(ours->bench, &row);
}

static int measure_pass(struct bench_layer *ours, fp8_pass pass, int (*call)(void *user, int set),
                        struct compared with)
{
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    double seconds = 0;
    int code = time_calls(ours, call, ours, &seconds);
    if (code)
        return code;
    fp8_status status = fp8_layer_dispatch(ours->layer, pass, ours->shape->m, &dispatch);
    if (status)
        return bench_fp8_failed(status, ours->shape, "dispatch");
    print_row(ours, pass, seconds, (int)dispatch.launches, with);
    return CLI_DONE;
}

static int measure_passes(struct bench_layer *ours, struct compared framework)
{
    static const struct {
        fp8_pass pass;
        int (*run)(void *user, int set);
        bool gemm;
    } passes[] = {
        { FP8_PASS_WEIGHT, bench_run_weight, false },
        { FP8_PASS_FPROP, bench_run_fprop, true },
        { FP8_PASS_QUANTIZE_DY, bench_run_quantize_dy, false },
        { FP8_PASS_WGRAD, bench_run_wgrad, true },
        { FP8_PASS_DGRAD, bench_run_dgrad, true },
    };
    const struct compared nothing = { -1, NULL };
    double seconds = -1;
    int code = time_baseline(ours, &seconds);
    struct compared cublaslt = { seconds * 1e6, "one bf16 cublasLtMatmul" };
    for (size_t i = 0; !code && i < sizeof passes / sizeof passes[0]; i++) {
        struct compared with = passes[i].gemm ? cublaslt : nothing;
        if (passes[i].pass == FP8_PASS_FPROP && framework.value >= 0)
            with = framework;
        code = measure_pass(ours, passes[i].pass, passes[i].run, with);
    }
    if (!code)
        print_cublaslt(ours, cublaslt, framework);
    return code;
}

static int run(const void *values, int count, char **operands)
{
    struct bench bench = { .values = values };
    double microseconds[BENCH_MAX_SHAPES];
    char name[128];
    int code = bench_read_shapes(&bench, 3, standard, sizeof standard / sizeof standard[0]);
    if (code)
        return code;
    code = bench_open(&bench, "host", "");
    bool compared = !code && bench_framework(&bench, microseconds, name, sizeof name);
    for (int i = 0; !code && i < bench.shape_count && !cli_output_broken(); i++) {
        struct bench_layer ours;
        const struct compared framework = { compared ? microseconds[i] : -1, name };
        code = bench_layer_create(&ours, &bench, &bench.shapes[i], "current", true);
        if (!code)
            code = measure_passes(&ours, framework);
        bench_layer_destroy(&ours);
    }
    if (!code && count > 0 && !cli_output_broken())
        code = bench_start(&bench, operands[0]);
    return bench_close(&bench, code);
}

const struct cli_command cli_bench_host_command = {
    .name = "bench host",
    .operands = "[SPEC]",
    .summary = "host time of one call of each pass",
    .details = "Needs a CUDA device. Medians of many calls; the launch queue is kept short. With a "
               "spec: how\n"
               "long its model takes to start, with an empty cache and with a full one. Where "
               "python3 (or\n"
               "FP8GEN_PYTHON) has PyTorch with CUDA, its bf16 linear is measured in the same run.",
    .max_operands = 1,
    .options = bench_options_host,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
