/*
 * test_scaled.c - products with scales by row and by block, and of bf16, through the fake cuBLASLt:
 * the bits of the host at any M and alignment, in place, through the stage, in chunks; with a bias
 * and of dtypes that the library refuses.
 *
 * The library works out from a product's extents where scales lie, and the fake does the same: rows
 * of a block product that are not padded, or scales of a chunk that are not moved, give other bits.
 */
#include "tests/bundle/cuda_rig.h"

static struct fake_lt *lt;

static json_t *manifest_over(int ranks, const char *fields)
{
    char spec[2048];
    snprintf(spec, sizeof spec,
             "return model \"scaled\" { tokens = 300, max_tokens = 400, mesh = { fsdp = %d }, "
             "layers = {\n"
             "linear \"odd\" { out_features = 37, in_features = 50, bias = true, %s },\n"
             "linear \"even\" { out_features = 136, in_features = 272, %s },\n"
             "linear \"half\" { out_features = 264, in_features = 40, grad_weight = \"bf16\",\n"
             "  output = \"fp32\", grad_input = \"fp32\", bias = true, %s },\n"
             "linear \"thin\" { out_features = 1, in_features = 80, bias = true, %s },\n"
             "linear \"fp16\" { out_features = 48, in_features = 56, grad_weight = \"fp16\",\n"
             "  output = \"fp16\", grad_input = \"fp16\", bias = true, %s } } }\n",
             ranks, fields, fields, fields, fields, fields);
    return bundle_manifest_of(spec, "cublaslt");
}

static json_t *manifest_of(const char *fields)
{
    return manifest_over(1, fields);
}

static void run_all(const char *fields)
{
    static const char *const layers[] = { "odd", "even", "half", "thin", "fp16" };
    for (int i = 0; i < 5; i++)
        cuda_run_shapes(manifest_of(fields), layers[i]);
}

static void count_anew(void)
{
    lt->products = lt->by_block = lt->unscaled = lt->of_bf16 = 0;
}

/* The library gets no scales: the store applies them. */
static void scales_by_row(void **state)
{
    (void)state;
    count_anew();
    run_all("recipe = recipe.rowwise { power_of_two = true }");
    assert_true(lt->products > 0);
    assert_int_equal(lt->unscaled, lt->products);
}

static void scales_by_block(void **state)
{
    (void)state;
    count_anew();
    run_all("recipe = recipe.block { power_of_two = true }");
    assert_true(lt->products > 0);
    assert_int_equal(lt->by_block, lt->products);
}

/* The store takes the tensor's one scale for every column; wgrad is of bf16. */
static void one_scale_beside_scales_by_row(void **state)
{
    (void)state;
    count_anew();
    run_all("recipe = recipe.rowwise_hp_wgrad { power_of_two = true }");
    assert_true(lt->unscaled > 0 && lt->of_bf16 > 0);
    assert_int_equal(lt->unscaled + lt->of_bf16, lt->products);
}

static const char by_shard[] = "recipe = recipe.current { weight_scale = \"shard\" }";

/* y by the library without scales, which the store applies, x's one and those of w's rows; dx by
 * the generated kernel, dw by the library with its own. */
static void scales_by_shard(void **state)
{
    (void)state;
    static const char *const layers[] = { "odd", "even", "half" };
    count_anew();
    for (int i = 0; i < 3; i++)
        cuda_run_shapes(manifest_over(2, by_shard), layers[i]);
    assert_true(lt->unscaled > 0 && lt->unscaled < lt->products);
    assert_int_equal(lt->by_block, 0);
}

/* Without a generated kernel for the GPU there is nothing that multiplies such a w in dgrad. */
static void scales_by_shard_need_a_generated_kernel(void **state)
{
    (void)state;
    fp8_bundle *bundle;
    fp8_layer *layer = NULL;
    json_t *manifest = manifest_over(2, by_shard), *range;
    size_t index;
    json_array_foreach(bundle_at(manifest, "layers.1.passes.dgrad.0.dispatch"), index, range)
        json_array_remove(json_object_get(range, "choices"), 0);
    char *folder = cuda_bundle(manifest);
    fp8_context *context = bundle_context(0);
    EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
    EXPECT_REFUSED(FP8_ERR_CUBLASLT, "weight_scale = \"tensor\"",
                   fp8_layer_create(bundle, "even", &layer));
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    bundle_remove(folder);
}

static void products_of_bf16(void **state)
{
    (void)state;
    count_anew();
    run_all("compute = \"bf16\"");
    assert_true(lt->products > 0);
    assert_int_equal(lt->of_bf16, lt->products);
}

/* Stages of 8 rows: each chunk of a block product needs its part of the scales moved together. */
static void small_stages_move_the_scales(void **state)
{
    (void)state;
    static const char *const fields[] = { "recipe = recipe.block { power_of_two = true }",
                                          "recipe = recipe.rowwise { power_of_two = true }" };
    for (int f = 0; f < 2; f++) {
        json_t *manifest = manifest_of(fields[f]);
        size_t index;
        json_t *buffer;
        json_array_foreach(bundle_at(manifest, "layers.0.buffers"), index, buffer)
        {
            const char *name = json_string_value(json_object_get(buffer, "name"));
            if (strstr(name, "_stage") && strcmp(name, "bias_stage") != 0)
                json_object_set_new(buffer, "rows", json_integer(8));
        }
        cuda_run_shapes(manifest, "odd");
    }
}

/* A library that does not know the scales of blocks is refused with its version when the layer is
 * made; of scales by row it need not know. */
static void an_older_library_has_no_blocks(void **state)
{
    (void)state;
    static const char *const fields[] = { "recipe = recipe.block {}",
                                          "recipe = recipe.rowwise {}" };
    for (int f = 0; f < 2; f++) {
        char *folder = cuda_bundle(manifest_of(fields[f]));
        fp8_bundle *bundle;
        fp8_layer *layer = NULL;
        lt->version = 120804; /* a context reads it once */
        fp8_context *context = bundle_context(0);
        EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
        if (f == 0) {
            EXPECT_REFUSED(FP8_ERR_CUBLASLT, "120804", fp8_layer_create(bundle, "even", &layer));
            EXPECT_REFUSED(FP8_ERR_CUBLASLT, "12.9", fp8_layer_create(bundle, "even", &layer));
        } else {
            EXPECT_OK(fp8_layer_create(bundle, "even", &layer));
            fp8_layer_destroy(layer);
        }
        lt->version = FAKE_LT_VERSION;
        fp8_bundle_close(bundle);
        fp8_context_destroy(context);
        bundle_remove(folder);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scales_by_row),
        cmocka_unit_test(scales_by_block),
        cmocka_unit_test(one_scale_beside_scales_by_row),
        cmocka_unit_test(scales_by_shard),
        cmocka_unit_test(scales_by_shard_need_a_generated_kernel),
        cmocka_unit_test(products_of_bf16),
        cmocka_unit_test(small_stages_move_the_scales),
        cmocka_unit_test(an_older_library_has_no_blocks),
    };
    bundle_fake_cuda();
    lt = bundle_fake_lt();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
