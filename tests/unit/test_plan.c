/*
 * test_plan.c - what a plan must be whatever the spec: complete, consistent, minimal,
 * deterministic.
 *
 * The exact text of some plans is in tests/golden. Here every plan is walked by the rules of
 * runtime/bundle_format.h (plan_rules.c), and each field of a spec is flipped once. What recipes
 * mean for a plan is test_recipes.c's subject.
 */
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include "tests/unit/plan_rules.h"

#define ONE_LAYER "in_features = 1000, out_features = 2556, bias = true, "

/* ---- tests ----------------------------------------------------------------------------------- */

static const char *const variants[] = {
    ONE_LAYER,
    ONE_LAYER "weight = \"fp32\"",
    ONE_LAYER "output = \"fp32\", grad_input = \"fp32\", grad_weight = \"bf16\"",
    ONE_LAYER "recipe = recipe.current { format = \"e4m3\" }",
    ONE_LAYER "recipe = recipe.current { power_of_two = true }",
    ONE_LAYER "accumulation = { fprop = \"split\", dgrad = \"fast\", wgrad = \"fast\" }",
    ONE_LAYER "tokens = 17, max_tokens = 18",
    ONE_LAYER "count = 7",
    ONE_LAYER "output = \"fp16\", grad_input = \"fp16\", grad_weight = \"fp16\"",
    ONE_LAYER "compute = \"bf16\"",
    ONE_LAYER "recipe = recipe.delayed {}",
    ONE_LAYER "recipe = recipe.delayed { format = \"e4m3\" }",
    ONE_LAYER "recipe = recipe.delayed { power_of_two = true }",
    ONE_LAYER "recipe = recipe.delayed { history_length = 16 }",
    ONE_LAYER "recipe = recipe.delayed { algo = \"most_recent\" }",
    ONE_LAYER "recipe = recipe.delayed { margin = 1 }",
    ONE_LAYER "recipe = recipe.delayed { calibrate = true }",
    ONE_LAYER "recipe = recipe.rowwise {}",
    ONE_LAYER "recipe = recipe.rowwise { power_of_two = false }",
    ONE_LAYER "recipe = recipe.rowwise_hp_wgrad {}",
    ONE_LAYER "recipe = recipe.rowwise_hp_wgrad { power_of_two = false }",
    ONE_LAYER "recipe = recipe.block {}",
    ONE_LAYER "recipe = recipe.block { power_of_two = false }",
    "in_features = 1000, out_features = 2556",
    "in_features = 1000, out_features = 2556, compute = \"bf16\"",
    "in_features = 1, out_features = 1, max_tokens = 8192",
    "in_features = 16384, out_features = 106496, tokens = 1, max_tokens = 1000000",
};
enum { VARIANTS = sizeof(variants) / sizeof(variants[0]) };

static void test_rules(void **state)
{
    (void)state;
    for (size_t i = 0; i < VARIANTS; i++) {
        json_t *plan = plan_of(variants[i]);
        check_plan(plan);
        json_decref(plan);
    }
}

/* C33: each flip of a field shows; and the same spec gives the same text every time. */
static void test_flips_and_determinism(void **state)
{
    (void)state;
    fp8gen *gens[VARIANTS];
    for (size_t i = 0; i < VARIANTS; i++) {
        gens[i] = open_fields(variants[i]);
        fp8gen *again = open_fields(variants[i]);
        assert_string_equal(plan_text(gens[i]), plan_text(again));
        fp8gen_close(again);
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(plan_text(gens[i]), plan_text(gens[j]));
    }
    for (size_t i = 0; i < VARIANTS; i++)
        fp8gen_close(gens[i]);
}

/* Kernels whose names begin so. */
static size_t count_named(const json_t *kernels, const char *beginning)
{
    size_t i, count = 0;
    json_t *kernel;
    json_array_foreach(kernels, i, kernel) count +=
        strncmp(string_of(kernel, "name"), beginning, strlen(beginning)) == 0;
    return count;
}

/* The name of a GEMM is a beginning: which configurations are best, one or a few, is not told
 * here. */
static void expect_kernels(const char *fields, const char *const *names)
{
    json_t *plan = plan_of(fields), *kernels = json_object_get(plan, "kernels");
    size_t count = 0, wanted_gemms = 0;
    for (; names[count] != NULL; count++) {
        bool gemm = strncmp(names[count], "gemm_", 5) == 0;
        wanted_gemms += gemm;
        size_t found = count_named(kernels, names[count]);
        if (gemm ? found < 1 || found > 3 : named(kernels, names[count]) == NULL)
            fail_msg("no kernel %s", names[count]);
    }
    size_t gemms = count_named(kernels, "gemm_");
    assert_int_equal(json_array_size(kernels) - gemms, count - wanted_gemms);
    json_decref(plan);
}

static void test_only_what_is_needed(void **state)
{
    (void)state;
    const char *const biased[] = { "amax_bf16",
                                   "amax_dbias_bf16",
                                   "quantize_bf16_e4m3",
                                   "quantize_bf16_e5m2",
                                   "store_bf16_bf16",
                                   "store_fp32_bf16",
                                   "store_fp32_fp32",
                                   "store_fp32_fp32_add",
                                   "dequantize_e4m3_tensor",
                                   "dequantize_e5m2_tensor",
                                   "cast_bf16_e4m3",
                                   "cast_bf16_e5m2",
                                   "fused_bf16_e4m3",
                                   "fused_bf16_e5m2",
                                   "column_sums",
                                   "transpose",
                                   "gemm_e4m3_e4m3_bf16_",
                                   "gemm_e5m2_e4m3_bf16_",
                                   "gemm_e5m2_e4m3_fp32_add_",
                                   NULL };
    expect_kernels("in_features = 4096, out_features = 4096, bias = true", biased);
    const char *const small[] = { "amax_bf16",           "quantize_bf16_e4m3_pow2",
                                  "store_bf16_bf16",     "store_fp32_bf16",
                                  "store_fp32_bf16_add", "dequantize_e4m3_tensor",
                                  "cast_bf16_e4m3_pow2", "fused_bf16_e4m3_pow2",
                                  "transpose",           NULL };
    expect_kernels("in_features = 8, out_features = 8, grad_weight = \"bf16\", "
                   "recipe = recipe.current { format = \"e4m3\", power_of_two = true }",
                   small);
    json_t *plan = plan_of("in_features = 8, out_features = 8");
    json_t *buffers = json_object_get(first_layer(plan), "buffers");
    const char *const absent[] = { "bias", "dbias", "bias_stage", "dbias_partials" };
    for (size_t i = 0; i < 4; i++)
        assert_null(named(buffers, absent[i]));
    json_decref(plan);
}

static void test_equal_kernels_are_shared(void **state)
{
    (void)state;
    static const char text[] = "return model \"m\" { layers = {\n"
                               " linear \"a\" { in_features = 4096, out_features = 4096 },\n"
                               " linear \"b\" { in_features = 4095, out_features = 4096 } } }";
    fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "t.lua", text, sizeof(text) - 1), FP8GEN_OK);
    json_t *two = json_loads(plan_text(gen), 0, NULL);
    json_t *one = plan_of("in_features = 4096, out_features = 4096");
    assert_true(json_equal(json_object_get(two, "kernels"), json_object_get(one, "kernels")));
    assert_int_equal(json_array_size(json_object_get(two, "layers")), 2);
    json_decref(one);
    json_decref(two);
    fp8gen_close(gen);
}

static json_int_t number_of(const json_t *layer, const char *buffer, const char *key)
{
    json_t *dim = json_object_get(named(json_object_get(layer, "buffers"), buffer), key);
    assert_true(json_is_integer(dim));
    return json_integer_value(dim);
}

static void expect_dim(const json_t *layer, const char *buffer, const char *key, const char *dim)
{
    json_t *wanted = json_loads(dim, 0, NULL);
    assert_non_null(wanted);
    assert_true(
        json_equal(json_object_get(named(json_object_get(layer, "buffers"), buffer), key), wanted));
    json_decref(wanted);
}

static void test_sizes(void **state)
{
    (void)state;
    json_t *plan = plan_of(ONE_LAYER), *layer = first_layer(plan); /* K 1000, N 2556 */
    assert_int_equal(number_of(layer, "x_row", "cols"), 1024);
    expect_dim(layer, "x_row", "rows", "{\"of\": \"M\", \"pad\": 16}");
    assert_int_equal(number_of(layer, "x_transposed", "rows"), 1008);
    expect_dim(layer, "x_transposed", "cols", "{\"of\": \"M\", \"pad\": 128}");
    assert_int_equal(number_of(layer, "w_row", "rows"), 2560);
    assert_int_equal(number_of(layer, "w_row", "cols"), 1024);
    assert_int_equal(number_of(layer, "w_transposed", "rows"), 1008);
    assert_int_equal(number_of(layer, "w_transposed", "cols"), 2560);
    assert_int_equal(number_of(layer, "dy_row", "cols"), 2560);
    assert_int_equal(number_of(layer, "dy_scales", "cols"), FP8_SCALES_COUNT);
    expect_dim(layer, "dbias_partials", "rows", "{\"of\": \"M\", \"div\": 128}");
    assert_int_equal(number_of(layer, "dbias_partials", "cols"), 2560);
    assert_int_equal(number_of(layer, "bias_stage", "cols"), 2560);
    /* Rows of a stage are multiples of 128 bytes, and at most 64 MiB of them. */
    assert_int_equal(number_of(layer, "y_stage", "cols"), 2560);
    expect_dim(layer, "y_stage", "rows", "{\"of\": \"M\", \"max\": 6553}");
    assert_int_equal(number_of(layer, "dw_stage", "cols"), 1024);
    assert_int_equal(number_of(layer, "dw_stage", "rows"), 2556);
    json_decref(plan);
    plan = plan_of("in_features = 20000000, out_features = 3");
    expect_dim(first_layer(plan), "dx_stage", "rows", "{\"of\": \"M\", \"max\": 1}");
    json_decref(plan);
}

static void expect_ranges(const char *fields, size_t count)
{
    json_t *plan = plan_of(fields);
    json_t *step =
        json_array_get(json_object_get(json_object_get(first_layer(plan), "passes"), "dgrad"), 0);
    assert_int_equal(json_array_size(json_object_get(step, "dispatch")), count);
    check_plan(plan);
    json_decref(plan);
}

static void test_ranges(void **state)
{
    (void)state;
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 1", 1);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 16", 1);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 17", 2);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 4096", 5);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 4097", 6);
}

/* Tensors that fit on chip are read once. */
static void test_cost(void **state)
{
    (void)state;
    json_t *plan = plan_of("in_features = 1024, out_features = 2048, tokens = 256");
    json_t *cost = json_object_get(first_layer(plan), "cost");
    struct {
        const char *pass;
        json_int_t bytes, flops;
    } wanted[] = {
        { "weight", 4 * 2048 * 1024, 0 },
        { "fprop", 4 * 256 * 1024 + (256 + 2048) * 1024 + 2 * 256 * 2048, 2LL * 256 * 1024 * 2048 },
        { "quantize_dy", 4 * 256 * 2048, 0 },
        { "wgrad", (1024 + 2048) * 256 + 4 * 1024 * 2048, 2LL * 256 * 1024 * 2048 },
        { "dgrad", (256 + 1024) * 2048 + 2 * 256 * 1024, 2LL * 256 * 1024 * 2048 },
    };
    for (size_t i = 0; i < 5; i++) {
        json_t *pass = json_object_get(cost, wanted[i].pass);
        assert_int_equal(json_integer_value(json_object_get(pass, "bytes")), wanted[i].bytes);
        assert_int_equal(json_integer_value(json_object_get(pass, "flops")), wanted[i].flops);
        double seconds = json_real_value(json_object_get(pass, "seconds"));
        assert_true(seconds > 1e-6 && seconds < 1e-3);
    }
    json_decref(plan);
}

/* Products that 64 bits do not hold; the plan has six digits of them. */
static void test_cost_of_huge_layers(void **state)
{
    (void)state;
    json_t *plan =
        plan_of("in_features = 2097152, out_features = 2097152, tokens = 1048576, bias = true");
    json_t *cost = json_object_get(first_layer(plan), "cost");
    double flops = json_number_value(json_object_get(json_object_get(cost, "fprop"), "flops"));
    assert_true(fabs(flops / 0x1p63 - 1) < 1e-5);
    json_decref(plan);
    plan = plan_of("in_features = 268435456, out_features = 268435456, tokens = 268435456");
    cost = json_object_get(first_layer(plan), "cost");
    flops = json_number_value(json_object_get(json_object_get(cost, "wgrad"), "flops"));
    assert_true(fabs(flops / 0x1p85 - 1) < 1e-5);
    double bytes = json_number_value(json_object_get(json_object_get(cost, "wgrad"), "bytes"));
    assert_true(fabs(bytes / 0x1.8p58 - 1) < 1e-5);
    json_decref(plan);
}

/* glibc's newlocale leaves the path that it makes of LOCPATH behind; the leak sanitizer is told. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:__argz_add_sep\n";
}

/* A locale that writes 1,5: made by localedef where the system has none. (locale_t)0: neither. */
static locale_t comma_locale(char folder[])
{
    char command[256];
    locale_t made = newlocale(LC_ALL_MASK, "de_DE.UTF-8", (locale_t)0);
    if (made != (locale_t)0 || mkdtemp(folder) == NULL)
        return made;
    snprintf(command, sizeof(command), "localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 2>/dev/null",
             folder);
    if (system(command) == 0 && setenv("LOCPATH", folder, 1) == 0)
        made = newlocale(LC_ALL_MASK, "de_DE.UTF-8", (locale_t)0);
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
    return made;
}

/* A program that writes numbers with a comma gets the same bytes. */
static void test_locale(void **state)
{
    (void)state;
    static const char fields[] = "tokens = 16, in_features = 72, out_features = 40";
    char folder[] = "/tmp/fp8gen-locale-XXXXXX", number[8];
    locale_t comma = comma_locale(folder);
    if (comma == (locale_t)0) {
        print_message("skipped: no locale with a decimal comma, and localedef makes none\n");
        skip();
    }
    fp8gen *gen = open_fields(fields);
    const char *plain = plan_text(gen);
    assert_non_null(strstr(plain, "predicted 0."));
    locale_t before = uselocale(comma);
    fp8gen *other = open_fields(fields);
    const char *text = plan_text(other);
    snprintf(number, sizeof(number), "%.1f", 1.5);
    uselocale(before);
    assert_string_equal(number, "1,5");
    assert_string_equal(text, plain);
    assert_string_equal(other->spec_hash, gen->spec_hash);
    fp8gen_close(gen);
    fp8gen_close(other);
    freelocale(comma);
}

static void test_expand(void **state)
{
    (void)state;
    fp8gen *gen = open_fields(ONE_LAYER);
    json_t *plan = json_loads(plan_text(gen), 0, NULL), *kernel;
    const char *name, *text;
    size_t i;
    json_array_foreach(json_object_get(plan, "kernels"), i, kernel)
    {
        assert_int_equal(fp8gen_expand(gen, (int32_t)i, &name, &text), FP8GEN_OK);
        assert_string_equal(name, string_of(kernel, "name"));
        assert_non_null(strstr(text, string_of(kernel, "entry")));
        assert_int_equal(strncmp(text, "// Made by fp8gen 0.1.0 from the template ", 42), 0);
        assert_non_null(strstr(text, "\n#line 1 \""));
        assert_null(strchr(text, '$'));
    }
    assert_int_equal(fp8gen_expand(gen, (int32_t)i, &name, &text), FP8GEN_OK);
    assert_null(name);
    assert_null(text);
    assert_int_equal(fp8gen_expand(gen, -1, &name, &text), FP8GEN_ERR_ARGUMENT);
    json_decref(plan);
    fp8gen_close(gen);
}

static void test_without_model(void **state)
{
    (void)state;
    fp8gen *gen;
    const char *json, *name, *text;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_not_equal(fp8gen_plan(gen, &json), FP8GEN_OK);
    assert_null(json);
    assert_int_not_equal(fp8gen_expand(gen, 0, &name, &text), FP8GEN_OK);
    assert_true(strlen(fp8gen_diagnostics(gen)) > 0);
    fp8gen_close(gen);
}

/* Every request for memory fails once, from some point on: a clean error and nothing lost. */
static void test_out_of_memory(void **state)
{
    (void)state;
    for (int64_t n = 1;; n += 1 + n / 16) {
        fp8gen *gen = open_fields(ONE_LAYER);
        const char *json, *name, *text;
        gen_alloc_fail(n, true);
        fp8gen_status status = fp8gen_plan(gen, &json);
        if (status == FP8GEN_OK)
            status = fp8gen_expand(gen, 0, &name, &text);
        gen_alloc_fail(0, false);
        if (status != FP8GEN_OK) {
            assert_int_equal(status, FP8GEN_ERR_MACHINE);
            assert_non_null(strstr(fp8gen_diagnostics(gen), "out of memory"));
        }
        fp8gen_close(gen);
        if (status == FP8GEN_OK)
            break;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_flips_and_determinism),
        cmocka_unit_test(test_only_what_is_needed),
        cmocka_unit_test(test_equal_kernels_are_shared),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_cost),
        cmocka_unit_test(test_cost_of_huge_layers),
        cmocka_unit_test(test_locale),
        cmocka_unit_test(test_expand),
        cmocka_unit_test(test_without_model),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
