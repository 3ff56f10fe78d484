/*
 * test_cuda.c - the CUDA path without a GPU: every pass on the fake driver gives the host context's
 * bits, whatever the alignment, the stage, the order of a kernel's arguments or the algorithm that
 * is taken.
 */
#include "tests/bundle/cuda_rig.h"

static struct fake_cuda *cuda;
static struct fake_lt *lt;

static void every_layer_gives_the_bits_of_the_host(void **state)
{
    (void)state;
    static const char *const layers[] = { "plain", "bias", "wide", "e4m3", "half" };
    for (int i = 0; i < 5; i++)
        cuda_run_shapes(bundle_manifest(), layers[i]);
}

static int find_buffer(json_t *manifest, const char *name)
{
    size_t index;
    json_t *buffer;
    json_array_foreach(bundle_at(manifest, "layers.1.buffers"), index, buffer)
    {
        if (strcmp(json_string_value(json_object_get(buffer, "name")), name) == 0)
            return (int)index;
    }
    return -1;
}

static void small_stages_are_filled_in_chunks(void **state)
{
    (void)state;
    static const char *const stages[] = { "y_stage", "dx_stage", "dw_stage" };
    for (int rows = 1; rows <= 5; rows += 4) {
        json_t *manifest = bundle_manifest();
        for (int i = 0; i < 3; i++) {
            char path[80];
            snprintf(path, sizeof path, "layers.1.buffers.%d.rows",
                     find_buffer(manifest, stages[i]));
            bundle_set(manifest, path,
                       i < 2 ? json_pack("{s:s, s:i}", "of", "M", "max", rows)
                             : json_integer(rows));
        }
        cuda_run_shapes(manifest, "bias");
    }
}

/* Kernels may take their arguments in any order, and need not take all. */
static void arguments_are_packed_by_name(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest();
    size_t index;
    json_t *kernel;
    json_array_foreach(bundle_at(manifest, "kernels"), index, kernel)
    {
        json_t *args = json_object_get(kernel, "args"), *turned = json_array();
        for (size_t i = json_array_size(args); i-- > 0;)
            json_array_append(turned, json_array_get(args, i));
        json_object_set_new(kernel, "args", turned);
    }
    cuda_run_shapes(manifest, "bias");
}

/* ---- the choice of algorithms ---- */

static void run_once(const struct side *host, const struct side *device, int64_t tokens)
{
    cuda_compare(host, device, (struct shape){ tokens, 0, 0, true });
}

static void a_refusing_algorithm_is_passed_over(void **state)
{
    (void)state;
    char *folder = cuda_bundle(bundle_manifest());
    struct side host = cuda_open(FP8_DEVICE_HOST, folder, "bias");
    struct side device = cuda_open(0, folder, "bias");
    lt->refusing = 2;
    lt->refusals = 0;
    int64_t queries = lt->queries;
    run_once(&host, &device, 40);
    assert_int_equal(lt->last_algorithm, 2);
    assert_true(lt->refusals > 0);
    assert_int_equal(lt->queries, queries);
    lt->refusals = 0;
    run_once(&host, &device, 40); /* the good ones are remembered */
    assert_int_equal(lt->refusals, 0);
    lt->refusing = 3; /* all that were offered at creation, and then some */
    lt->offered = 5;
    run_once(&host, &device, 40);
    assert_int_equal(lt->last_algorithm, 3);
    assert_true(lt->queries > queries);
    lt->refusing = 100;
    fp8_operand weight = cuda_operand(&device, 0, FP8_BYTES_WEIGHT);
    fp8_operand grad = cuda_operand(&device, 4, FP8_BYTES_GRAD);
    struct matrix w = cuda_tensor(37, 50, 50, FP8_DTYPE_BF16, 0),
                  dy = cuda_tensor(4, 37, 37, FP8_DTYPE_BF16, 0);
    struct matrix dx = cuda_tensor(4, 50, 50, FP8_DTYPE_BF16, 0);
    char *workspace;
    fp8_call call = cuda_call(&device, 4, &workspace, 0);
    fp8_quantize_args quantize = FP8_QUANTIZE_ARGS_INIT;
    quantize.role = FP8_ROLE_W, quantize.source = &w.tensor, quantize.operand = &weight;
    quantize.call = call;
    EXPECT_OK(fp8_quantize(device.layer, &quantize));
    quantize.role = FP8_ROLE_DY, quantize.source = &dy.tensor, quantize.operand = &grad;
    EXPECT_OK(fp8_quantize(device.layer, &quantize));
    fp8_dgrad_args dgrad = FP8_DGRAD_ARGS_INIT;
    dgrad.grad = &grad, dgrad.weight = &weight, dgrad.dx = &dx.tensor, dgrad.call = call;
    EXPECT_REFUSED(FP8_ERR_CUBLASLT, "CUBLAS_STATUS_NOT_SUPPORTED",
                   fp8_layer_dgrad(device.layer, &dgrad));
    lt->refusing = 0;
    lt->offered = 3;
    EXPECT_OK(fp8_layer_dgrad(device.layer, &dgrad));
    free(weight.data), free(grad.data), free(w.block), free(dy.block), free(dx.block),
        free(workspace);
    cuda_close(&device);
    cuda_close(&host);
    bundle_remove(folder);
}

static void a_layer_without_algorithms_is_refused_at_creation(void **state)
{
    (void)state;
    char *folder = cuda_bundle(bundle_manifest());
    struct side device = cuda_open(0, folder, "plain");
    fp8_layer *layer;
    lt->no_algorithm = true;
    EXPECT_REFUSED(FP8_ERR_CUBLASLT, "offers no algorithm",
                   fp8_layer_create(device.bundle, "bias", &layer));
    assert_null(layer);
    lt->no_algorithm = false;
    cuda_close(&device);
    bundle_remove(folder);
}

/* Where the library adds no bias at all, the store of the stage does. */
static void a_library_without_bias_gives_the_same_bits(void **state)
{
    (void)state;
    lt->no_bias = true;
    cuda_run_shapes(bundle_manifest(), "bias");
    lt->no_bias = false;
}

static int lines;
static void count_line(void *user, fp8_log_level level, const char *message)
{
    (void)user;
    assert_true(level == FP8_LOG_DISPATCH);
    assert_non_null(strstr(message, "layer 'bias'"));
    lines++;
}

static void dispatch_is_told(void **state)
{
    (void)state;
    char *folder = cuda_bundle(bundle_manifest());
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.log = count_line;
    options.log_levels = 1u << FP8_LOG_DISPATCH;
    options.max_sms = 20;
    struct side side;
    EXPECT_OK(fp8_context_create(&options, &side.context));
    EXPECT_OK(fp8_bundle_open(side.context, folder, &side.bundle));
    EXPECT_OK(fp8_layer_create(side.bundle, "bias", &side.layer));
    assert_true(lines > 10);
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        EXPECT_OK(fp8_layer_dispatch(side.layer, (fp8_pass)pass, 40, &dispatch));
        bool quantises_alone = pass == FP8_PASS_WEIGHT || pass == FP8_PASS_QUANTIZE_DY;
        assert_true(dispatch.launches >= (quantises_alone ? 1u : 2u));
        assert_true(strlen(dispatch.kernel) > 4 && strlen(dispatch.dtype) > 4 &&
                    strlen(dispatch.reason) > 4);
        bool gemm = pass == FP8_PASS_FPROP || pass == FP8_PASS_DGRAD || pass == FP8_PASS_WGRAD;
        assert_string_equal(dispatch.backend, gemm ? "cublaslt" : "quantize");
        if (gemm)
            assert_non_null(strstr(dispatch.kernel, "cublaslt algo 0"));
    }
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    EXPECT_REFUSED(FP8_ERR_TOKENS, "max_tokens = 300",
                   fp8_layer_dispatch(side.layer, FP8_PASS_FPROP, 301, &dispatch));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "pass is 5",
                   fp8_layer_dispatch(side.layer, FP8_PASS_COUNT, 3, &dispatch));
    struct outputs out;
    cuda_run_all(&side, (struct shape){ 300, 0, 0, false }, &out);
    assert_true(cuda->last_grid <= 20 * 8);
    free(out.y.block), free(out.dx.block), free(out.dw.block), free(out.dbias.block),
        free(out.x32.block);
    cuda_close(&side);
    bundle_remove(folder);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    lt = bundle_fake_lt();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layer_gives_the_bits_of_the_host),
        cmocka_unit_test(small_stages_are_filled_in_chunks),
        cmocka_unit_test(arguments_are_packed_by_name),
        cmocka_unit_test(a_refusing_algorithm_is_passed_over),
        cmocka_unit_test(a_layer_without_algorithms_is_refused_at_creation),
        cmocka_unit_test(a_library_without_bias_gives_the_same_bits),
        cmocka_unit_test(dispatch_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
