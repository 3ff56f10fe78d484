/*
 * test_recipes.c - manifests of every recipe that lie, and the state of delayed scaling where
 * memory runs out.
 *
 * Each lie is one change of a manifest that the generator made, sealed again; the bundle must be
 * refused when it is opened, with a sentence about that change. What the steps of a pass may touch
 * depends on the recipe: scales have extents of their own, a copy is scaled in one way, a product
 * reads operands or the caller's tensors.
 */
#include "tests/bundle/bundle_rig.h"

#include "runtime/bundle_format.h"
#include "runtime/fp8_state.h"

enum { DELAYED, ROWWISE, HP, BLOCK, BF16 };

struct lie {
    int layer;
    const char *buffer; /* its name; NULL: the path begins at the layer */
    const char *path;
    const char *value; /* JSON; NULL: removed */
    const char *sentence;
};

static const struct lie lies[] = {
    /* the state */
    { DELAYED, "state_scale", "cols", "2", "'scale' of the state is one element of fp32" },
    { DELAYED, "state_fresh", "dtype", "\"fp32\"",
      "'fresh' of the state is one element of uint32" },
    { DELAYED, "state_amax", "part", "\"scale\"", "two buffers are 'scale' of the state" },
    { DELAYED, "state_amax", "part", "\"row\"", "'part' is 'row'" },
    { DELAYED, NULL, "roll", "null", "'roll' names no kernel" },
    { DELAYED, NULL, "roll", "\"amax_bf16\"", "implements 'amax', not 'roll'" },
    { DELAYED, NULL, "recipe.margin", "17", "'margin' is 17" },
    { DELAYED, NULL, "recipe.algo", "\"mean\"", "'algo' is 'mean'" },
    { DELAYED, NULL, "recipe.history_length", "65537", "'history_length' is 65537" },
    { DELAYED, NULL, "recipe.name", "\"current\"", "unknown field" },
    { ROWWISE, NULL, "recipe.history_length", "4", "unknown field 'history_length'" },
    { DELAYED, NULL, "passes.weight.1.args.known", "null", "it may not be null" },
    { DELAYED, NULL, "passes.weight.1.args.known", "\"amax\"", "this pass has no such tensor" },
    { DELAYED, NULL, "passes.weight.1.args.known", "\"state_fresh\"", "another dtype" },
    { DELAYED, NULL, "passes.fprop.1.args.fresh", "\"state_amax\"", "another dtype" },
    { DELAYED, NULL, "passes.fprop.1.args.partials", "null", "it may not be null" },
    { DELAYED, NULL, "passes.fprop.1.args.scales", "\"state_scale\"", "smaller than what" },
    { DELAYED, NULL, "passes.fprop.1.args.amax", "\"w_scales\"", "does not fill that operand" },
    { DELAYED, NULL, "passes.fprop.0.args.when", "\"state_scale\"", "another dtype" },
    { DELAYED, NULL, "passes.quantize_dy.2.args.partial_rows", "4", "smaller than what" },
    { DELAYED, NULL, "passes.quantize_dy.2.args.partials", "null", "it may not be null" },
    { DELAYED, NULL, "passes.quantize_dy.2.args.cols", "200", "smaller than what" },
    { DELAYED, NULL, "passes.quantize_dy.1.args.dbias_partials", "null", NULL },
    { DELAYED, NULL, "passes.fprop.0", NULL, "no step before this one leaves them" },
    /* amaxes that are given */
    { DELAYED, NULL, "given.dy.0.args.source", "\"x\"", "this pass has no such tensor" },
    { DELAYED, NULL, "given.w.0.args.row", "null", "no step writes w_row" },
    { DELAYED, NULL, "given.x", NULL, "'x' is missing" },
    { DELAYED, NULL, "given.dy.1", NULL, "no step writes dbias" },
    { ROWWISE, NULL, "given", "{\"x\": [], \"w\": [], \"dy\": []}", "tensor scaling only" },
    /* scales a row */
    { ROWWISE, "x_row_scales", "cols", "16", "not laid out as fp8.h says" },
    { ROWWISE, "x_row_scales", "cols", "{\"of\": \"M\", \"pad\": 8}", "not laid out" },
    { ROWWISE, "x_row_scales", "dtype", "\"bf16\"", "not laid out" },
    { ROWWISE, "x_row_scales", "part", "\"scales\"", "two buffers are the part 'scales'" },
    { ROWWISE, "w_transposed_scales", "cols", "64", "not laid out" },
    { ROWWISE, NULL, "passes.fprop.1.args.row_scales", "\"x_transposed_scales\"", "smaller than" },
    { ROWWISE, NULL, "passes.fprop.1.args.row_scales", "null", "no step writes x_row_scales" },
    { ROWWISE, NULL, "passes.fprop.0.args.column_partials_ld", "72", "not the ld of its buffer" },
    { ROWWISE, NULL, "passes.fprop.0.args.column_partials", "null", NULL },
    { ROWWISE, NULL, "passes.fprop.0.args.row_partials", "null", NULL },
    { ROWWISE, NULL, "passes.fprop.1.args.column_partials", "null", "what follows from it is not" },
    { ROWWISE, NULL, "passes.fprop.1.args.row_maxima", "null", "no step before this one" },
    { ROWWISE, NULL, "passes.fprop.2.args.row_maxima", "null", "it may not be null" },
    { ROWWISE, NULL, "passes.fprop.2.args.column_maxima", "\"x_row_maxima\"", "smaller than what" },
    { ROWWISE, NULL, "passes.quantize_dy.1.args.dbias_partials", "null", "but dbias is not" },
    { ROWWISE, NULL, "passes.fprop.2.args.transposed_rows", "16",
      "less than the rows of the copy" },
    { ROWWISE, NULL, "passes.fprop.3.args.a_scales", "\"x_scales\"", "not the scales of that" },
    { ROWWISE, NULL, "passes.fprop.3.args.b_scales", "\"w_transposed_scales\"", "not the scales" },
    { ROWWISE, NULL, "passes.fprop.3.a_scaling", "\"tensor\"", "not that of the recipe" },
    { ROWWISE, NULL, "passes.fprop.3.b_scaling", "\"block\"", "not that of the recipe" },
    { ROWWISE, NULL, "transpose", "\"store_bf16_bf16\"", "scales of their own" },
    { ROWWISE, NULL, "dequantize.e4m3_row", NULL, "'e4m3_row' names no kernel" },
    { ROWWISE, NULL, "recipe.name", "\"block\"", "not laid out" },
    /* blocks */
    { BLOCK, "x_row_scales", "rows", "2", "not laid out" },
    { BLOCK, "x_row_scales", "cols", "{\"of\": \"M\", \"pad\": 16}", "not laid out" },
    { BLOCK, "w_row_scales", "cols", "8", "not laid out" },
    { BLOCK, NULL, "passes.fprop.0.args.row_scales_ld", "8", "not the ld of its buffer" },
    { BLOCK, NULL, "passes.fprop.0.args.row_scales", "null", "no step writes x_row_scales" },
    { BLOCK, NULL, "passes.weight.0.args.transposed_scales", "\"w_row_scales\"", NULL },
    { BLOCK, NULL, "passes.fprop.1.args.a_scales_ld", "0", "not the ld of its buffer" },
    { BLOCK, NULL, "passes.fprop.1.args.b_scales_ld", "\"x_row_scales.ld\"", "not the ld" },
    { BLOCK, NULL, "passes.fprop.1.b_scaling", "\"block\"", "not that of the recipe" },
    { BLOCK, NULL, "passes.quantize_dy.0.args.dbias_partials", "null", "no step before this one" },
    /* tensors as factors */
    { HP, NULL, "passes.wgrad.0.args.a", "\"dy_row\"", "not what this pass reads" },
    { HP, NULL, "passes.wgrad.0.args.a", "\"x\"", "not what this pass reads" },
    { HP, NULL, "passes.wgrad.0.args.a_ld", "96", "not the ld of its buffer" },
    { HP, NULL, "passes.wgrad.0.a_transposed", "false", "whether it is transposed" },
    { HP, NULL, "passes.wgrad.0.b_scaling", "\"row\"", "one operand is bf16" },
    { HP, NULL, "passes.wgrad.0.a_dtype", "\"e4m3\"", "without a copy of FP8 it is bf16" },
    { HP, NULL, "passes.dgrad.0.b_scaling", "\"row\"", "not that of the recipe" },
    { HP, NULL, "passes.weight.1", NULL, "no step before this one leaves them" },
    { HP, "x_row", "part", "\"transposed\"", "operand x has no part 'row'" },
    { BF16, NULL, "compute", "\"fp8\"", "operand x has no part 'scales'" },
    { BF16, NULL, "passes.fprop.0.args.b", "\"x\"", "not what this pass reads" },
    { BF16, NULL, "passes.fprop.0.args.depth", "73", "smaller than what" },
    { BF16, NULL, "passes.fprop.0.b_transposed", "true", "whether it is transposed" },
    { BF16, NULL, "passes.dgrad.0.b_transposed", "false", "whether it is transposed" },
    { BF16, NULL, "passes.dgrad.0.args.b_scales", "\"dy.ld\"", "is no pointer" },
    { BF16, NULL, "passes.wgrad", "[]", "has no gemm" },
};

static fp8_context *host;
static char *folder;

static int set_up(void **state)
{
    (void)state;
    host = bundle_context(FP8_DEVICE_HOST);
    folder = bundle_folder();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bundle_remove(folder);
    fp8_context_destroy(host);
    return 0;
}

static int buffer_index(json_t *manifest, int layer, const char *name)
{
    char path[64];
    size_t index;
    json_t *buffer;
    snprintf(path, sizeof path, "layers.%d.buffers", layer);
    json_array_foreach(bundle_at(manifest, path), index, buffer)
    {
        if (strcmp(json_string_value(json_object_get(buffer, "name")), name) == 0)
            return (int)index;
    }
    fail_msg("no buffer %s", name);
    return -1;
}

static fp8_status open_lie(json_t *whole, const struct lie *lie)
{
    char path[160];
    json_t *manifest = json_deep_copy(whole);
    json_t *value = lie->value ? json_loads(lie->value, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(!lie->value || value);
    if (lie->buffer)
        snprintf(path, sizeof path, "layers.%d.buffers.%d.%s", lie->layer,
                 buffer_index(manifest, lie->layer, lie->buffer), lie->path);
    else
        snprintf(path, sizeof path, "layers.%d.%s", lie->layer, lie->path);
    bundle_set(manifest, path, value);
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    json_decref(manifest);
    fp8_bundle *bundle;
    fp8_status status = fp8_bundle_open(host, folder, &bundle);
    fp8_bundle_close(bundle);
    return status;
}

/* sentence NULL: several checks may be the first to see it. */
static void lies_are_refused(void **state)
{
    (void)state;
    json_t *whole = bundle_manifest_of(bundle_recipes, "cublaslt");
    int wrong = 0;
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        const struct lie *lie = &lies[i];
        fp8_status status = open_lie(whole, lie);
        bool good =
            status == FP8_ERR_BUNDLE && (!lie->sentence || strstr(fp8_last_error(), lie->sentence));
        if (!good) {
            print_error("%s%s%s = %s: %s: %s\n", lie->buffer ? lie->buffer : "",
                        lie->buffer ? "." : "", lie->path, lie->value, fp8_status_name(status),
                        status ? fp8_last_error() : "opened");
            wrong++;
        }
    }
    json_decref(whole);
    assert_int_equal(wrong, 0);
}

/* ---- memory ---- */

static void write_whole(bool with_arch)
{
    json_t *manifest = bundle_manifest_of(bundle_recipes, "cublaslt");
    if (with_arch)
        bundle_add_arch(manifest, folder, "sm_90a");
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    json_decref(manifest);
}

/* The n-th allocation of everything that a state does fails, for every n. */
static void fail_each(fp8_context *context)
{
    fp8_bundle *bundle;
    fp8_layer *layer;
    fp8_state *made = NULL;
    unsigned char data[1024];
    size_t bytes = 0;
    EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
    EXPECT_OK(fp8_layer_create(bundle, "delayed", &layer));
    const fp8_layer *const list[] = { layer, layer };
    fp8_status status = FP8_ERR_MEMORY;
    int n = 0;
    while (status != FP8_OK) {
        (void)fp8_allocation_fail_at(++n);
        status = fp8_state_create(list, 2, &made);
        (void)fp8_allocation_fail_at(0);
        assert_true(status == FP8_OK || status == FP8_ERR_MEMORY);
        assert_true((made == NULL) == (status != FP8_OK));
    }
    assert_true(n > 3);
    EXPECT_OK(fp8_state_bytes(made, &bytes));
    assert_true(bytes <= sizeof data);
    (void)fp8_allocation_fail_at(1);
    EXPECT_REFUSED(FP8_ERR_MEMORY, "memory", fp8_state_save(made, data, bytes, NULL));
    (void)fp8_allocation_fail_at(0);
    EXPECT_OK(fp8_state_save(made, data, bytes, NULL));
    (void)fp8_allocation_fail_at(1);
    EXPECT_REFUSED(FP8_ERR_MEMORY, "memory", fp8_state_load(made, data, bytes, NULL));
    (void)fp8_allocation_fail_at(0);
    EXPECT_OK(fp8_state_load(made, data, bytes, NULL));
    fp8_state_destroy(made);
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
}

static void states_on_the_host(void **state)
{
    (void)state;
    write_whole(false);
    fail_each(host);
}

static void states_on_a_gpu(void **state)
{
    (void)state;
    struct fake_cuda *cuda = bundle_fake_cuda();
    (void)bundle_fake_lt();
    write_whole(true);
    fp8_context *context = bundle_context(0);
    fail_each(context);
    fp8_context_destroy(context);
    assert_int_equal(cuda->live, 0);
    assert_int_equal(cuda->misuse, 0);
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    fp8_bundle *bundle;
    fp8_layer *layer;
    fp8_state *made;
    write_whole(false);
    EXPECT_OK(fp8_bundle_open(host, folder, &bundle));
    EXPECT_OK(fp8_layer_create(bundle, "delayed", &layer));
    EXPECT_OK(fp8_state_create((const fp8_layer *const[]){ layer }, 1, &made));
    (void)fp8_allocation_fail_at(1);
    EXPECT_OK(fp8_state_advance(made, NULL));
    assert_int_equal(fp8_allocation_fail_at(0), 0);
    fp8_state_view view = { .size = sizeof view };
    EXPECT_OK(fp8_state_describe(made, &view));
    assert_int_equal(view.tensors, 3);
    assert_int_equal(view.history_length, 4);
    assert_true(view.scale[2] == 1.0f && view.running[0] == -1.0f && view.counts[1] == 0);
    view.size = 1;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "view->size is 1", fp8_state_describe(made, &view));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "state is NULL", fp8_state_advance(NULL, NULL));
    fp8_state_destroy(made);
    fp8_state_destroy(NULL);
    fp8_layer_destroy(layer);
    EXPECT_OK(fp8_layer_create(bundle, "block", &layer));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "block, which keeps no state",
                   fp8_state_create((const fp8_layer *const[]){ layer }, 1, &made));
    assert_null(made);
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lies_are_refused),
        cmocka_unit_test(states_on_the_host),
        cmocka_unit_test(states_on_a_gpu),
        cmocka_unit_test(a_step_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
