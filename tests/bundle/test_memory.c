/*
 * test_memory.c - the n-th allocation fails, for every n, in everything that allocates.
 *
 * Creation reports FP8_ERR_MEMORY, leaves NULL and leaks nothing (the sanitizer looks); the passes
 * of a layer allocate nothing at all.
 */
#include "tests/bundle/bundle_rig.h"

#include "runtime/bundle_format.h"

struct objects {
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_layer *layer;
    fp8_event *event;
    void *memory;
};

static fp8_status create(struct objects *o, int32_t device, const char *folder)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = device;
    options.threads = 2;
    memset(o, 0, sizeof *o);
    fp8_status status = fp8_context_create(&options, &o->context);
    if (status == FP8_OK)
        status = fp8_bundle_open(o->context, folder, &o->bundle);
    if (status == FP8_OK)
        status = fp8_layer_create(o->bundle, "bias", &o->layer);
    if (status == FP8_OK)
        status = fp8_event_create(o->context, &o->event);
    if (status == FP8_OK)
        status = fp8_memory_alloc(o->context, 100, &o->memory);
    return status;
}

static void destroy(struct objects *o)
{
    fp8_memory_free(o->context, o->memory);
    fp8_event_destroy(o->event);
    fp8_layer_destroy(o->layer);
    fp8_bundle_close(o->bundle);
    fp8_context_destroy(o->context);
}

static char *write_bundle(void)
{
    char *folder = bundle_folder();
    json_t *manifest = bundle_manifest();
    bundle_add_arch(manifest, folder, "sm_90a");
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    json_decref(manifest);
    return folder;
}

static void fail_each(int32_t device)
{
    char *folder = write_bundle();
    struct objects o;
    fp8_status status = FP8_ERR_MEMORY;
    int64_t n = 0;
    while (status != FP8_OK) {
        (void)fp8_allocation_fail_at(++n);
        status = create(&o, device, folder);
        (void)fp8_allocation_fail_at(0);
        if (status != FP8_OK) {
            assert_int_equal(status, FP8_ERR_MEMORY);
            assert_non_null(strstr(fp8_last_error(), "memory"));
        }
        destroy(&o);
    }
    assert_true(n > 8);
    bundle_remove(folder);
}

static void creation_on_the_host(void **state)
{
    (void)state;
    fail_each(FP8_DEVICE_HOST);
}

static void creation_on_a_gpu(void **state)
{
    (void)state;
    struct fake_cuda *cuda = bundle_fake_cuda();
    struct fake_lt *lt = bundle_fake_lt();
    fail_each(0);
    assert_int_equal(cuda->live, 0);
    assert_int_equal(lt->live, 0);
}

/* ---- jansson's own allocations ---- */

static int64_t jansson_left;

static void *failing_malloc(size_t size)
{
    return --jansson_left == 0 ? NULL : malloc(size);
}

static void reading_a_manifest(void **state)
{
    (void)state;
    char *folder = write_bundle();
    fp8_context *context = bundle_context(FP8_DEVICE_HOST);
    fp8_status status = FP8_ERR_MEMORY;
    for (int64_t n = 1; status != FP8_OK; n += n < 200 ? 1 : 101) {
        fp8_bundle *bundle;
        json_set_alloc_funcs(failing_malloc, free);
        jansson_left = n;
        status = fp8_bundle_open(context, folder, &bundle);
        json_set_alloc_funcs(malloc, free);
        if (status != FP8_OK)
            assert_true(status == FP8_ERR_MEMORY || status == FP8_ERR_BUNDLE);
        if (jansson_left > 0)
            assert_int_equal(status, FP8_OK);
        fp8_bundle_close(bundle);
    }
    fp8_context_destroy(context);
    bundle_remove(folder);
}

/* ---- passes ---- */

static void passes_allocate_nothing(void **state)
{
    (void)state;
    char *folder = write_bundle();
    struct objects o;
    EXPECT_OK(create(&o, FP8_DEVICE_HOST, folder));
    static uint16_t x[20 * 50], w[37 * 50], y[20 * 37], bias[37];
    const fp8_tensor tx = { x, 20, 50, 50, FP8_DTYPE_BF16, 0 },
                     tw = { w, 37, 50, 50, FP8_DTYPE_BF16, 0 };
    const fp8_tensor ty = { y, 20, 37, 37, FP8_DTYPE_BF16, 0 },
                     tb = { bias, 1, 37, 37, FP8_DTYPE_BF16, 0 };
    fp8_operand weight = FP8_OPERAND_INIT;
    fp8_call call = FP8_CALL_INIT;
    EXPECT_OK(fp8_layer_bytes(o.layer, 20, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    EXPECT_OK(fp8_memory_alloc(o.context, call.workspace_bytes, &call.workspace));
    EXPECT_OK(fp8_layer_bytes(o.layer, 0, FP8_BYTES_WEIGHT, &weight.bytes));
    EXPECT_OK(fp8_memory_alloc(o.context, weight.bytes, &weight.data));
    (void)fp8_allocation_fail_at(1);
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &tw, update.version = 1, update.weight = &weight, update.call = call;
    EXPECT_OK(fp8_weight_update(o.layer, &update));
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &tx, fprop.weight = &weight, fprop.bias = &tb, fprop.y = &ty, fprop.call = call;
    EXPECT_OK(fp8_layer_fprop(o.layer, &fprop));
    assert_int_equal(fp8_allocation_fail_at(0), 0);
    fp8_memory_free(o.context, call.workspace);
    fp8_memory_free(o.context, weight.data);
    destroy(&o);
    bundle_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(creation_on_the_host),
        cmocka_unit_test(creation_on_a_gpu),
        cmocka_unit_test(reading_a_manifest),
        cmocka_unit_test(passes_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
