/*
 * bench_host.c - `fp8gen bench host`: microseconds of host time that one call of each pass takes.
 *
 * The clock stands around one call; nothing is synchronised inside, but after every few calls
 * (outside the clock) the stream is drained, so that a full launch queue never blocks the call that
 * is measured. All calls take turns, in several rounds, so that what disturbs the machine for a
 * while meets each of them a little and none of them for good; each round first makes some calls
 * that do not count. The baseline of fprop is a framework's bf16 linear in the same run, where
 * there is one; of the other passes with a GEMM, and else of fprop, one bf16 cublasLtMatmul with a
 * fixed algorithm. The number of launches says what the pass does in that time. With a spec, how
 * long its model takes to start.
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

/* What is timed: one call, again and again. */
struct timed {
    int (*call)(void *user, int set);
    void *user;
    double *samples; /* seconds, of all rounds */
    int count;
};

static int time_round(struct bench *bench, struct timed *timed, int calls)
{
    int code = CLI_DONE;
    for (int i = -calls / 8; !code && i < calls; i++) { /* the first ones only warm */
        if (i % CALLS_BEFORE_DRAIN == 0)
            code = cli_device_synchronize(&bench->device);
        double start = cli_seconds();
        if (!code)
            code = timed->call(timed->user, (i + calls) % BENCH_SETS);
        if (!code && i >= 0)
            timed->samples[timed->count++] = cli_seconds() - start;
    }
    return code ? code : cli_device_synchronize(&bench->device);
}

/* All of the list in turn, round by round; free_timed in any case. */
static int time_calls(struct bench_layer *ours, struct timed *list, int count)
{
    int rounds = (int)ours->bench->values->rounds, code = CLI_DONE;
    int calls = bench_host_calls(ours->shape) / rounds;
    if (calls < CALLS_BEFORE_DRAIN)
        calls = CALLS_BEFORE_DRAIN;
    for (int i = 0; i < count && !code; i++) {
        list[i].samples = calloc((size_t)calls * (size_t)rounds, sizeof *list[i].samples);
        if (!list[i].samples) {
            cli_error("out of memory");
            code = CLI_MACHINE;
        }
    }
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < count && !code; i++)
            code = time_round(ours->bench, &list[i], calls);
    }
    return code;
}

static void free_timed(struct timed *list, int count)
{
    for (int i = 0; i < count; i++)
        free(list[i].samples);
}

static double median(const struct timed *timed)
{
    return cli_median(timed->samples, timed->count);
}

/* One bf16 cublasLtMatmul of the layer's forward; *gemm is NULL if there is no algorithm. */
static int create_baseline(struct bench_layer *ours, struct baseline **baseline,
                           struct baseline_gemm **gemm)
{
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
    int code = baseline_create(ours->bench, baseline);
    return code ? code : baseline_gemm_create(*baseline, &shape, gemm);
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

enum { PASSES = 5 };

static const struct {
    fp8_pass pass;
    int (*run)(void *user, int set);
    bool gemm;
} passes[PASSES] = {
    { FP8_PASS_WEIGHT, bench_run_weight, false },
    { FP8_PASS_FPROP, bench_run_fprop, true },
    { FP8_PASS_QUANTIZE_DY, bench_run_quantize_dy, false },
    { FP8_PASS_WGRAD, bench_run_wgrad, true },
    { FP8_PASS_DGRAD, bench_run_dgrad, true },
};

static int report_pass(struct bench_layer *ours, int index, double seconds, struct compared with)
{
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    fp8_pass pass = passes[index].pass;
    fp8_status status = fp8_layer_dispatch(ours->layer, pass, ours->shape->m, &dispatch);
    if (status)
        return bench_fp8_failed(status, ours->shape, "dispatch");
    print_row(ours, pass, seconds, (int)dispatch.launches, with);
    return CLI_DONE;
}

/* list[PASSES]: cuBLASLt, without samples if it has no algorithm. */
static int report(struct bench_layer *ours, struct timed *list, struct compared framework)
{
    const struct compared nothing = { -1, NULL };
    struct compared cublaslt = { -1, "one bf16 cublasLtMatmul" };
    int code = CLI_DONE;
    if (list[PASSES].count > 0)
        cublaslt.value = median(&list[PASSES]) * 1e6;
    for (int i = 0; !code && i < PASSES; i++) {
        struct compared with = passes[i].gemm ? cublaslt : nothing;
        if (passes[i].pass == FP8_PASS_FPROP && framework.value >= 0)
            with = framework;
        code = report_pass(ours, i, median(&list[i]), with);
    }
    if (!code)
        print_cublaslt(ours, cublaslt, framework);
    return code;
}

static int measure_passes(struct bench_layer *ours, struct compared framework)
{
    struct timed list[PASSES + 1] = { 0 };
    struct baseline *baseline = NULL;
    struct baseline_gemm *gemm = NULL;
    for (int i = 0; i < PASSES; i++)
        list[i] = (struct timed){ .call = passes[i].run, .user = ours };
    int code = create_baseline(ours, &baseline, &gemm);
    list[PASSES] = (struct timed){ .call = baseline_gemm_run, .user = gemm };
    if (!code)
        code = time_calls(ours, list, gemm ? PASSES + 1 : PASSES);
    if (!code)
        code = report(ours, list, framework);
    free_timed(list, PASSES + 1);
    baseline_gemm_destroy(gemm);
    baseline_destroy(baseline);
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
    .details =
        "Needs a CUDA device. Medians of many calls; the launch queue is kept short. With a "
        "spec: how long its model takes to start, with an empty cache and with a full one. "
        "Where python3 (or FP8GEN_PYTHON) has PyTorch with CUDA, its bf16 linear is measured "
        "in the same run.",
    .max_operands = 1,
    .options = bench_options_host,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
