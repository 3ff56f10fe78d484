/*
 * bench_host.c - `fp8gen bench host`: microseconds of host time that one call of each pass takes.
 *
 * The clock stands around one call; nothing is synchronised inside, but after every few calls (outside
 * the clock) the stream is drained, so that a full launch queue never blocks the call that is measured.
 * The baseline of a pass with a GEMM is the host time of one bf16 cublasLtMatmul with a fixed
 * algorithm; the number of launches says what the pass does in that time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "gen/cli/bench_layer.h"
#include "gen/cli/cublaslt.h"

#define CALLS 2000
#define CALLS_BEFORE_DRAIN 16

static const struct bench_shape standard[] = {
    { 256, 1024, 1024, "" },
    { 1000, 2556, 1000, "" },
    { 2048, 2048, 2048, "" },
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int time_calls(struct bench *bench, int (*call)(void *user, int set), void *user,
                      double *median)
{
    double *samples = calloc(CALLS, sizeof *samples);
    int code = samples ? CLI_DONE : CLI_MACHINE;
    if (code)
        cli_error("out of memory");
    for (int i = -CALLS / 10; !code && i < CALLS; i++) { /* the first tenth only warms */
        if (i % CALLS_BEFORE_DRAIN == 0)
            code = cli_device_synchronize(&bench->device);
        double start = now();
        if (!code)
            code = call(user, (i + CALLS) % BENCH_SETS);
        if (!code && i >= 0)
            samples[i] = now() - start;
    }
    if (!code)
        code = cli_device_synchronize(&bench->device);
    if (!code) {
        qsort(samples, CALLS, sizeof *samples, compare);
        *median = samples[CALLS / 2];
    }
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
        code = time_calls(ours->bench, baseline_gemm_run, gemm, seconds);
    baseline_gemm_destroy(gemm);
    baseline_destroy(baseline);
    return code;
}

static int measure_passes(struct bench *bench, struct bench_layer *ours)
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
    double baseline = -1;
    int code = time_baseline(ours, &baseline);
    for (size_t i = 0; !code && i < sizeof passes / sizeof passes[0]; i++) {
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        double seconds = 0;
        code = time_calls(bench, passes[i].run, ours, &seconds);
        if (code)
            break;
        fp8_status status =
            fp8_layer_dispatch(ours->layer, passes[i].pass, ours->shape->m, &dispatch);
        if (status)
            return bench_fp8_failed(status, ours->shape, "dispatch");
        bool compared = passes[i].gemm && baseline >= 0;
        struct bench_result row = { .bench = "host",
                                    .name = "host time of a call",
                                    .pass = fp8_pass_name(passes[i].pass),
                                    .shape = ours->shape,
                                    .unit = "us",
                                    .value = seconds * 1e6,
                                    .baseline = compared ? baseline * 1e6 : -1,
                                    .baseline_name = compared ? "one bf16 cublasLtMatmul" : NULL,
                                    .lower_is_better = true,
                                    .launches = (int)dispatch.launches };
        bench_result_print(bench, &row);
    }
    return code;
}

static int run(const void *values, int count, char **operands)
{
    struct bench bench = { .values = values };
    (void)count;
    (void)operands;
    int code = bench_read_shapes(&bench, 3, standard, sizeof standard / sizeof standard[0]);
    if (code)
        return code;
    code = bench_open(&bench, "host", "");
    for (int i = 0; !code && i < bench.shape_count && !cli_output_broken(); i++) {
        struct bench_layer ours;
        code = bench_layer_create(&ours, &bench, &bench.shapes[i], true);
        if (!code)
            code = measure_passes(&bench, &ours);
        bench_layer_destroy(&ours);
    }
    return bench_close(&bench, code);
}

const struct cli_command cli_bench_host_command = {
    .name = "bench host",
    .operands = "",
    .summary = "host time of one call of each pass",
    .details = "Needs a CUDA device. Medians of many calls; the launch queue is kept short.",
    .options = bench_options_host,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
