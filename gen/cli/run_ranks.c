/*
 * run_ranks.c - `fp8gen run --fsdp`: opens the ranks, gives them the bundle, prints the report.
 */
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"
#include "gen/cli/run.h"
#include "gen/cli/run_shard.h"

/* Layers that compute in bf16 share no FP8 bytes: said, and left out. Any other to run? */
static int check_layers(const json_t *plan, const char *wanted)
{
    int shared = 0;
    size_t index;
    json_t *layer;
    json_array_foreach(json_object_get(plan, "layers"), index, layer)
    {
        const char *name = plan_text(layer, "name");
        if (wanted && strcmp(name, wanted) != 0)
            continue;
        if (plan_is_bf16(layer))
            cli_note("layer '%s' computes in bf16: its weight is the caller's, nothing to compare",
                     name);
        else
            shared++;
    }
    if (shared)
        return CLI_DONE;
    cli_error("no layer shares FP8 weights over the ranks");
    cli_hint("without ranks, 'fp8gen run' checks layers that compute in bf16");
    return CLI_USAGE;
}

/* "threads", "torchrun" */
static const char *how_of(const struct cli_ranks *all)
{
    return all->launcher ? all->launcher : "threads";
}

static int finish(struct shard_report *report, int code)
{
    cli_progress_end();
    int failures = report ? shard_report_finish(report) : 0;
    if (!code && failures) {
        cli_error(
            "%d layer%s not as unsharded: a bug of fp8gen, please report the spec and the seed",
            failures, failures == 1 ? " is" : "s are");
        code = CLI_BUG;
    }
    return code;
}

int run_ranks(const struct run_sharded_options *options, fp8gen *gen)
{
    struct cli_ranks all = { 0 };
    struct shard_run run = { .only = options->layer,
                             .tokens = options->tokens,
                             .seed = (uint64_t)options->seed,
                             .shrunk = options->shrunk };
    char *folder = NULL, *path = NULL;
    int code = CLI_DONE;
    json_t *plan = plan_read(gen, "the plan", &code);
    if (!code)
        code = check_layers(plan, options->layer);
    if (!code)
        code = cli_ranks_open(options->device, options->ranks, options->timeout, &all);
    if (code)
        goto done;
    code = cli_device_build(&all.lead, gen, &folder, &path);
    if (code)
        goto done;
    const char *sum = json_string_value(json_object_get(json_object_get(plan, "shard"), "reduce"));
    run.manifest = plan;
    run.average = !sum || strcmp(sum, "average") == 0;
    if (all.first == 0) {
        run.report =
            shard_report_create(options->json, json_string_value(json_object_get(plan, "model")),
                                how_of(&all), all.lead.info.name);
        if (!run.report) {
            cli_error("out of memory");
            code = CLI_MACHINE;
            goto done;
        }
    }
    code = finish(run.report, cli_ranks_run(&all, path, shard_work, &run));
done:
    cli_device_built(&folder, &path);
    cli_ranks_close(&all);
    json_decref(plan);
    return code;
}
