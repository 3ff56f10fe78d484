/*
 * bench_quantize.c - `fp8gen bench quantize`: quantising with both copies against a plain copy.
 *
 * A tensor of rows x cols becomes the row copy and the transposed copy, recipe by recipe. Bytes are
 * counted as the recipe must move them: 4 an element where one read gives both copies (read 2,
 * write 1 + 1), 6 where an amax of the tensor or of its columns comes first, 3 for a row copy
 * alone. The baseline is a device copy that reads and writes as many bytes together, in the same
 * run. What L2 serves makes ratios above what the memory alone would allow: figures are given as
 * they are. found_inf and scales ride along; dbias is a case of its own.
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

static int measure_shape(struct bench *bench, const struct bench_shape *shape, const char *recipe)
{
    static const struct {
        const char *name;
        const char *pass;
        int (*run)(void *user, int set);
    } cases[] = {
        { "x", "x", bench_run_quantize_x },
        { "dy", "quantize_dy", bench_run_quantize_dy },
        { "dy + dbias", "quantize_dy", bench_run_quantize_dy_dbias },
        { "w", "weight", bench_run_weight },
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    size_t elements = (size_t)shape->m * (size_t)shape->n;
    struct contest c = { .bench = bench,
                         .bytes = elements * (size_t)bench_recipe_bytes(recipe) / 2 };
    struct bench_item items[CASES + 1];
    int count = shape->m == shape->n ? CASES : CASES - 1; /* w is n x n */
    size_t room = (c.bytes + 3) / 4 * 4;
    cli_progress("quantize %s %lld x %lld", recipe, (long long)shape->m, (long long)shape->n);
    int code = bench_layer_create(&c.ours, bench, shape, recipe, false);
    if (!code)
        code = bench_buffers_create(bench, &c.source, room, 1, 4);
    if (!code)
        code = bench_buffers_create(bench, &c.target, room, 0, 0);
    for (int i = 0; i < count; i++)
        items[i] = (struct bench_item){ cases[i].run, &c.ours, 0 };
    items[count] = (struct bench_item){ run_copy, &c, 0 };
    if (!code)
        code = bench_measure(bench, items, count + 1, (int)bench->values->rounds, WARM_SECONDS);
    for (int i = 0; !code && i < count; i++) {
        double bytes = 2 * (double)c.bytes;
        struct bench_result row = { .bench = "quantize",
                                    .name = cases[i].name,
                                    .pass = cases[i].pass,
                                    .recipe = recipe,
                                    .shape = shape,
                                    .unit = "GB/s",
                                    .value = bytes / items[i].seconds * 1e-9,
                                    .baseline = bytes / items[count].seconds * 1e-9,
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
    static const char *const recipes[] = { "current", "delayed", "rowwise", "block" };
    struct bench bench = { .values = values };
    (void)count;
    (void)operands;
    int code = bench_read_shapes(&bench, 2, standard, sizeof standard / sizeof standard[0]);
    if (!code)
        code = bench_read_recipes(&bench, recipes, sizeof recipes / sizeof recipes[0]);
    for (int r = 0; !code && r < bench.recipe_count; r++) {
        if (bench_recipe_bytes(bench.recipes[r]) == 0) {
            cli_error("--recipe %s: such a layer quantises nothing", bench.recipes[r]);
            code = CLI_USAGE;
        }
    }
    if (code)
        return code;
    code = bench_open(&bench, "quantize", ", bias = true");
    for (int i = 0; i < bench.shape_count; i++) {
        for (int r = 0; !code && r < bench.recipe_count && !cli_output_broken(); r++) {
            struct bench_shape shape = bench_shape_of(&bench, i, r);
            code = measure_shape(&bench, &shape, bench.recipes[r]);
        }
    }
    return bench_close(&bench, code);
}

const struct cli_command cli_bench_quantize_command = {
    .name = "bench quantize",
    .operands = "",
    .summary = "quantising with both copies against a plain device copy, recipe by recipe",
    .details = "Needs a CUDA device. Counted as 4 bytes an element where one read is enough "
               "(delayed, block), as 6 where an amax comes first (current, rowwise); the baseline "
               "copies as many bytes.",
    .options = bench_options_quantize,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
