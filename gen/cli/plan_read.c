/*
 * plan_read.c - looking into a plan's JSON, for every command that does.
 *
 * In: a session whose spec is loaded, or the JSON of a plan or of a bundle's manifest, which are
 * the same records. Out: its parts, and the error about a layer that is not there.
 */
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"

json_t *plan_read(fp8gen *gen, const char *path, int *code)
{
    const char *text;
    fp8gen_status status = fp8gen_plan(gen, &text);
    json_t *plan = status ? NULL : json_loads(text, 0, NULL);
    *code = CLI_DONE;
    if (status)
        *code = cli_gen_failed(gen, status, path);
    else if (!plan) {
        cli_error("%s: the plan is not JSON", path);
        *code = CLI_BUG;
    }
    return plan;
}

const char *plan_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "?";
}

int64_t plan_integer(const json_t *object, const char *key)
{
    return json_integer_value(json_object_get(object, key));
}

double plan_number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

json_t *plan_find(const json_t *list, const char *name)
{
    size_t index;
    json_t *item;
    json_array_foreach(list, index, item)
    {
        if (strcmp(plan_text(item, "name"), name) == 0)
            return item;
    }
    return NULL;
}

json_t *plan_gemm_step(const json_t *layer, const char *pass)
{
    size_t index;
    json_t *step;
    json_array_foreach(json_object_get(json_object_get(layer, "passes"), pass), index, step)
    {
        if (strcmp(plan_text(step, "op"), "gemm") == 0)
            return step;
    }
    return NULL;
}

bool plan_is_bf16(const json_t *layer)
{
    return strcmp(plan_text(layer, "compute"), "bf16") == 0;
}

int plan_unknown_layer(const json_t *layers, const char *wanted)
{
    size_t index, count = json_array_size(layers);
    const char **names = calloc(count + 1, sizeof *names);
    json_t *layer;
    cli_error("the spec has no layer '%s'", wanted);
    if (!names)
        return CLI_USAGE;
    json_array_foreach(layers, index, layer) names[index] = plan_text(layer, "name");
    const char *nearest = cli_nearest(wanted, names, (int)count);
    if (nearest)
        cli_hint("did you mean '%s'?", nearest);
    else if (count)
        cli_hint("the first of its %zu layers is '%s'", count, names[0]);
    free(names);
    return CLI_USAGE;
}
