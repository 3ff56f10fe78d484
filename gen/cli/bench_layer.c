/*
 * bench_layer.c - `fp8gen bench layer`: a whole FP8 layer against bf16, and its parts.
 *
 * Contenders, all in turns in one run: forward + backward in FP8 with and without the weight
 * update; the three bf16 GEMMs, each by the fastest of all cuBLASLt algorithms; each quantise pass
 * against a plain copy of the same bytes (bench_recipe_bytes); each FP8 GEMM with one scale a
 * tensor against the fastest of all cuBLASLt FP8 algorithms on the same operands. Recipe by recipe.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/bench_layer.h"
#include "gen/cli/cublaslt.h"

#define WARM_SECONDS 1.5

static const struct bench_shape standard[] = {
    { 8192, 28672, 4096, "" }, { 8192, 8192, 8192, "" }, { 8192, 4096, 14336, "" },
    { 8192, 4096, 4096, "" },  { 2048, 2048, 2048, "" }, { 8192, 2556, 4096, "" },
};

enum { FPROP, WGRAD, DGRAD, GEMMS };
static const char *const gemm_names[GEMMS] = { "fprop", "wgrad", "dgrad" };

struct contest {
    struct bench_layer ours;
    struct baseline *baseline;
    struct baseline_gemm *bf16[GEMMS], *fp8[GEMMS];
    struct bench_buffers copy_source, copy_target;
    size_t copy_bytes[3]; /* for w, x, dy */
};

/* ---- baselines ------------------------------------------------------------------------------- */

static struct baseline_matrix matrix_of(const struct bench_buffers *buffers, fp8_dtype dtype,
                                        int64_t ld, bool across)
{
    struct baseline_matrix m = { .dtype = dtype, .ld = ld, .across = across };
    for (int set = 0; set < BENCH_SETS; set++)
        m.data[set] = buffers->set[set].device;
    return m;
}

static struct baseline_matrix operand_of(const fp8_operand operands[BENCH_SETS], bool transposed)
{
    struct baseline_matrix m = { .dtype = operands[0].dtype };
    for (int set = 0; set < BENCH_SETS; set++) {
        fp8_operand_view view;
        if (fp8_operand_parts(&operands[set], &view) != FP8_OK)
            continue;
        m.data[set] = transposed ? view.transposed : view.row;
        m.ld = transposed ? view.transposed_ld : view.row_ld;
        m.scale_inv[set] = view.scales + 4;
    }
    return m;
}

static void describe_gemms(const struct bench_layer *b, struct baseline_gemm_shape bf16[GEMMS],
                           struct baseline_gemm_shape fp8[GEMMS])
{
    int64_t m = b->shape->m, n = b->shape->n, k = b->shape->k;
    const fp8_dtype type = FP8_DTYPE_BF16;
    struct baseline_matrix y = matrix_of(&b->y, b->info.y_dtype, n, false);
    struct baseline_matrix dw = matrix_of(&b->dw, b->info.dw_dtype, k, false);
    struct baseline_matrix dx = matrix_of(&b->dx, b->info.dx_dtype, k, false);
    bf16[FPROP] = (struct baseline_gemm_shape){
        m, n, k, false, false, matrix_of(&b->x, type, k, false), matrix_of(&b->w, type, k, false), y
    };
    bf16[WGRAD] = (struct baseline_gemm_shape){
        n, k, m, false, false, matrix_of(&b->dy, type, n, true), matrix_of(&b->x, type, k, true), dw
    };
    bf16[DGRAD] = (struct baseline_gemm_shape){
        m, k, n, false, false, matrix_of(&b->dy, type, n, false), matrix_of(&b->w, type, k, true),
        dx
    };
    if (!bench_recipe_of_tensors(b->recipe))
        return;
    fp8[FPROP] = (struct baseline_gemm_shape){
        m, n, k, true, false, operand_of(b->x_quantized, false), operand_of(b->weight, false), y
    };
    fp8[WGRAD] = (struct baseline_gemm_shape){
        n, k, m, false, false, operand_of(b->grad, true), operand_of(b->saved, true), dw
    };
    fp8[DGRAD] = (struct baseline_gemm_shape){
        m, k, n, false, false, operand_of(b->grad, false), operand_of(b->weight, true), dx
    };
    for (int i = 0; i < GEMMS; i++) /* as the runtime does: the zeros of the pad take part */
        fp8[i].depth = (fp8[i].depth + 15) / 16 * 16;
}

static int make_baselines(struct contest *c)
{
    struct baseline_gemm_shape bf16[GEMMS], fp8[GEMMS];
    int code = baseline_create(c->ours.bench, &c->baseline);
    if (code)
        return code;
    describe_gemms(&c->ours, bf16, fp8);
    for (int i = 0; !code && i < GEMMS; i++) {
        code = baseline_gemm_create(c->baseline, &bf16[i], &c->bf16[i]);
        if (!code && !c->bf16[i])
            cli_warning("cuBLASLt has no bf16 algorithm for %s of this shape", gemm_names[i]);
        if (!code && bench_recipe_of_tensors(c->ours.recipe))
            code = baseline_gemm_create(c->baseline, &fp8[i], &c->fp8[i]);
    }
    return code;
}

static int make_copies(struct contest *c)
{
    const struct bench_shape *s = c->ours.shape;
    size_t m = (size_t)s->m, n = (size_t)s->n, k = (size_t)s->k;
    size_t elements[] = { n * k, m * k, m * n }, largest = 0;
    for (int i = 0; i < 3; i++) {
        c->copy_bytes[i] = elements[i] * (size_t)bench_recipe_bytes(c->ours.recipe) / 2;
        largest = c->copy_bytes[i] > largest ? c->copy_bytes[i] : largest;
    }
    largest = (largest + 3) / 4 * 4;
    int code = bench_buffers_create(c->ours.bench, &c->copy_source, largest, 1, 4);
    return code ? code : bench_buffers_create(c->ours.bench, &c->copy_target, largest, 0, 0);
}

/* ---- items ----------------------------------------------------------------------------------- */

static int run_kept(void *user, int set)
{
    struct contest *contest = user;
    bool quantizes = bench_recipe_bytes(contest->ours.recipe) > 0;
    int (*const passes[])(void *, int) = { bench_run_fprop, bench_run_quantize_dy, bench_run_wgrad,
                                           bench_run_dgrad };
    int code = CLI_DONE;
    for (size_t i = 0; !code && i < sizeof passes / sizeof passes[0]; i++)
        if (quantizes || passes[i] != bench_run_quantize_dy)
            code = passes[i](&contest->ours, set);
    return code;
}

static int run_whole(void *user, int set)
{
    struct contest *c = user;
    int code = bench_recipe_bytes(c->ours.recipe) > 0 ? bench_run_weight(&c->ours, set) : CLI_DONE;
    return code ? code : run_kept(user, set);
}

static int run_bf16(void *user, int set)
{
    struct contest *c = user;
    int code = CLI_DONE;
    for (int i = 0; !code && i < GEMMS; i++)
        code = c->bf16[i] ? baseline_gemm_run(c->bf16[i], set) : CLI_DONE;
    return code;
}

static int run_copy(struct contest *c, int which, int set)
{
    return bench_copy(c->ours.bench, c->copy_target.set[set].device, c->copy_source.set[set].device,
                      c->copy_bytes[which]);
}

static int run_copy_w(void *user, int set)
{
    return run_copy(user, 0, set);
}

static int run_copy_x(void *user, int set)
{
    return run_copy(user, 1, set);
}

static int run_copy_dy(void *user, int set)
{
    return run_copy(user, 2, set);
}

static int run_nothing(void *user, int set)
{
    (void)user;
    (void)set;
    return CLI_DONE;
}

enum {
    WHOLE,
    KEPT,
    BF16,
    QUANTIZE_W, /* w, x, dy, then the copies of the same bytes */
    COPY_W = QUANTIZE_W + 3,
    GEMM_OURS = COPY_W + 3, /* fprop, wgrad, dgrad */
    GEMM_BEST = GEMM_OURS + GEMMS,
    ITEMS = GEMM_BEST + GEMMS,
};

static void make_items(struct contest *c, struct bench_item items[ITEMS])
{
    const struct bench_item list[ITEMS] = {
        [WHOLE] = { run_whole, c, 0 },
        [KEPT] = { run_kept, c, 0 },
        [BF16] = { run_bf16, c, 0 },
        [QUANTIZE_W] = { bench_run_weight, &c->ours, 0 },
        [QUANTIZE_W + 1] = { bench_run_quantize_x, &c->ours, 0 },
        [QUANTIZE_W + 2] = { bench_run_quantize_dy, &c->ours, 0 },
        [COPY_W] = { run_copy_w, c, 0 },
        [COPY_W + 1] = { run_copy_x, c, 0 },
        [COPY_W + 2] = { run_copy_dy, c, 0 },
        [GEMM_OURS + FPROP] = { bench_run_gemm_fprop, &c->ours, 0 },
        [GEMM_OURS + WGRAD] = { bench_run_gemm_wgrad, &c->ours, 0 },
        [GEMM_OURS + DGRAD] = { bench_run_gemm_dgrad, &c->ours, 0 },
    };
    memcpy(items, list, sizeof list);
    for (int i = QUANTIZE_W; i < GEMM_OURS && bench_recipe_bytes(c->ours.recipe) == 0; i++)
        items[i] = (struct bench_item){ run_nothing, c, 0 };
    for (int i = 0; i < GEMMS; i++)
        items[GEMM_BEST + i] =
            (struct bench_item){ c->fp8[i] ? baseline_gemm_run : run_nothing, c->fp8[i], 0 };
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void print_layer_rows(struct contest *c, const struct bench_item items[ITEMS])
{
    bool whole_bf16 = c->bf16[FPROP] && c->bf16[WGRAD] && c->bf16[DGRAD];
    char name[128], grad[48];
    if (whole_bf16)
        snprintf(name, sizeof name, "three bf16 GEMMs, each best of %d, %d, %d cuBLASLt algorithms",
                 baseline_gemm_algorithms(c->bf16[FPROP]), baseline_gemm_algorithms(c->bf16[WGRAD]),
                 baseline_gemm_algorithms(c->bf16[DGRAD]));
    struct bench_result row = { .bench = "layer",
                                .pass = "all",
                                .recipe = c->ours.recipe,
                                .shape = c->ours.shape,
                                .unit = "us",
                                .baseline = whole_bf16 ? items[BF16].seconds * 1e6 : -1,
                                .baseline_name = whole_bf16 ? name : NULL,
                                .lower_is_better = true,
                                .launches = -1 };
    const char *dtype = fp8_dtype_name(c->ours.info.dw_dtype);
    snprintf(grad, sizeof grad, "forward + backward, dw %s", dtype);
    row.name = grad;
    row.value = items[WHOLE].seconds * 1e6;
    bench_result_print(c->ours.bench, &row);
    snprintf(grad, sizeof grad, "the same, weight kept, dw %s", dtype);
    row.value = items[KEPT].seconds * 1e6;
    bench_result_print(c->ours.bench, &row);
}

static void print_part_rows(struct contest *c, const struct bench_item items[ITEMS])
{
    static const char *const quantized[] = { "weight", "x", "quantize_dy" };
    const struct bench_shape *s = c->ours.shape;
    double flops = 2.0 * (double)s->m * (double)s->n * (double)s->k;
    for (int i = 0; i < 3 && bench_recipe_bytes(c->ours.recipe) > 0; i++) {
        double bytes = 2.0 * (double)c->copy_bytes[i];
        bool own_amax = strcmp(c->ours.recipe, "current") == 0;
        struct bench_result row = { .bench = "layer",
                                    .name = own_amax ? "amax + quantise" : "quantise",
                                    .recipe = c->ours.recipe,
                                    .pass = quantized[i],
                                    .shape = s,
                                    .unit = "GB/s",
                                    .value = bytes / items[QUANTIZE_W + i].seconds * 1e-9,
                                    .baseline = bytes / items[COPY_W + i].seconds * 1e-9,
                                    .baseline_name = "copy of the same bytes",
                                    .launches = -1 };
        bench_result_print(c->ours.bench, &row);
    }
    for (int i = 0; i < GEMMS; i++) {
        char name[64];
        if (c->fp8[i])
            snprintf(name, sizeof name, "cuBLASLt FP8, best of %d algorithms",
                     baseline_gemm_algorithms(c->fp8[i]));
        struct bench_result row = { .bench = "layer",
                                    .name = "GEMM",
                                    .recipe = c->ours.recipe,
                                    .pass = gemm_names[i],
                                    .shape = s,
                                    .unit = "TFLOP/s",
                                    .value = flops / items[GEMM_OURS + i].seconds * 1e-12,
                                    .baseline = c->fp8[i]
                                                    ? flops / items[GEMM_BEST + i].seconds * 1e-12
                                                    : -1,
                                    .baseline_name = c->fp8[i] ? name : NULL,
                                    .launches = -1 };
        bench_result_print(c->ours.bench, &row);
    }
}

static int measure_shape(struct bench *bench, const struct bench_shape *shape, const char *recipe)
{
    struct contest *c = calloc(1, sizeof *c);
    struct bench_item items[ITEMS];
    if (!c) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    cli_progress("layer %s %lld x %lld x %lld", recipe, (long long)shape->m, (long long)shape->n,
                 (long long)shape->k);
    int code = bench_layer_create(&c->ours, bench, shape, recipe, true);
    if (!code) { /* sustained clocks before the algorithms are chosen */
        struct bench_item alone = { run_whole, c, 0 };
        code = bench_measure(bench, &alone, 1, 1, WARM_SECONDS);
    }
    if (!code)
        code = make_baselines(c);
    if (!code)
        code = make_copies(c);
    if (!code) {
        make_items(c, items);
        code = bench_measure(bench, items, ITEMS, (int)bench->values->rounds, WARM_SECONDS);
    }
    if (!code) {
        print_layer_rows(c, items);
        print_part_rows(c, items);
    }
    for (int i = 0; i < GEMMS; i++) {
        baseline_gemm_destroy(c->bf16[i]);
        baseline_gemm_destroy(c->fp8[i]);
    }
    baseline_destroy(c->baseline);
    bench_buffers_destroy(bench, &c->copy_source);
    bench_buffers_destroy(bench, &c->copy_target);
    bench_layer_destroy(&c->ours);
    free(c);
    return code;
}

static int run(const void *values, int count, char **operands)
{
    struct bench bench = { .values = values };
    const char *grad_weight = bench.values->grad_weight ? bench.values->grad_weight : "bf16";
    char fields[64];
    (void)count;
    (void)operands;
    snprintf(fields, sizeof fields, ", grad_weight = \"%s\"", grad_weight);
    static const char *const recipes[] = { "current" };
    int code = bench_read_shapes(&bench, 3, standard, sizeof standard / sizeof standard[0]);
    if (!code)
        code = bench_read_recipes(&bench, recipes, 1);
    if (code)
        return code;
    code = bench_open(&bench, "layer", fields);
    for (int i = 0; i < bench.shape_count; i++) {
        for (int r = 0; !code && r < bench.recipe_count && !cli_output_broken(); r++) {
            struct bench_shape shape = bench_shape_of(&bench, i, r);
            code = measure_shape(&bench, &shape, bench.recipes[r]);
        }
    }
    return bench_close(&bench, code);
}

const struct cli_command cli_bench_layer_command = {
    .name = "bench layer",
    .operands = "",
    .summary = "a whole layer against bf16 and the best of cuBLASLt",
    .details = "Needs a CUDA device. Forward and backward in FP8 against the three bf16 GEMMs by "
               "the fastest of all cuBLASLt algorithms, and each part against its own yardstick, "
               "all in turns in one run. A ratio above 1 is better than the baseline.",
    .options = bench_options_layer,
    .values_size = sizeof(struct bench_values),
    .run = run,
};
