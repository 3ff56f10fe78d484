/*
 * manifest_shard.c - what a manifest says of ranks: the mesh, and how each weight is spread over
 * it.
 *
 * In: the JSON records. Out: the number of ranks, and per layer the rows of a rank's chunk, which
 * must be those that follow from N and the ranks: sums and gathers rely on it. The list of
 * collectives is for people; only its form is checked.
 */
#include "runtime/internal.h"
#include "runtime/json_read.h"

#define MAX_COLLECTIVES 16384 /* of 4096 layers, four each */

static fp8_status read_ways(struct fp8_reader *reader, const json_t *root,
                            struct fp8_manifest *manifest)
{
    static const char *const keys[] = { "backward", "reduce", NULL };
    static const char *const backwards[] = { "gather", "keep" };
    static const char *const sums[] = { "average", "sum" };
    const json_t *shard;
    int keep = 0, sum = 0;
    FP8_TRY(fp8_read_object(reader, root, "shard", &shard));
    size_t mark = fp8_read_enter(reader, "shard");
    FP8_TRY(fp8_read_keys(reader, shard, keys));
    FP8_TRY(fp8_read_word(reader, shard, "backward", backwards, 2, &keep));
    FP8_TRY(fp8_read_word(reader, shard, "reduce", sums, 2, &sum));
    manifest->keep = keep == 1;
    manifest->sum = sum == 1;
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

fp8_status fp8_manifest_mesh(struct fp8_reader *reader, const json_t *root,
                             struct fp8_manifest *manifest)
{
    static const char *const keys[] = { "tensor", "fsdp", NULL };
    const json_t *mesh, *list;
    int64_t tensor, rank;
    FP8_TRY(fp8_read_object(reader, root, "mesh", &mesh));
    size_t mark = fp8_read_enter(reader, "mesh");
    FP8_TRY(fp8_read_keys(reader, mesh, keys));
    FP8_TRY(fp8_read_integer(reader, mesh, "tensor", 1, 1, &tensor));
    FP8_TRY(fp8_read_integer(reader, mesh, "fsdp", 1, FP8_MAX_RANKS, &manifest->fsdp));
    fp8_read_leave(reader, mark);
    if (json_object_get(root, "collectives"))
        FP8_TRY(fp8_read_array(reader, root, "collectives", MAX_COLLECTIVES, &list));
    FP8_TRY(read_ways(reader, root, manifest));
    return fp8_read_integer(reader, root, "rank", 0, 0, &rank);
}

fp8_status fp8_manifest_shard(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              const json_t *record, struct fp8_layer_plan *plan)
{
    static const char *const keys[] = {
        "rows", "multiple", "gather_group", "sums", "maxima", NULL
    };
    struct fp8_shard_plan *shard = &plan->shard;
    const json_t *object;
    FP8_TRY(fp8_read_object(reader, record, "shard", &object));
    size_t mark = fp8_read_enter(reader, "shard");
    FP8_TRY(fp8_read_keys(reader, object, keys));
    FP8_TRY(fp8_read_integer(reader, object, "multiple", 1, 128, &shard->multiple));
    FP8_TRY(fp8_read_integer(reader, object, "rows", 1, FP8_MANIFEST_EXTENT_LIMIT, &shard->rows));
    if (!json_is_null(json_object_get(object, "gather_group")))
        FP8_TRY(fp8_read_string(reader, object, "gather_group", &shard->group));
    shard->ranks = manifest->fsdp;
    if (shard->multiple != 1 && shard->multiple != 128)
        return fp8_read_bad(reader, "'multiple' is %lld, neither 1 nor 128",
                            (long long)shard->multiple);
    int64_t chunk = (plan->out_features + manifest->fsdp - 1) / manifest->fsdp;
    chunk = (chunk + shard->multiple - 1) / shard->multiple * shard->multiple;
    if (shard->rows != chunk)
        return fp8_read_bad(reader,
                            "'rows' is %lld; %lld out_features over %lld ranks make %lld each",
                            (long long)shard->rows, (long long)plan->out_features,
                            (long long)manifest->fsdp, (long long)chunk);
    shard->own_scales = plan->recipe.by_shard && !plan->is_bf16;
    if (shard->own_scales && (manifest->fsdp == 1 || shard->multiple != FP8_BLOCK))
        return fp8_read_bad(reader,
                            "weight_scale is 'shard', but there is one shard, or they do not "
                            "end at multiples of 128 rows");
    fp8_read_leave(reader, mark);
    return FP8_OK;
}
