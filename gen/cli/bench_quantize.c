/*
 * bench_quantize.c - `fp8gen bench quantize`: amax + cast + transposed copy against a plain copy.
 *
 * A tensor of rows x cols is quantised with both copies; that is counted as 6 bytes an element (read 2
 * for amax, read 2 for the cast, write 1 + 1). The baseline is a device copy that reads and writes as
 * many bytes together, in the same run. A second amax read that L2 serves makes ratios above what the
 * memory alone would allow: both figures are given as they are.
 */
#include <stdio.h>

#include "gen/cli/bench_layer.h"

#define WARM_SECONDS 1.0

static const struct bench_shape standard[] = {
    { 8192, 8192, 8192, "" }, { 8192, 4096, 4096, "" }, { 8192, 28672, 28672, "" },
    { 2048, 2048, 2048, "" }, { 8192, 2556, 2556, "" },
};

struct contest {
    struct bench *bench;
    struct bench_layer ours;
    struct bench_buffers source, target;
    size_t bytes;
};

static int run_copy(void *user, int set)
{
    struct contest *c = user;
    return bench_copy(c->bench, c->target.set[set].device, c->source.set[set].device, c->bytes);
}

static int measure_shape(struct bench *bench, const struct bench_shape *shape)
{
    static const struct {
        const char *name;
        int (*run)(void *user, int set);
    } cases[] = {
        { "bf16 -> e4m3", bench_run_quantize_x },
        { "bf16 -> e5m2", bench_run_quantize_dy },
        { "bf16 -> e5m2 + dbias", bench_run_quantize_dy_dbias },
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    struct contest c = { .bench = bench, .bytes = 3 * (size_t)shape->m * (size_t)shape->n };
    struct bench_item items[CASES + 1];
    size_t room = (c.bytes + 3) / 4 * 4;
    cli_progress("quantize %lld x %lld", (long long)shape->m, (long long)shape->n);
    int code = bench_layer_create(&c.ours, bench, shape, false);
    if (!code)
        code = bench_buffers_create(bench, &c.source, room, 1, 4);
    if (!code)
        code = bench_buffers_create(bench, &c.target, room, 0, 0);
    for (int i = 0; i < CASES; i++)
        items[i] = (struct bench_item){ cases[i].run, &c.ours, 0 };
    items[CASES] = (struct bench_item){ run_copy, &c, 0 };
    if (!code)
        code = bench_measure(bench, items, CASES + 1, (int)bench->values->rounds, WARM_SECONDS);
    for (int i = 0; !code && i < CASES; i++) {
        double bytes = 2 * (double)c.bytes;
        struct bench_result row = { .bench = "quantize",
                                    .name = cases[i].name,
                                    .pass = "amax + quantise",
                                    .shape = shape,
                                    .unit = "GB/s",
                                    .value = bytes / items[i].seconds * 1e-9,
                                    .baseline = bytes / items[CASES].seconds * 1e-9,
                                    .baseline_name = "copy of the same bytes",
                                    .launches = -1 };
        bench_result_print(bench, &row);
    }
    bench_buffers_destroy(bench, &c.source);
    bench_buffers_destroy(bench, &c.target);
    bench_layer_destroy(&c.ours);
    return code;
}

static int run(const void *values, int count, char **operands)
{
    struct bench bench = { .values = values };
    (void)count;
    (void)operands;
    int code = bench_read_shapes(&bench, 2, standard, sizeof standard / sizeof standard[0]);
    if (code)
        return code;
    code = bench_open(&bench, "quantize", ", bias = true");
    for (int i = 0; !code && i < bench.shape_count && !cli_output_broken(); i++)
        code = measure_shape(&bench, &bench.shapes[i]);
    return bench_close(&bench, code);
}

const struct cli_command cli_bench_quantize_command = {
    .name = "bench quantize",
    .operands = "",
    .summary = "amax + quantise with both copies against a plain device copy",
    .details =
        "Needs a CUDA device. Counted as 6 bytes an element; the baseline copies as many bytes.",
    .options = bench_options_quantize,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
