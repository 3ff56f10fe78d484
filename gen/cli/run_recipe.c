/*
 * run_recipe.c - how a layer computes, as its record in the bundle's manifest says.
 */
#include <stdio.h>
#include <string.h>

#include "gen/cli/run.h"

/* Whether the product of the pass is one of bf16. */
static bool is_plain(const json_t *layer, const char *pass)
{
    size_t index;
    json_t *step;
    json_array_foreach(json_object_get(json_object_get(layer, "passes"), pass), index, step)
    {
        const char *scaling = json_string_value(json_object_get(step, "a_scaling"));
        if (scaling && strcmp(scaling, "none") == 0)
            return true;
    }
    return false;
}

/* Bytes that quantising moves for each element: a read of the source by every step, a byte for each copy.
 * Steps of a tensor without a history are for the first step of a training alone. */
static double element_bytes(const json_t *layer, const char *pass)
{
    const char *dtype = NULL;
    size_t index;
    json_t *item;
    double sum = 0;
    json_array_foreach(json_object_get(layer, "buffers"), index, item)
    {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && strcmp(name, strcmp(pass, "weight") == 0 ? "w" : "dy") == 0)
            dtype = json_string_value(json_object_get(item, "dtype"));
    }
    double source = dtype && strcmp(dtype, "fp32") == 0 ? 4 : 2;
    json_array_foreach(json_object_get(json_object_get(layer, "passes"), pass), index, item)
    {
        const json_t *args = json_object_get(item, "args");
        const char *when = json_string_value(json_object_get(args, "when"));
        if (!json_is_string(json_object_get(args, "source")) ||
            (when && strcmp(when, "state_fresh") == 0))
            continue;
        sum += source + json_is_string(json_object_get(args, "row")) +
               json_is_string(json_object_get(args, "transposed"));
    }
    return sum;
}

struct run_recipe run_read_recipe(const json_t *manifest, const char *name)
{
    struct run_recipe recipe = { 0 };
    size_t index;
    json_t *layer;
    json_array_foreach(json_object_get(manifest, "layers"), index, layer)
    {
        const char *found = json_string_value(json_object_get(layer, "name"));
        if (!found || strcmp(found, name) != 0)
            continue;
        const json_t *accumulation = json_object_get(layer, "accumulation");
        const json_t *fields = json_object_get(layer, "recipe");
        const char *kind = json_string_value(json_object_get(fields, "name"));
        const char *compute = json_string_value(json_object_get(layer, "compute"));
        recipe.is_bf16 = compute && strcmp(compute, "bf16") == 0;
        snprintf(recipe.name, sizeof recipe.name, "%s", recipe.is_bf16 ? "bf16" : kind ? kind : "");
        recipe.is_delayed = strcmp(recipe.name, "delayed") == 0;
        recipe.power_of_two = json_is_true(json_object_get(fields, "power_of_two"));
        recipe.margin = (int)json_integer_value(json_object_get(fields, "margin"));
        for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
            const char *pass_name = fp8_pass_name((fp8_pass)pass);
            const char *how = json_string_value(json_object_get(accumulation, pass_name));
            recipe.split[pass] = how && strcmp(how, "split") == 0;
            recipe.plain[pass] = is_plain(layer, pass_name);
            recipe.bytes[pass] = element_bytes(layer, pass_name);
        }
    }
    return recipe;
}
