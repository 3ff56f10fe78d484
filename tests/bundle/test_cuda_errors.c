/*
 * test_cuda_errors.c - what fails on a GPU: each call of the driver in turn, devices that are not
 * there, cubins with other parameters. Nothing leaks, nothing is claimed, the next call works.
 */
#include "tests/bundle/cuda_rig.h"

static struct fake_cuda *cuda;
static struct fake_lt *lt;

/* ---- errors of the driver ---- */

static void prepared_pass(const struct side *side, fp8_weight_args *update, fp8_fprop_args *fprop,
                          fp8_backward_args *backward)
{
    fp8_status status = fp8_weight_update(side->layer, update);
    if (status != FP8_OK) {
        assert_int_equal(update->weight->role, FP8_ROLE_NONE);
        assert_int_equal(update->weight->version, 0);
        assert_int_equal(update->weight->copies, 0);
        return;
    }
    status = fp8_layer_fprop(side->layer, fprop);
    if (status != FP8_OK) {
        assert_int_equal(fprop->saved->role, FP8_ROLE_NONE);
        assert_int_equal(fprop->saved->copies, 0);
        return;
    }
    status = fp8_layer_backward(side->layer, backward);
    if (status != FP8_OK) {
        assert_int_equal(backward->grad->role, FP8_ROLE_NONE);
        assert_int_equal(backward->grad->copies, 0);
    }
}

static void fail_each_call_of_a_pass(const char *gemm)
{
    char *folder = cuda_bundle(bundle_manifest_by(gemm));
    struct side side = cuda_open(0, folder, "bias");
    struct matrix x = cuda_tensor(17, 50, 50, FP8_DTYPE_BF16, 1),
                  w = cuda_tensor(37, 50, 50, FP8_DTYPE_BF16, 1);
    struct matrix y = cuda_tensor(17, 37, 37, FP8_DTYPE_BF16, 1),
                  dy = cuda_tensor(17, 37, 37, FP8_DTYPE_BF16, 1);
    struct matrix dx = cuda_tensor(17, 50, 50, FP8_DTYPE_BF16, 1),
                  dw = cuda_tensor(37, 50, 50, FP8_DTYPE_FP32, 1);
    struct matrix bias = cuda_tensor(1, 37, 37, FP8_DTYPE_BF16, 1);
    cuda_fill(&x), cuda_fill(&w), cuda_fill(&dy), cuda_fill(&bias);
    char *workspace;
    fp8_call call = cuda_call(&side, 17, &workspace, 0);
    int64_t failures = 0;
    fp8_operand weight = cuda_operand(&side, 0, FP8_BYTES_WEIGHT);
    fp8_operand saved = cuda_operand(&side, 17, FP8_BYTES_SAVED);
    fp8_operand grad = cuda_operand(&side, 17, FP8_BYTES_GRAD);
    for (int64_t at = 1; at < 60; at++) { /* from the second on all three were filled before */
        fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
        update.w = &w.tensor, update.weight = &weight, update.call = call;
        update.version = 2 * (uint64_t)at;
        fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
        fprop.x = &x.tensor, fprop.weight = &weight, fprop.y = &y.tensor, fprop.saved = &saved;
        fprop.bias = &bias.tensor, fprop.call = call;
        fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
        backward.dy = &dy.tensor, backward.saved = &saved, backward.weight = &weight;
        backward.grad = &grad, backward.dw = &dw.tensor, backward.dx = &dx.tensor,
        backward.call = call;
        cuda->fail_code = 719; /* CUDA_ERROR_LAUNCH_FAILED */
        cuda->fail_at = cuda->calls + at;
        int64_t end = cuda->fail_at;
        prepared_pass(&side, &update, &fprop, &backward);
        failures += cuda->calls >= end;
        cuda->fail_at = 0;
        assert_int_equal(cuda->depth, 0);
        update.version++;
        prepared_pass(&side, &update, &fprop, &backward); /* the layer is usable again */
        assert_int_equal(grad.role, FP8_ROLE_DY);
        assert_int_equal(grad.version, update.version);
    }
    free(weight.data), free(saved.data), free(grad.data);
    assert_true(failures > 6);
    free(x.block), free(w.block), free(y.block), free(dy.block), free(dx.block), free(dw.block);
    free(bias.block), free(workspace);
    cuda_close(&side);
    bundle_remove(folder);
}

static void a_failing_pass_claims_nothing(void **state)
{
    (void)state;
    fail_each_call_of_a_pass("cublaslt");
    fail_each_call_of_a_pass("generated");
}

static void every_failing_call_of_creation_is_survived(void **state)
{
    (void)state;
    char *folder = cuda_bundle(bundle_manifest_by("generated"));
    bool done = false;
    for (int64_t at = 1; !done; at++) {
        fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
        fp8_context *context;
        fp8_bundle *bundle = NULL;
        fp8_layer *layer = NULL;
        fp8_event *event = NULL;
        fp8_stream stream = NULL;
        void *memory = NULL;
        cuda->fail_code = at % 2 ? 2 : 719; /* out of memory, or a failed launch */
        cuda->fail_at = cuda->calls + at;
        fp8_status status = fp8_context_create(&options, &context);
        if (status == FP8_OK)
            status = fp8_bundle_open(context, folder, &bundle);
        if (status == FP8_OK)
            status = fp8_layer_create(bundle, "bias", &layer);
        if (status == FP8_OK)
            status = fp8_memory_alloc(context, 100, &memory);
        if (status == FP8_OK)
            status = fp8_memory_fill(context, memory, 1, 100, NULL);
        if (status == FP8_OK)
            status = fp8_memory_copy(context, memory, memory, 100, NULL);
        if (status == FP8_OK)
            status = fp8_stream_create(context, &stream);
        if (status == FP8_OK)
            status = fp8_event_create(context, &event);
        if (status == FP8_OK)
            status = fp8_event_record(event, stream);
        double seconds;
        if (status == FP8_OK)
            status = fp8_event_seconds(event, event, &seconds);
        if (status == FP8_OK)
            status = fp8_stream_synchronize(context, stream);
        done = status == FP8_OK && cuda->calls < cuda->fail_at;
        if (status != FP8_OK) {
            assert_true(status == FP8_ERR_CUDA || status == FP8_ERR_MEMORY);
            assert_non_null(strstr(fp8_last_error(), "CUDA_ERROR"));
        }
        cuda->fail_at = 0;
        fp8_event_destroy(event);
        fp8_stream_destroy(context, stream);
        fp8_memory_free(context, memory);
        fp8_layer_destroy(layer);
        fp8_bundle_close(bundle);
        fp8_context_destroy(context);
        assert_int_equal(cuda->live, 0);
        assert_int_equal(cuda->depth, 0);
        assert_int_equal(lt->live, 0);
    }
    bundle_remove(folder);
}

/* ---- devices ---- */

static void devices_that_are_not_there(void **state)
{
    (void)state;
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    options.device = 1;
    EXPECT_REFUSED(FP8_ERR_DEVICE, "device is 1, but this process sees 1 device",
                   fp8_context_create(&options, &context));
    assert_null(context);
    options.device = -2;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "device is -2", fp8_context_create(&options, &context));
    options.device = 0;
    options.max_sms = -1;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "max_sms is -1", fp8_context_create(&options, &context));
    options.size = 3;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "size is 3", fp8_context_create(&options, &context));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "context is NULL", fp8_context_create(NULL, NULL));
    EXPECT_OK(fp8_context_create(NULL, &context));
    fp8_device_info info = { .size = sizeof info };
    EXPECT_OK(fp8_context_info(context, &info));
    assert_int_equal(info.arch, 90);
    assert_int_equal(info.sms, 132);
    assert_int_equal(info.driver_version, 13000);
    assert_int_equal(info.cublaslt_version, 130100);
    fp8_context_destroy(context);
}

static size_t four_parameters(const char *entry, size_t index)
{
    (void)entry;
    return index < 4 ? 8 : 0;
}

static size_t small_parameters(const char *entry, size_t index)
{
    (void)entry, (void)index;
    return 4;
}

static void a_parameter_list_that_does_not_match_is_refused(void **state)
{
    (void)state;
    char *folder = cuda_bundle(bundle_manifest());
    fp8_context *context = bundle_context(0);
    fp8_bundle *bundle;
    cuda->parameter = four_parameters;
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "lists 10 parameters, but the cubin takes fewer",
                   fp8_bundle_open(context, folder, &bundle));
    cuda->parameter = small_parameters;
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "parameter 0 of the cubin has 4 bytes",
                   fp8_bundle_open(context, folder, &bundle));
    cuda->parameter = NULL;
    EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    assert_int_equal(cuda->live, 0);
    bundle_remove(folder);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    lt = bundle_fake_lt();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_that_are_not_there),
        cmocka_unit_test(a_failing_pass_claims_nothing),
        cmocka_unit_test(every_failing_call_of_creation_is_survived),
        cmocka_unit_test(a_parameter_list_that_does_not_match_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
