/*
 * gemm_set.c - generated candidates: one bundle for each configuration of the GEMM template.
 *
 * In: layers and which candidates are wanted. Out: open bundles. The list of configurations is the
 * library's; a bundle is built with that configuration forced on every GEMM, in one of two models
 * of the same layers, all accumulation fast or all split, whichever the configuration is for.
 * Bundles are built at the same time, one thread each, because a bundle alone does not fill all
 * cores.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/gemm.h"

struct building {
    struct gemm_set *set;
    const char *folder;
    char *specs[2]; /* fast, split */
    atomic_int done;
};

static int no_memory(void)
{
    cli_error("out of memory");
    return CLI_MACHINE;
}

/* ---- which candidates ------------------------------------------------------------------------ */

static int add(struct gemm_set *set, const struct gemm_candidate *candidate)
{
    struct gemm_candidate *items = realloc(set->items, sizeof *items * (size_t)(set->count + 1));
    if (!items)
        return no_memory();
    set->items = items;
    items[set->count] = *candidate;
    json_incref(items[set->count++].config);
    return CLI_DONE;
}

/* Is `name` one of the names with commas? */
static bool listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; *at;) {
        size_t word = strcspn(at, ",");
        if (word == length && memcmp(at, name, length) == 0)
            return true;
        at += word + (at[word] == ',');
    }
    return false;
}

static int unknown_name(const char *word, size_t length, const json_t *configs)
{
    const char *names[512];
    char name[64];
    int count = 0;
    snprintf(name, sizeof name, "%.*s", (int)length, word);
    for (size_t i = 0; i < json_array_size(configs) && count < 512; i++) {
        const json_t *config = json_array_get(configs, i);
        const char *text = json_string_value(json_object_get(config, "name"));
        if (text)
            names[count++] = text;
        if (text && strcmp(text, name) == 0)
            return CLI_DONE;
    }
    const char *nearest = cli_nearest(name, names, count);
    cli_error("--candidates: there is no configuration '%s'", name);
    if (nearest)
        cli_hint("did you mean '%s'?", nearest);
    else
        cli_hint("it takes all, plan, or names with commas, as '%s'", count ? names[0] : "?");
    return CLI_USAGE;
}

static int check_names(const char *which, const json_t *configs)
{
    int code = CLI_DONE;
    for (const char *at = which; !code && *at;) {
        size_t length = strcspn(at, ",");
        code = unknown_name(at, length, configs);
        at += length + (at[length] == ',');
    }
    return code;
}

static int add_configs(struct gemm_set *set, const char *which, const bool wanted[2],
                       const json_t *configs)
{
    bool all = strcmp(which, "all") == 0;
    int code = all ? CLI_DONE : check_names(which, configs);
    size_t index;
    json_t *entry;
    json_array_foreach((json_t *)configs, index, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        bool split = json_integer_value(json_object_get(entry, "partials")) > 0;
        if (code || !name || !wanted[split] || (!all && !listed(which, name)))
            continue;
        struct gemm_candidate item = { .split = split, .config = entry };
        snprintf(item.name, sizeof item.name, "%s", name);
        code = add(set, &item);
    }
    return code;
}

static int read_configs(json_t **configs)
{
    fp8gen *gen = NULL;
    const char *text = NULL;
    *configs = NULL;
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (!status)
        status = fp8gen_gemm_configs(gen, &text);
    int code = status ? cli_gen_failed(gen, status, "listing configurations") : CLI_DONE;
    if (!code && !(*configs = json_loads(text, 0, NULL))) {
        cli_error("the list of configurations is not JSON");
        code = CLI_BUG;
    }
    fp8gen_close(gen);
    return code;
}

static int choose(struct gemm_set *set, const char *which, bool with_plan, const bool wanted[2])
{
    json_t *configs = NULL;
    int code = CLI_DONE;
    for (int split = 0; !code && with_plan && split < 2; split++) {
        struct gemm_candidate plan = { .name = "plan", .plan = true, .split = split };
        if (wanted[split])
            code = add(set, &plan);
        plan.tuned = true;
        if (!code && wanted[split] && set->bench->values->tuning)
            code = add(set, &plan);
    }
    if (code || strcmp(which, "plan") == 0)
        return code;
    code = read_configs(&configs);
    if (!code)
        code = add_configs(set, which, wanted, configs);
    json_decref(configs);
    return code;
}

/* ---- building -------------------------------------------------------------------------------- */

static char *write_spec(const struct gemm_set *set, bool split)
{
    const char *how = split ? "split" : "fast";
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file)
        return NULL;
    fprintf(file,
            "return model \"gemm\" {\n  accumulation = { fprop = \"%s\", dgrad = \"%s\", wgrad = "
            "\"%s\" },\n  layers = {\n",
            how, how, how);
    for (int i = 0; i < set->layer_count; i++) {
        const struct gemm_layer *l = &set->layers[i];
        fprintf(file,
                "    linear \"%s\" { in_features = %" PRId64 ", out_features = %" PRId64
                ", tokens = %" PRId64 ", max_tokens = %" PRId64
                ", output = \"%s\", grad_input = \"%s\", grad_weight = \"%s\", recipe = "
                "recipe.current { format = \"%s\" } },\n",
                l->name, l->k, l->n, l->max_m, l->max_m, fp8_dtype_name(l->y),
                fp8_dtype_name(l->dx), fp8_dtype_name(l->dw), l->format);
    }
    fprintf(file, "} }\n");
    if (fclose(file) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static char *bundle_path(const char *folder, int64_t index)
{
    char *path = NULL;
    return asprintf(&path, "%s/%" PRId64, folder, index) < 0 ? NULL : path;
}

static void build_one(void *user, int64_t index)
{
    struct building *b = user;
    struct gemm_candidate *item = &b->set->items[index];
    const struct bench_values *values = b->set->bench->values;
    struct cli_spec spec = { .path = "gemm",
                             .template_dir = values->template_dir,
                             .tuning = item->tuned ? values->tuning : NULL,
                             .gemm = item->tuned  ? NULL
                                     : item->plan ? "generated"
                                                  : item->name };
    fp8gen *gen = NULL;
    char *path = bundle_path(b->folder, index);
    fp8gen_build_options build = FP8GEN_BUILD_OPTIONS_INIT;
    build.archs = b->set->bench->device.arch;
    build.output_dir = path;
    build.jobs = item->plan ? 4 : 1; /* it has a kernel for each kind of shape */
    fp8gen_status status =
        path ? cli_spec_load(&spec, b->specs[item->split], &gen) : FP8GEN_ERR_MACHINE;
    if (!status)
        status = fp8gen_build(gen, &build);
    if (status) {
        const char *text = gen ? fp8gen_diagnostics(gen) : "";
        item->trouble = strdup(text[0] ? text : "out of memory\n");
        item->code = (int)status;
    }
    fp8gen_close(gen);
    free(path);
    int done = atomic_fetch_add(&b->done, 1) + 1;
    cli_progress("compiling [%d/%d] %s", done, b->set->count, item->name);
}

static int open_one(struct gemm_set *set, const char *folder, int index)
{
    struct gemm_candidate *item = &set->items[index];
    char *path = bundle_path(folder, index);
    if (!path)
        return no_memory();
    if (!item->trouble) {
        fp8_status status = fp8_bundle_open(set->bench->device.context, path, &item->bundle);
        if (status && asprintf(&item->trouble, "%s\n", fp8_last_error()) < 0)
            item->trouble = NULL;
    }
    free(path);
    if (item->bundle) {
        item->manifest = json_loads(fp8_bundle_manifest(item->bundle), 0, NULL);
        return item->manifest ? CLI_DONE : no_memory();
    }
    const char *trouble = item->trouble ? item->trouble : "unknown\n";
    if (item->plan) {
        cli_error("the plan's own GEMMs cannot be built:");
        fputs(trouble, stderr);
        return item->code ? item->code : CLI_BUG;
    }
    cli_warning("configuration %s is left out: %.*s", item->name, (int)strcspn(trouble, "\n"),
                trouble);
    return CLI_DONE;
}

int gemm_set_build(struct gemm_set *set)
{
    struct building b = { .set = set };
    char *folder = NULL;
    int code = cli_temp_create(NULL, "fp8gen", &folder);
    if (code)
        return code;
    b.folder = folder;
    b.specs[0] = write_spec(set, false);
    b.specs[1] = write_spec(set, true);
    if (!b.specs[0] || !b.specs[1])
        code = no_memory();
    if (!code)
        cli_parallel(set->count, build_one, &b);
    cli_progress_end();
    for (int i = 0; !code && i < set->count; i++)
        code = open_one(set, folder, i);
    free(b.specs[0]);
    free(b.specs[1]);
    cli_temp_remove(folder);
    return code;
}

int gemm_set_choose(struct gemm_set *set, const char *which, bool with_plan, const bool wanted[2])
{
    const char *template_dir = set->bench->values->template_dir;
    if (template_dir && !cli_is_folder(template_dir)) {
        cli_error("--template-dir: no folder '%s'", template_dir);
        return CLI_USAGE;
    }
    int code = choose(set, which ? which : "all", with_plan, wanted);
    if (!code && set->count == 0) {
        cli_error("none of the configurations is for the accumulation that is wanted");
        cli_hint(
            "'p' before a number in the name, as in co128x128c1s6p2g8: for split accumulation");
        code = CLI_USAGE;
    }
    return code;
}

void gemm_set_close(struct gemm_set *set)
{
    for (int i = 0; i < set->count; i++) {
        fp8_bundle_close(set->items[i].bundle);
        json_decref(set->items[i].config);
        json_decref(set->items[i].manifest);
        free(set->items[i].trouble);
    }
    free(set->items);
    set->items = NULL;
    set->count = 0;
}

/* ---- layers ---------------------------------------------------------------------------------- */

int gemm_set_layers(const struct gemm_set *set, int layer, bool split, fp8_layer **layers)
{
    const char *name = set->layers[layer].name;
    int made = 0;
    for (int i = 0; i < set->count; i++) {
        const struct gemm_candidate *item = &set->items[i];
        layers[i] = NULL;
        if (!item->bundle || item->split != split)
            continue;
        fp8_status status = fp8_layer_create(item->bundle, name, &layers[i]);
        if (status)
            cli_warning("configuration %s, layer of %" PRId64 " x %" PRId64 ": %s", item->name,
                        set->layers[layer].n, set->layers[layer].k, fp8_last_error());
        made += layers[i] != NULL;
    }
    if (made)
        return CLI_DONE;
    cli_error("no generated candidate can run a layer of %" PRId64 " x %" PRId64 " with %s "
              "accumulation",
              set->layers[layer].n, set->layers[layer].k, split ? "split" : "fast");
    return CLI_BUG;
}

static const json_t *named(const json_t *array, const char *key, const char *name)
{
    for (size_t i = 0; i < json_array_size(array); i++) {
        const json_t *item = json_array_get(array, i);
        const char *text = json_string_value(json_object_get(item, key));
        if (text && strcmp(text, name) == 0)
            return item;
    }
    return NULL;
}

const char *gemm_set_kernel(const struct gemm_candidate *candidate, const char *layer,
                            fp8_pass pass, int64_t m, bool accumulate)
{
    const json_t *record = named(json_object_get(candidate->manifest, "layers"), "name", layer);
    const json_t *steps = json_object_get(json_object_get(record, "passes"), fp8_pass_name(pass));
    const json_t *ranges = json_object_get(named(steps, "op", "gemm"), "dispatch");
    for (size_t i = 0; i < json_array_size(ranges); i++) {
        const json_t *range = json_array_get(ranges, i);
        const json_t *choice = json_array_get(json_object_get(range, "choices"), 0);
        if (m > json_integer_value(json_object_get(range, "max_tokens")))
            continue;
        return json_string_value(
            json_object_get(choice, accumulate ? "accumulate_kernel" : "kernel"));
    }
    return NULL;
}

void gemm_set_free_layers(const struct gemm_set *set, fp8_layer **layers)
{
    for (int i = 0; i < set->count; i++) {
        fp8_layer_destroy(layers[i]);
        layers[i] = NULL;
    }
}
