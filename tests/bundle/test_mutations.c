/*
 * test_mutations.c - random changes of a manifest, sealed again, then opened and run on the host.
 *
 * A changed bundle is refused with a sentence, or it opens, and then its passes stay within their
 * buffers (the sanitizer looks). FP8_TEST_SEED repeats a run that the printed seed names;
 * FP8_TEST_MUTATIONS asks for more.
 */
#include "tests/bundle/bundle_rig.h"

#include "runtime/bundle_format.h"
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
    for (int i = 0; i < mutations; i++) {
        json_t *manifest = i % 3 == 2 ? json_deep_copy(recipes)
                                      : bundle_manifest_by(i % 3 ? "generated" : "cublaslt");
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
        } else {
            assert_int_equal(status, FP8_ERR_BUNDLE);
            assert_true(strlen(fp8_last_error()) > 20);
        }
        fp8_bundle_close(bundle);
    }
    print_message("%d of %d changed bundles opened\n", opened, mutations);
    json_decref(recipes);
    fp8_context_destroy(context);
    bundle_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(changed_bundles_are_refused_or_run) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
