/*
 * test_mutations.c - random changes of a manifest, sealed again, then opened and run on the host.
 *
 * A changed bundle is refused with a sentence, or it opens, and then its passes stay within their
 * buffers (the sanitizer looks); one of sharded weights runs as the model of two ranks, too.
 * FP8_TEST_SEED repeats a run that the printed seed names; FP8_TEST_MUTATIONS asks for more.
 */
#include "tests/bundle/bundle_rig.h"

#include <pthread.h>

#include "runtime/bundle_format.h"
#include "runtime/fp8_model.h"
#include "runtime/fp8_state.h"

static uint64_t seed;

static uint64_t next(uint64_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % below;
}

/* ---- mutations ---- */

/* A leaf or branch of the tree, chosen by a random walk: its parent and its place in it. */
struct place {
    json_t *parent;
    const char *key;
    size_t index;
};

static json_t *at_place(const struct place *place)
{
    return place->key ? json_object_get(place->parent, place->key)
                      : json_array_get(place->parent, place->index);
}

static bool step_down(json_t *node, struct place *place)
{
    size_t size = json_is_object(node) ? json_object_size(node) : json_array_size(node);
    if (size == 0)
        return false;
    size_t wanted = next(size);
    *place = (struct place){ .parent = node, .index = wanted };
    if (json_is_object(node)) {
        void *iterator = json_object_iter(node);
        while (wanted-- > 0)
            iterator = json_object_iter_next(node, iterator);
        place->key = json_object_iter_key(iterator);
    }
    return true;
}

static struct place random_place(json_t *root)
{
    struct place place = { 0 };
    json_t *node = root;
    while (step_down(node, &place)) {
        node = at_place(&place);
        if (!json_is_object(node) && !json_is_array(node))
            break;
        if (next(12) == 0)
            break;
    }
    return place;
}

static json_t *random_value(json_t *root, json_t *old)
{
    static const json_int_t numbers[] = { 0,         1,        -1,   2,         15,
                                          16,        17,       127,  128,       129,
                                          300,       301,      4096, INT32_MAX, (json_int_t)1 << 40,
                                          INT64_MAX, INT64_MIN };
    static const char *const words[] = { "M",
                                         "accumulate",
                                         "x",
                                         "x.ld",
                                         "x.rows",
                                         "w_row",
                                         "dy_transposed",
                                         "amax_partials",
                                         "y_stage",
                                         "e4m3",
                                         "e5m2",
                                         "bf16",
                                         "fp32",
                                         "x_row_scales",
                                         "w_transposed_scales",
                                         "state_scale",
                                         "state_amax",
                                         "dbias_partials",
                                         "row",
                                         "block",
                                         "",
                                         "." };
    struct place other = random_place(root);
    switch (next(6)) {
    case 0:
        return json_integer(numbers[next(sizeof numbers / sizeof numbers[0])]);
    case 1:
        return json_string(words[next(sizeof words / sizeof words[0])]);
    case 2:
        return json_null();
    case 3:
        return json_is_integer(old)
                   ? json_integer((json_int_t)((uint64_t)json_integer_value(old) + next(3) - 1))
                   : json_boolean(next(2));
    default:
        return json_deep_copy(at_place(&other));
    }
}

static void mutate(json_t *root)
{
    struct place place = random_place(root);
    json_t *value = next(8) == 0 ? NULL : random_value(root, at_place(&place));
    if (place.key) {
        if (value)
            json_object_set_new(place.parent, place.key, value);
        else
            json_object_del(place.parent, place.key);
    } else if (value) {
        json_array_set_new(place.parent, place.index, value);
    } else {
        json_array_remove(place.parent, place.index);
    }
}

/* ---- what opened is run ---- */

static void *block(int64_t bytes)
{
    void *memory = NULL;
    assert_int_equal(posix_memalign(&memory, 256, bytes > 0 ? (size_t)bytes : 1), 0);
    memset(memory, 0, bytes > 0 ? (size_t)bytes : 1);
    return memory;
}

static fp8_tensor tensor(int64_t rows, int64_t cols, fp8_dtype dtype)
{
    return (fp8_tensor){
        block(rows * cols * (int64_t)fp8_dtype_bytes(dtype)), rows, cols, cols, dtype, 0
    };
}

static fp8_operand operand(const fp8_layer *layer, int64_t tokens, fp8_bytes which)
{
    fp8_operand made = FP8_OPERAND_INIT;
    EXPECT_OK(fp8_layer_bytes(layer, tokens, which, &made.bytes));
    made.data = block((int64_t)made.bytes);
    return made;
}

static void run_layer(const fp8_layer *layer, const fp8_layer_info *info, int64_t m)
{
    const int64_t n = info->out_features, k = info->in_features;
    fp8_tensor x = tensor(m, k, info->x_dtype), w = tensor(n, k, info->w_dtype);
    fp8_tensor y = tensor(m, n, info->y_dtype), dy = tensor(m, n, info->dy_dtype);
    fp8_tensor dx = tensor(m, k, info->dx_dtype), dw = tensor(n, k, info->dw_dtype);
    fp8_tensor bias = tensor(1, n, FP8_DTYPE_BF16), dbias = tensor(1, n, FP8_DTYPE_FP32);
    fp8_operand weight = operand(layer, 0, FP8_BYTES_WEIGHT),
                saved = operand(layer, m, FP8_BYTES_SAVED);
    fp8_operand grad = operand(layer, m, FP8_BYTES_GRAD);
    fp8_call call = FP8_CALL_INIT;
    EXPECT_OK(fp8_layer_bytes(layer, m, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    call.workspace = block((int64_t)call.workspace_bytes);
    bool is_bf16 = info->x_format == FP8_DTYPE_NONE, by_tensor = saved.bytes == 0;
    fp8_state *state = NULL;
    if (strcmp(info->recipe, "delayed") == 0 && !is_bf16)
        EXPECT_OK(fp8_state_create(&layer, 1, &state));
    call.state = state;
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &w, update.version = 1, update.weight = &weight, update.call = call;
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &x, fprop.weight = &weight, fprop.y = &y, fprop.saved = &saved, fprop.call = call;
    fprop.bias = info->has_bias ? &bias : NULL;
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &dy, backward.saved = &saved, backward.weight = &weight, backward.grad = &grad;
    backward.dw = &dw, backward.dx = &dx, backward.call = call;
    backward.dbias = info->has_bias ? &dbias : NULL;
    fprop.w = backward.w = is_bf16 ? &w : NULL;
    backward.x = by_tensor ? &x : NULL;
    /* A plan may also name dtypes that the host has no op for. */
    if (fp8_weight_update(layer, &update) == FP8_OK && fp8_layer_fprop(layer, &fprop) == FP8_OK)
        (void)fp8_layer_backward(layer, &backward);
    if (state)
        (void)fp8_state_advance(state, NULL);
    fp8_state_destroy(state);
    fp8_tensor *tensors[] = { &x, &w, &y, &dy, &dx, &dw, &bias, &dbias };
    for (int i = 0; i < 8; i++)
        free(tensors[i]->data);
    free(weight.data), free(saved.data), free(grad.data), free(call.workspace);
}

static void try_layer(fp8_bundle *bundle, int32_t index)
{
    fp8_layer *layer;
    size_t bytes = 0;
    EXPECT_OK(fp8_layer_create(bundle, fp8_bundle_layer_name(bundle, index), &layer));
    fp8_layer_info info = { .size = sizeof info };
    EXPECT_OK(fp8_layer_describe(layer, &info));
    for (int64_t m = 0; m <= 130; m += 65) {
        if (m > info.max_tokens)
            break;
        EXPECT_OK(fp8_layer_bytes(layer, m, FP8_BYTES_WORKSPACE, &bytes));
        if (bytes > 1 << 24 || info.in_features * info.out_features > 1 << 20)
            break;
        run_layer(layer, &info, m);
    }
    fp8_layer_destroy(layer);
}

/* ---- ranks ---- */

static const char shards[] =
    "return model \"shards\" { tokens = 8, bias = true, mesh = { fsdp = 2 }, layers = {\n"
    "  linear \"current\" { in_features = 72, out_features = 37, gather_group = \"g\" },\n"
    "  linear \"rowwise\" { in_features = 40, out_features = 300, recipe = recipe.rowwise {},\n"
    "                      gather_group = \"g\", grad_weight = \"bf16\" },\n"
    "  linear \"hp\" { in_features = 33, out_features = 20,\n"
    "                 recipe = recipe.rowwise_hp_wgrad {} },\n"
    "  linear \"own\" { in_features = 72, out_features = 300,\n"
    "                  recipe = recipe.current { weight_scale = \"shard\" } },\n"
    "  linear \"block\" { in_features = 130, out_features = 257, recipe = recipe.block {} },\n"
    "} }\n";

struct seat {
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_comm_group *group;
    int32_t rank;
    pthread_t thread;
};

enum { MOST_LAYERS = 8, WORKSPACE = 1 << 24 };

static _Atomic int steps; /* layers that went through both passes, on all ranks */

/* Whether the model is small enough to be run. */
static bool make_layers(fp8_bundle *bundle, fp8_model_layer *layers, int32_t *count)
{
    bool is_small = fp8_bundle_layer_count(bundle) <= MOST_LAYERS;
    *count = is_small ? fp8_bundle_layer_count(bundle) : 0;
    for (int32_t i = 0; i < *count; i++) {
        fp8_layer *layer = NULL;
        fp8_layer_info info = { .size = sizeof info };
        size_t bytes = 0;
        EXPECT_OK(fp8_layer_create(bundle, fp8_bundle_layer_name(bundle, i), &layer));
        EXPECT_OK(fp8_layer_describe(layer, &info));
        EXPECT_OK(fp8_layer_bytes(layer, 0, FP8_BYTES_WORKSPACE, &bytes));
        is_small =
            is_small && bytes <= WORKSPACE && info.in_features * info.out_features <= 1 << 20;
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = layer;
        layers[i].group = i < 2;
    }
    return is_small;
}

static void model_step(fp8_model *model, int32_t index, const fp8_layer *layer, int32_t rank)
{
    fp8_layer_info info = { .size = sizeof info };
    EXPECT_OK(fp8_layer_describe(layer, &info));
    const int64_t m = info.max_tokens < 5 ? info.max_tokens : 5 - rank;
    const int64_t n = info.out_features, k = info.in_features;
    int64_t first, count;
    EXPECT_OK(fp8_model_rows(model, index, &first, &count));
    fp8_tensor x = tensor(m, k, info.x_dtype), y = tensor(m, n, info.y_dtype);
    fp8_tensor dy = tensor(m, n, info.dy_dtype), dx = tensor(m, k, info.dx_dtype);
    fp8_tensor dw = tensor(count, k, info.dw_dtype), dbias = tensor(1, count, FP8_DTYPE_FP32);
    fp8_tensor bias = tensor(1, n, FP8_DTYPE_BF16);
    fp8_operand saved = operand(layer, m, FP8_BYTES_SAVED),
                grad = operand(layer, m, FP8_BYTES_GRAD);
    fp8_call call = FP8_CALL_INIT;
    EXPECT_OK(fp8_layer_bytes(layer, m, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    call.workspace = block((int64_t)fp8_min_i64((int64_t)call.workspace_bytes, WORKSPACE));
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &x, fprop.y = &y, fprop.saved = &saved, fprop.call = call;
    fprop.bias = info.has_bias ? &bias : NULL;
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    passes.dy = &dy, passes.saved = &saved, passes.grad = &grad, passes.dx = &dx;
    passes.x = saved.bytes == 0 ? &x : NULL, passes.call = call;
    fp8_model_backward_args backward = FP8_MODEL_BACKWARD_ARGS_INIT;
    backward.backward = &passes, backward.dw = &dw;
    backward.dbias = info.has_bias ? &dbias : NULL;
    if (call.workspace_bytes <= WORKSPACE && fp8_model_fprop(model, index, &fprop) == FP8_OK &&
        fp8_model_backward(model, index, &backward) == FP8_OK)
        steps++;
    fp8_tensor *tensors[] = { &x, &y, &dy, &dx, &dw, &dbias, &bias };
    for (int i = 0; i < 7; i++)
        free(tensors[i]->data);
    free(saved.data), free(grad.data), free(call.workspace);
}

static void run_model(fp8_model *model, const fp8_model_layer *layers, int32_t layer_count,
                      int32_t rank)
{
    fp8_tensor w[MOST_LAYERS];
    fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
    update.w = w, update.version = 1;
    update.call.workspace_bytes = WORKSPACE;
    update.call.workspace = block(WORKSPACE);
    for (int32_t i = 0; i < layer_count; i++) {
        fp8_layer_info info = { .size = sizeof info };
        int64_t first, count;
        EXPECT_OK(fp8_layer_describe(layers[i].layer, &info));
        EXPECT_OK(fp8_model_rows(model, i, &first, &count));
        w[i] = tensor(count, info.in_features, info.w_dtype);
    }
    if (fp8_model_update(model, &update) == FP8_OK) {
        for (int32_t i = 0; i < layer_count; i++)
            model_step(model, i, layers[i].layer, rank);
    }
    for (int32_t i = 0; i < layer_count; i++)
        free(w[i].data);
    free(update.call.workspace);
}

static void *run_rank(void *user)
{
    const struct seat *seat = user;
    fp8_model_layer layers[MOST_LAYERS];
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    fp8_model *model = NULL;
    int32_t count;
    const bool is_small = make_layers(seat->bundle, layers, &count);
    options.layers = layers, options.layer_count = count, options.context = seat->context;
    EXPECT_OK(fp8_comm_join(seat->group, seat->context, seat->rank, NULL, &options.comm));
    if (is_small && fp8_model_create(&options, &model) == FP8_OK)
        run_model(model, layers, count, seat->rank);
    fp8_model_destroy(model);
    fp8_comm_destroy(options.comm);
    for (int32_t i = 0; i < count; i++)
        fp8_layer_destroy((fp8_layer *)(uintptr_t)layers[i].layer);
    return NULL;
}

static void try_ranks(fp8_context *context, fp8_bundle *bundle)
{
    struct seat seats[2];
    fp8_comm_group *group;
    EXPECT_OK(fp8_comm_group_create(2, 5, &group));
    for (int32_t i = 0; i < 2; i++) {
        seats[i] = (struct seat){ context, bundle, group, i, 0 };
        assert_int_equal(pthread_create(&seats[i].thread, NULL, run_rank, &seats[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(seats[i].thread, NULL);
    fp8_comm_group_destroy(group);
}

/* ---- all together ---- */

static void unchanged_shards_run(void **state)
{
    (void)state;
    char *folder = bundle_folder();
    fp8_context *context = bundle_context(FP8_DEVICE_HOST);
    json_t *manifest = bundle_manifest_of(shards, "generated");
    fp8_bundle *bundle;
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
    steps = 0;
    try_ranks(context, bundle);
    assert_int_equal(steps, 2 * fp8_bundle_layer_count(bundle));
    fp8_bundle_close(bundle);
    json_decref(manifest);
    fp8_context_destroy(context);
    bundle_remove(folder);
}

static void changed_bundles_are_refused_or_run(void **state)
{
    (void)state;
    const char *given = getenv("FP8_TEST_SEED"), *count = getenv("FP8_TEST_MUTATIONS");
    uint64_t first = given ? strtoull(given, NULL, 0) : 20260;
    int mutations = count ? atoi(count) : 300, opened = 0;
    print_message("seed %llu, %d mutations\n", (unsigned long long)first, mutations);
    char *folder = bundle_folder();
    fp8_context *context = bundle_context(FP8_DEVICE_HOST);
    json_t *recipes = bundle_manifest_of(bundle_recipes, "cublaslt");
    json_t *sharded = bundle_manifest_of(shards, "generated");
    for (int i = 0; i < mutations; i++) {
        json_t *manifest = i % 4 == 2   ? json_deep_copy(recipes)
                           : i % 4 == 3 ? json_deep_copy(sharded)
                                        : bundle_manifest_by(i % 4 ? "generated" : "cublaslt");
        fp8_bundle *bundle;
        seed = first + (uint64_t)i * 7919;
        for (uint64_t changes = 1 + next(3); changes > 0; changes--)
            mutate(manifest);
        bundle_seal(manifest);
        bundle_write(manifest, folder);
        json_decref(manifest);
        fp8_status status = fp8_bundle_open(context, folder, &bundle);
        if (status == FP8_OK) {
            opened++;
            for (int32_t j = 0; j < fp8_bundle_layer_count(bundle); j++)
                try_layer(bundle, j);
            if (i % 4 == 3)
                try_ranks(context, bundle);
        } else {
            assert_int_equal(status, FP8_ERR_BUNDLE);
            assert_true(strlen(fp8_last_error()) > 20);
        }
        fp8_bundle_close(bundle);
    }
    print_message("%d of %d changed bundles opened\n", opened, mutations);
    json_decref(recipes);
    json_decref(sharded);
    fp8_context_destroy(context);
    bundle_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unchanged_shards_run),
        cmocka_unit_test(changed_bundles_are_refused_or_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
