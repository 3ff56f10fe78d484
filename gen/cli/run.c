/*
 * run.c - `fp8gen run SPEC`: runs every pass of every layer and checks the results.
 *
 * The bundle is built into a temporary folder for the device at hand and goes through the same
 * loader as any other. On the host a layer's tokens are cut so that a spec of a large model takes
 * seconds: the cut keeps in_features and out_features whole, is said on stderr and stands in the
 * report;
 * --tokens is never cut. Exit code 4 if a result is out of its bounds: that is a bug of ours.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"
#include "gen/cli/random.h"
#include "gen/cli/run.h"

#define HOST_FLOPS 16e9 /* of one layer's GEMMs: about a second on two cores */
#define HOST_MIN_TOKENS 16

struct values {
    const char *device;
    const char *layer;
    int64_t tokens; /* -1: as the spec says */
    const char *recipe;
    int64_t seed;
    bool json;
    const char *dump;
    const char *template_dir;
    const char *tuning;
    const char *gemm;
    bool report;
    const char *fsdp; /* NULL: as the spec says */
    bool shrink;
    const char *timeout;
};

static const char *const device_choices[] = { "auto", "host", "cuda", NULL };

static const struct cli_option options[] = {
    { .name = "device",
      .kind = CLI_CHOICE,
      .metavar = "WHERE",
      .doc = "auto, host or cuda (default auto: the GPU if there is one)",
      .offset = offsetof(struct values, device),
      .choices = device_choices },
    CLI_OPTION_LAYER(struct values),
    { .name = "tokens",
      .kind = CLI_NUMBER,
      .metavar = "N",
      .doc = "run N tokens, 0 to the spec's max_tokens",
      .offset = offsetof(struct values, tokens),
      .max = INT64_MAX,
      .fallback = -1 },
    CLI_OPTION_RECIPE(struct values),
    { .name = "seed",
      .kind = CLI_NUMBER,
      .metavar = "S",
      .doc = "seed of the random data (default 0)",
      .offset = offsetof(struct values, seed),
      .max = INT64_MAX },
    { .name = "json",
      .kind = CLI_FLAG,
      .doc = "one JSON object per row instead of the table",
      .offset = offsetof(struct values, json) },
    { .name = "dump",
      .kind = CLI_TEXT,
      .metavar = "DIR",
      .doc = "write all tensors, FP8 bytes and scales as .npy into DIR",
      .offset = offsetof(struct values, dump) },
    { .name = "report",
      .kind = CLI_FLAG,
      .doc = "the accuracy of every recipe and accumulation instead; takes no SPEC",
      .offset = offsetof(struct values, report) },
    CLI_OPTION_TEMPLATE_DIR(struct values),
    CLI_OPTION_TUNING(struct values),
    CLI_OPTION_GEMM(struct values),
    CLI_OPTION_FSDP(struct values),
    { .name = "shrink",
      .kind = CLI_FLAG,
      .doc = "cut dims, keeping remainders mod 128 and uneven shards",
      .offset = offsetof(struct values, shrink) },
    { .name = "timeout",
      .kind = CLI_TEXT,
      .metavar = "S",
      .doc = "with ranks: seconds that a collective may take (default 120)",
      .offset = offsetof(struct values, timeout) },
    { .name = NULL },
};

struct session {
    const struct values *values;
    struct cli_device device;
    fp8_bundle *bundle;
    json_t *manifest;
    struct run_report *report;
    struct run_dump *dump;
};

/* ---- one layer ------------------------------------------------------------------------------- */

static void choose_tokens(const struct session *s, struct run_layer *run)
{
    const fp8_layer_info *i = &run->info;
    run->wanted_m = s->values->tokens >= 0 ? s->values->tokens : i->tokens;
    run->m = run->wanted_m;
    if (!s->device.is_host || s->values->tokens >= 0)
        return;
    double fit = HOST_FLOPS / (8.0 * (double)i->in_features * (double)i->out_features);
    int64_t cut = fit < HOST_MIN_TOKENS ? HOST_MIN_TOKENS : fit < 1e9 ? (int64_t)fit : INT64_MAX;
    if (cut < run->m) {
        run->m = cut / 16 * 16;
        cli_note("layer '%s': %" PRId64 " of %" PRId64
                 " tokens on the host, to finish in seconds (--tokens runs as many as you say)",
                 i->name, run->m, run->wanted_m);
    }
}

static void shape_text(const struct run_layer *run, struct run_row *row)
{
    char cut[32] = "";
    if (run->m != run->wanted_m)
        snprintf(cut, sizeof cut, " (of %" PRId64 ")", run->wanted_m);
    snprintf(row->shape, sizeof row->shape, "%" PRId64 "%s x %" PRId64 " x %" PRId64, run->m, cut,
             run->info.out_features, run->info.in_features);
}

/* Runs a pass and fills what every row has. */
static int begin_row(struct run_layer *run, fp8_pass pass, bool accumulate, struct run_row *row)
{
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    *row = run_row_of(accumulate ? "wgrad +=" : fp8_pass_name(pass));
    shape_text(run, row);
    cli_progress("%s: %s %s", run->info.name, row->pass, row->shape);
    fp8_status status = fp8_layer_dispatch(run->layer, pass, run->m ? run->m : 1, &dispatch);
    if (status)
        return cli_fp8_failed(status, "layer '%s', %s", run->info.name, row->pass);
    bool quantizes = pass == FP8_PASS_WEIGHT || pass == FP8_PASS_QUANTIZE_DY;
    snprintf(row->kernel, sizeof row->kernel, "%s%s%s", quantizes ? "" : dispatch.backend,
             quantizes ? "" : " ", dispatch.kernel ? dispatch.kernel : "");
    snprintf(row->dtype, sizeof row->dtype, "%s", dispatch.dtype ? dispatch.dtype : "");
    return run_pass_timed(run, pass, accumulate, &row->seconds);
}

static int dump_buffers(struct session *s, const struct run_layer *run,
                        const enum run_buffer *buffers, int count)
{
    int code = CLI_DONE;
    for (int i = 0; s->dump && !code && i < count; i++)
        if (buffers[i] < RUN_X_QUANTIZED || run_has_operand(run, buffers[i]))
            code = run_dump_buffer(s->dump, run, buffers[i]);
    return code;
}

static int run_operand_pass(struct session *s, struct run_layer *run, fp8_pass pass)
{
    struct run_row row;
    enum run_buffer tensor = pass == FP8_PASS_WEIGHT ? RUN_W : RUN_DY;
    if (!run_has_pass(run, pass))
        return dump_buffers(s, run, &tensor, 1);
    bool weight = pass == FP8_PASS_WEIGHT, dbias = !weight && run->info.has_bias;
    enum run_buffer operand = weight ? RUN_WEIGHT : RUN_GRAD;
    int code = begin_row(run, pass, false, &row);
    const fp8_tensor *source = &run->tensors[tensor];
    row.bytes = (double)source->rows * (double)source->cols * run->recipe.bytes[pass];
    bool is_there = run_has_operand(run, operand);
    if (!code && is_there)
        code = run_download(run, operand);
    if (!code && dbias)
        code = run_download(run, RUN_DBIAS);
    if (!code && is_there)
        code = run_check_operand(run, operand, &row);
    if (!code && dbias)
        code = run_check_dbias(run, &row);
    if (!code)
        run_report_row(s->report, run, &row);
    const enum run_buffer dumped[] = { tensor, operand, RUN_DBIAS };
    return code ? code : dump_buffers(s, run, dumped, dbias ? 3 : 2);
}

static double gemm_flops(const struct run_layer *run)
{
    return 2.0 * (double)run->m * (double)run->info.out_features * (double)run->info.in_features;
}

static int run_fprop_pass(struct session *s, struct run_layer *run)
{
    struct run_row row;
    bool quantized = run_has_operand(run, RUN_X_QUANTIZED);
    int code = quantized ? run_quantize_x(run) : CLI_DONE;
    if (!code)
        code = begin_row(run, FP8_PASS_FPROP, false, &row);
    static const enum run_buffer written[] = { RUN_X_QUANTIZED, RUN_SAVED, RUN_Y };
    for (int i = 0; !code && i < 3; i++)
        code = run_download(run, written[i]);
    if (!code && quantized)
        code = run_check_operand(run, RUN_X_QUANTIZED, &row);
    if (!code && run_has_operand(run, RUN_SAVED))
        code = run_check_saved(run, &row);
    if (!code)
        code = run_check_gemm(run, FP8_PASS_FPROP, NULL, &row);
    if (code)
        return code;
    row.flops = gemm_flops(run);
    run_report_row(s->report, run, &row);
    static const enum run_buffer dumped[] = { RUN_X, RUN_X_QUANTIZED, RUN_Y, RUN_BIAS };
    return dump_buffers(s, run, dumped, run->info.has_bias ? 4 : 3);
}

static int run_gradient_pass(struct session *s, struct run_layer *run, fp8_pass pass,
                             bool accumulate)
{
    struct run_row row;
    enum run_buffer out = pass == FP8_PASS_WGRAD ? RUN_DW : RUN_DX;
    double *before = NULL;
    int code = accumulate ? run_fill_dw(run) : CLI_DONE;
    if (!code && accumulate && !(before = run_sample_dw(run))) {
        cli_error("out of memory for the reference");
        code = CLI_MACHINE;
    }
    if (!code)
        code = begin_row(run, pass, accumulate, &row);
    if (!code)
        code = run_download(run, out);
    if (!code)
        code = run_check_gemm(run, pass, before, &row);
    free(before);
    if (code)
        return code;
    row.flops = gemm_flops(run);
    run_report_row(s->report, run, &row);
    return accumulate ? CLI_DONE : dump_buffers(s, run, &out, 1);
}

static int run_passes(struct session *s, struct run_layer *run)
{
    int code = s->dump ? run_dump_layer(s->dump, run) : CLI_DONE;
    if (!code)
        code = run_operand_pass(s, run, FP8_PASS_WEIGHT);
    if (!code)
        code = run_fprop_pass(s, run);
    if (!code)
        code = run_operand_pass(s, run, FP8_PASS_QUANTIZE_DY);
    if (!code)
        code = run_gradient_pass(s, run, FP8_PASS_WGRAD, false);
    if (!code)
        code = run_gradient_pass(s, run, FP8_PASS_WGRAD, true);
    if (!code)
        code = run_gradient_pass(s, run, FP8_PASS_DGRAD, false);
    return code;
}

static int run_layer(struct session *s, int32_t index)
{
    struct run_layer run = { 0 };
    const char *name = fp8_bundle_layer_name(s->bundle, index);
    int code = run_layer_create(&run, &s->device, s->bundle, name);
    if (!code) {
        run.recipe = run_read_recipe(s->manifest, name);
        run.seed = cli_random_word((uint64_t)s->values->seed, 1, (uint64_t)index);
        choose_tokens(s, &run);
        code = run_layer_fill(&run);
    }
    if (!code)
        code = run_passes(s, &run);
    run_layer_destroy(&run);
    return code;
}

/* ---- all layers ------------------------------------------------------------------------------ */

static int run_layers(struct session *s)
{
    int32_t count = fp8_bundle_layer_count(s->bundle);
    const char *wanted = s->values->layer;
    int code = CLI_DONE;
    for (int32_t i = 0; !code && i < count && !cli_output_broken(); i++) {
        if (!wanted || strcmp(fp8_bundle_layer_name(s->bundle, i), wanted) == 0)
            code = run_layer(s, i);
    }
    return code;
}

static int open_session(struct session *s, fp8gen *gen)
{
    const struct values *v = s->values;
    int code = cli_device_open(v->device ? v->device : "auto", "--device cuda", &s->device);
    if (!code)
        code = cli_device_bundle(&s->device, gen, &s->bundle);
    if (code)
        return code;
    s->manifest = json_loads(fp8_bundle_manifest(s->bundle), 0, NULL);
    const char *model = json_string_value(json_object_get(s->manifest, "model"));
    if (!model) {
        cli_error("the bundle's manifest has no model");
        return CLI_BUG;
    }
    if (v->dump)
        code = run_dump_create(v->dump, model, (uint64_t)v->seed, &s->dump);
    if (code)
        return code;
    s->report = run_report_create(v->json, model, &s->device);
    if (!s->report) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    return CLI_DONE;
}

static int close_session(struct session *s, int code)
{
    cli_progress_end();
    int failures = s->report ? run_report_finish(s->report) : 0;
    if (!code && failures) {
        cli_error("%d result%s out of bounds: a bug of fp8gen, please report the spec and the seed",
                  failures, failures == 1 ? " is" : "s are");
        code = CLI_BUG;
    }
    code = run_dump_finish(s->dump, code);
    json_decref(s->manifest);
    fp8_bundle_close(s->bundle);
    cli_device_close(&s->device);
    return code;
}

static int report(const struct values *v)
{
    struct cli_device device;
    int code = cli_device_open(v->device ? v->device : "auto", "--device cuda", &device);
    if (!code)
        code = run_accuracy(&device, v->template_dir, (uint64_t)v->seed, v->json);
    cli_progress_end();
    cli_device_close(&device);
    return code;
}

/* What --report does not go by. */
static const char *beside_report(const struct values *v, int count)
{
    return count > 0        ? "SPEC"
           : v->layer       ? "--layer"
           : v->tokens >= 0 ? "--tokens"
           : v->recipe      ? "--recipe"
           : v->dump        ? "--dump"
           : v->tuning      ? "--tuning"
           : v->gemm        ? "--gemm"
           : v->fsdp        ? "--fsdp"
           : v->shrink      ? "--shrink"
                            : NULL;
}

/* Whether the plan has the layer that is wanted, and the layers take the tokens. */
static int check_layers(const json_t *plan, const struct values *v)
{
    const json_t *layers = json_object_get(plan, "layers");
    size_t index;
    json_t *layer;
    if (v->layer && !plan_find(layers, v->layer))
        return plan_unknown_layer(layers, v->layer);
    json_array_foreach(layers, index, layer)
    {
        const char *name = plan_text(layer, "name");
        const int64_t most = plan_integer(layer, "max_tokens");
        if (v->tokens <= most || (v->layer && strcmp(name, v->layer) != 0))
            continue;
        cli_error("--tokens %" PRId64 ": layer '%s' is planned for at most %" PRId64 " tokens",
                  v->tokens, name, most);
        cli_hint("raise max_tokens in the spec");
        return CLI_USAGE;
    }
    return CLI_DONE;
}

/* Before anything is compiled; *ranks: how many share the weights. */
static int check_plan(fp8gen *gen, const char *path, const struct values *v, int *ranks)
{
    int code;
    json_t *plan = plan_read(gen, path, &code);
    *ranks = (int)plan_integer(json_object_get(plan, "mesh"), "fsdp");
    if (!code)
        code = check_layers(plan, v);
    json_decref(plan);
    return code;
}

static int run_sharded(const struct values *v, fp8gen *gen, int ranks)
{
    struct run_sharded_options wanted = { .device = v->device ? v->device : "auto",
                                          .ranks = ranks,
                                          .layer = v->layer,
                                          .tokens = v->tokens,
                                          .seed = v->seed,
                                          .json = v->json,
                                          .shrunk = v->shrink };
    if (v->dump) {
        cli_error("--dump writes what one rank has; it does not go with %d ranks", ranks);
        cli_hint("--fsdp 1 runs and dumps the layers as one rank has them");
        return CLI_USAGE;
    }
    int code = cli_read_seconds("timeout", v->timeout, 120, &wanted.timeout);
    return code ? code : run_ranks(&wanted, gen);
}

static int run_spec(const struct values *v, const char *path)
{
    struct session s = { .values = v };
    struct cli_spec spec = { .path = path,
                             .template_dir = v->template_dir,
                             .recipe = v->recipe,
                             .tuning = v->tuning,
                             .gemm = v->gemm,
                             .fsdp = v->fsdp,
                             .shrink = v->shrink ? "true" : NULL };
    fp8gen *gen = NULL;
    int ranks = 1;
    int code = cli_spec_open(&spec, NULL, &gen);
    if (code)
        return code;
    code = check_plan(gen, path, v, &ranks);
    if (!code && ranks > 1) {
        code = run_sharded(v, gen, ranks);
        fp8gen_close(gen);
        return code;
    }
    if (!code && v->timeout) {
        cli_error("--timeout is of collectives between ranks, and there is one rank");
        cli_hint("leave it out, or give --fsdp F with F above 1");
        code = CLI_USAGE;
    }
    if (!code)
        code = open_session(&s, gen);
    fp8gen_close(gen);
    if (!code)
        code = run_layers(&s);
    return close_session(&s, code);
}

static int run(const void *v, int count, char **operands)
{
    const struct values *values = v;
    const char *beside = values->report ? beside_report(v, count) : NULL;
    if (beside) {
        cli_error("run --report takes no %s: its layers and data are its own", beside);
        return CLI_USAGE;
    }
    if (values->report)
        return report(v);
    if (count == 0) {
        cli_error("run: a SPEC is missing");
        cli_hint("fp8gen run SPEC, or fp8gen run --report");
        return CLI_USAGE;
    }
    return run_spec(values, operands[0]);
}

const struct cli_command cli_run_command = {
    .name = "run",
    .operands = "[SPEC]",
    .summary = "run every pass of every layer and check the results",
    .details =
        "Random data goes through weight, fprop, quantize_dy, wgrad and dgrad. 'error' is "
        "that of the kernel against float64 on the operands as quantised, with its bound; "
        "'SQNR' is that of FP8 against float64 on the original tensors. FP8 bytes and scales "
        "are compared bit for bit with the rules. A result out of its bounds gives exit code "
        "4. Few outputs or little depth make no average: there each output is judged by "
        "itself ('each'), by one rounding and a share of its terms. 'fast' accumulation has "
        "no bound above a depth of 28,672: the verdict is 'not judged'.\n"
        "--report runs layers of its own, one a recipe, on normal data, outlier columns and "
        "data after an activation, and prints SQNR of y, dx, dw and the error of "
        "accumulation against K.\n"
        "On the host the spec's tokens are cut so that a large model takes seconds; --tokens "
        "is not.\n"
        "\n"
        "With --fsdp F above 1, or a mesh in the spec, F ranks share the weights: threads of this "
        "process on the host, with a GPU each where there are as many; or, started by "
        "torchrun, mpirun or srun, this process is one of them. Two steps of two "
        "micro-batches run over all layers, with other weights in the second, and are "
        "compared with the unsharded layer: gathered bytes and scales, y and dx bit for bit, "
        "dw and dbias within the roundings of a sum over the ranks. With --shrink the last "
        "rank's second micro-batch is empty. --fsdp 1 is the run of one rank: every pass, as "
        "without a mesh.",
    .min_operands = 0,
    .max_operands = 1,
    .options = options,
    .values_size = sizeof(struct values),
    .run = run,
};
