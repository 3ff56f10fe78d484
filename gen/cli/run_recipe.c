/*
 * run_recipe.c - how a layer computes, as its record in the bundle's manifest says.
 */
#include <stdio.h>
#include <string.h>

#include "gen/cli/plan.h"
#include "gen/cli/run.h"

/* Bytes that quantising moves for each element: a read of the source by every step, a byte for each
 * copy. Steps of a tensor without a history are for the first step of a training alone. */
static double element_bytes(const json_t *layer, const char *pass)
{
    const char *name = strcmp(pass, "weight") == 0 ? "w" : "dy";
    const json_t *buffer = plan_find(json_object_get(layer, "buffers"), name);
    double source = strcmp(plan_text(buffer, "dtype"), "fp32") == 0 ? 4 : 2, sum = 0;
    size_t index;
    json_t *item;
    json_array_foreach(json_object_get(json_object_get(layer, "passes"), pass), index, item)
    {
        const json_t *args = json_object_get(item, "args");
        if (!json_is_string(json_object_get(args, "source")) ||
            strcmp(plan_text(args, "when"), "state_fresh") == 0)
            continue;
        sum += source + json_is_string(json_object_get(args, "row")) +
               json_is_string(json_object_get(args, "transposed"));
    }
    return sum;
}

struct run_recipe run_read_recipe(const json_t *manifest, const char *name)
{
    struct run_recipe recipe = { 0 };
    const json_t *layer = plan_find(json_object_get(manifest, "layers"), name);
    const json_t *accumulation = json_object_get(layer, "accumulation");
    const json_t *fields = json_object_get(layer, "recipe");
    recipe.is_bf16 = plan_is_bf16(layer);
    snprintf(recipe.name, sizeof recipe.name, "%s",
             recipe.is_bf16 ? "bf16" : plan_text(fields, "name"));
    recipe.is_delayed = strcmp(recipe.name, "delayed") == 0;
    recipe.power_of_two = json_is_true(json_object_get(fields, "power_of_two"));
    recipe.margin = (int)plan_integer(fields, "margin");
    if (strcmp(plan_text(fields, "weight_scale"), "shard") == 0 && !recipe.is_bf16)
        recipe.shard_rows = plan_integer(json_object_get(layer, "shard"), "rows");
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        const char *pass_name = fp8_pass_name((fp8_pass)pass);
        recipe.split[pass] = strcmp(plan_text(accumulation, pass_name), "split") == 0;
        recipe.plain[pass] =
            strcmp(plan_text(plan_gemm_step(layer, pass_name), "a_scaling"), "none") == 0;
        recipe.bytes[pass] = element_bytes(layer, pass_name);
    }
    return recipe;
}
