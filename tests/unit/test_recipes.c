/*
 * test_recipes.c - what each recipe makes of a plan: which steps, in which order, with which
 * copies, scales and products; bytes by NUMERICS' and KERNELS' count.
 */
#include "tests/unit/plan_rules.h"

#define LAYER "in_features = 1000, out_features = 2556, bias = true, "

static json_t *pass_of(const json_t *layer, const char *pass)
{
    return json_object_get(json_object_get(layer, "passes"), pass);
}

/* The ops of a list of steps, in words. */
static void expect_ops(const json_t *steps, const char *wanted)
{
    char ops[256] = "";
    size_t i;
    json_t *step;
    json_array_foreach(steps, i, step)
    {
        size_t used = strlen(ops);
        snprintf(ops + used, sizeof(ops) - used, "%s%s", i > 0 ? " " : "", string_of(step, "op"));
    }
    assert_string_equal(ops, wanted);
}

static json_t *step_of(const json_t *steps, const char *op)
{
    size_t i;
    json_t *step;
    json_array_foreach(steps, i, step) if (strcmp(string_of(step, "op"), op) == 0) return step;
    fail_msg("no step %s", op);
    return NULL;
}

static json_t *arg_of(const json_t *step, const char *name)
{
    return json_object_get(json_object_get(step, "args"), name);
}

static void expect_text(const json_t *step, const char *arg, const char *wanted)
{
    json_t *value = arg_of(step, arg);
    if (wanted == NULL)
        assert_true(json_is_null(value));
    else
        assert_string_equal(json_string_value(value), wanted);
}

/* Whether the layer has a buffer, of that many rows and columns. */
static void expect_buffer(const json_t *layer, const char *name, const char *rows, const char *cols)
{
    json_t *buffer = named(json_object_get(layer, "buffers"), name);
    if (rows == NULL) {
        assert_null(buffer);
        return;
    }
    if (buffer == NULL)
        fail_msg("no buffer %s", name);
    json_t *wanted_rows = json_loads(rows, JSON_DECODE_ANY, NULL);
    json_t *wanted_cols = json_loads(cols, JSON_DECODE_ANY, NULL);
    assert_non_null(wanted_rows);
    assert_non_null(wanted_cols);
    if (!json_equal(json_object_get(buffer, "rows"), wanted_rows) ||
        !json_equal(json_object_get(buffer, "cols"), wanted_cols))
        fail_msg("extents of %s", name);
    json_decref(wanted_rows);
    json_decref(wanted_cols);
}

static void expect_product(const json_t *layer, const char *pass, const char *dtypes,
                           const char *scalings)
{
    char found[64];
    json_t *step = step_of(pass_of(layer, pass), "gemm");
    snprintf(found, sizeof(found), "%s %s", string_of(step, "a_dtype"), string_of(step, "b_dtype"));
    assert_string_equal(found, dtypes);
    snprintf(found, sizeof(found), "%s %s", string_of(step, "a_scaling"),
             string_of(step, "b_scaling"));
    assert_string_equal(found, scalings);
}

static void test_current(void **state)
{
    (void)state;
    json_t *plan = plan_of(LAYER "recipe = recipe.current {}"), *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "amax quantize");
    expect_ops(pass_of(layer, "fprop"), "amax quantize gemm");
    expect_ops(pass_of(layer, "quantize_dy"), "amax quantize");
    json_t *given = json_object_get(layer, "given");
    expect_ops(json_object_get(given, "x"), "cast");
    expect_ops(json_object_get(given, "dy"), "cast column_sums");
    json_t *cast = step_of(json_object_get(given, "w"), "cast");
    expect_text(cast, "known", "amax");
    assert_int_equal(json_integer_value(arg_of(cast, "known_is_amax")), 1);
    expect_text(cast, "amax", NULL);
    expect_text(cast, "fresh", NULL);
    expect_text(cast, "when", "when");
    assert_true(json_is_string(json_object_get(layer, "transpose")));
    assert_null(json_object_get(layer, "roll"));
    expect_buffer(layer, "state_scale", NULL, NULL);
    json_decref(plan);
}

/* One launch instead of two where the tensor fits on chip; the plan's bytes follow. */
static void test_fused(void **state)
{
    (void)state;
    json_t *plan = plan_of("in_features = 1024, out_features = 1024, tokens = 8192, bias = true");
    json_t *layer = first_layer(plan), *kernels = json_object_get(plan, "kernels");
    json_t *amax = step_of(pass_of(layer, "quantize_dy"), "amax");
    json_t *fused = json_object_get(amax, "alternative");
    json_t *kernel = named(kernels, string_of(fused, "kernel"));
    assert_true(json_is_true(json_object_get(kernel, "cooperative")));
    assert_null(json_object_get(kernel, "overlaps"));
    kernel = named(kernels, string_of(amax, "kernel"));
    assert_null(json_object_get(kernel, "cooperative"));
    assert_true(json_is_true(json_object_get(kernel, "overlaps")));
    assert_true(integer_of(kernel, "shared_bytes") <= 227 * 1024);
    assert_int_equal(integer_of(fused, "elements_per_sm"), 131072);
    expect_text(fused, "epoch", "epoch");
    expect_text(fused, "dbias", "dbias");
    json_t *cost = json_object_get(json_object_get(layer, "cost"), "quantize_dy");
    double bytes = json_number_value(json_object_get(cost, "bytes")) / (8192.0 * 1024);
    assert_true(bytes > 4.0 && bytes < 4.1);
    json_decref(plan);
    plan = plan_of("in_features = 1024, out_features = 8192, tokens = 8192"); /* dy does not fit */
    cost = json_object_get(json_object_get(first_layer(plan), "cost"), "quantize_dy");
    bytes = json_number_value(json_object_get(cost, "bytes")) / (8192.0 * 8192);
    assert_true(bytes >= 6.0 && bytes < 6.1);
    json_decref(plan);
    plan = plan_of("in_features = 8, out_features = 8, weight = \"fp32\", "
                   "recipe = recipe.rowwise_hp_wgrad {}");
    amax = step_of(pass_of(first_layer(plan), "weight"), "amax");
    fused = json_object_get(amax, "alternative");
    expect_text(fused, "row", NULL);
    assert_int_equal(integer_of(fused, "elements_per_sm"), 32768);
    json_decref(plan);
}

static void test_delayed(void **state)
{
    (void)state;
    json_t *plan = plan_of(LAYER "recipe = recipe.delayed {}"), *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "cast");
    expect_ops(pass_of(layer, "fprop"), "cast gemm");
    expect_ops(pass_of(layer, "quantize_dy"), "cast column_sums");
    json_t *cast = step_of(pass_of(layer, "fprop"), "cast");
    expect_text(cast, "known", "state_scale");
    expect_text(cast, "amax", "state_amax");
    expect_text(cast, "fresh", NULL);
    assert_int_equal(json_integer_value(arg_of(cast, "known_is_amax")), 0);
    expect_text(step_of(pass_of(layer, "weight"), "cast"), "when", "when");
    cast = step_of(json_object_get(json_object_get(layer, "given"), "x"), "cast");
    expect_text(cast, "known", "amax");
    expect_text(cast, "amax", "state_amax"); /* a given amax enters the history too */
    expect_product(layer, "dgrad", "e5m2 e4m3", "tensor tensor");
    assert_string_equal(string_of(layer, "roll"), "roll");
    expect_buffer(layer, "state_fresh", "1", "1");
    json_decref(plan);
    plan = plan_of(LAYER "recipe = recipe.delayed { calibrate = true }");
    layer = first_layer(plan);
    expect_ops(pass_of(layer, "fprop"), "amax cast gemm");
    expect_text(step_of(pass_of(layer, "fprop"), "amax"), "when", "state_fresh");
    expect_text(step_of(pass_of(layer, "weight"), "amax"), "found_inf", NULL);
    expect_text(step_of(pass_of(layer, "weight"), "cast"), "found_inf", "found_inf");
    cast = step_of(pass_of(layer, "quantize_dy"), "cast");
    expect_text(cast, "fresh", "state_fresh");
    expect_text(cast, "partials", "amax_partials");
    expect_text(cast, "dbias_partials", "dbias_partials");
    expect_text(step_of(pass_of(layer, "quantize_dy"), "amax"), "dbias_partials", NULL);
    json_decref(plan);
}

static void test_rowwise(void **state)
{
    (void)state;
    json_t *plan = plan_of(LAYER "recipe = recipe.rowwise {}"), *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "line_amax line_scales quantize_lines");
    expect_ops(pass_of(layer, "fprop"), "line_amax line_scales quantize_lines gemm");
    expect_ops(pass_of(layer, "quantize_dy"), "line_amax line_scales quantize_lines");
    expect_product(layer, "fprop", "e4m3 e4m3", "row row");
    expect_product(layer, "wgrad", "e4m3 e4m3", "row row");
    assert_true(json_is_null(json_object_get(layer, "given")));
    assert_true(json_is_null(json_object_get(layer, "transpose")));
    expect_buffer(layer, "x_row_scales", "1", "{\"of\": \"M\", \"pad\": 16}");
    expect_buffer(layer, "x_transposed_scales", "1", "1008");
    expect_buffer(layer, "w_row_scales", "1", "2560");
    expect_buffer(layer, "x_row_partials", "8", "{\"of\": \"M\", \"pad\": 128}");
    expect_buffer(layer, "x_column_partials", "{\"of\": \"M\", \"div\": 128}", "1024");
    expect_buffer(layer, "x_row_maxima", "1", "{\"of\": \"M\", \"pad\": 128}");
    expect_buffer(layer, "x_column_maxima", "1", "1024");
    expect_buffer(layer, "dbias_partials", "{\"of\": \"M\", \"div\": 128}", "2560");
    json_decref(plan);
}

static void test_rowwise_hp_wgrad(void **state)
{
    (void)state;
    json_t *plan = plan_of(LAYER "recipe = recipe.rowwise_hp_wgrad {}"), *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "quantize_row amax quantize");
    expect_ops(pass_of(layer, "fprop"), "quantize_row gemm");
    expect_ops(pass_of(layer, "quantize_dy"), "line_amax line_scales quantize_lines");
    expect_text(step_of(pass_of(layer, "quantize_dy"), "line_amax"), "column_partials", NULL);
    expect_text(step_of(pass_of(layer, "quantize_dy"), "quantize_lines"), "transposed", NULL);
    json_t *quantize = step_of(pass_of(layer, "weight"), "quantize");
    expect_text(quantize, "row", NULL);
    expect_text(quantize, "transposed", "w_transposed");
    expect_product(layer, "fprop", "e4m3 e4m3", "row row");
    expect_product(layer, "dgrad", "e4m3 e4m3", "row tensor");
    expect_product(layer, "wgrad", "bf16 bf16", "none none");
    json_t *wgrad = step_of(pass_of(layer, "wgrad"), "gemm");
    assert_true(json_is_true(json_object_get(wgrad, "a_transposed")));
    assert_true(json_is_true(json_object_get(wgrad, "b_transposed")));
    expect_text(wgrad, "a", "dy");
    expect_text(wgrad, "b", "x");
    expect_buffer(layer, "x_transposed", NULL, NULL);
    expect_buffer(layer, "dy_transposed", NULL, NULL);
    expect_buffer(layer, "x_column_partials", NULL, NULL);
    expect_buffer(layer, "w_transposed_scales", NULL, NULL);
    json_decref(plan);
}

static void test_block(void **state)
{
    (void)state;
    json_t *plan = plan_of(LAYER "recipe = recipe.block {}"), *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "quantize_block");
    expect_ops(pass_of(layer, "fprop"), "quantize_block gemm");
    expect_ops(pass_of(layer, "quantize_dy"), "quantize_block column_sums");
    expect_product(layer, "fprop", "e4m3 e4m3", "block tile");
    expect_product(layer, "wgrad", "e4m3 e4m3", "block block");
    expect_product(layer, "dgrad", "e4m3 e4m3", "block tile");
    assert_string_equal(string_of(json_object_get(layer, "accumulation"), "fprop"), "split");
    expect_buffer(layer, "x_row_scales", "8", "{\"of\": \"M\", \"pad\": 8}");
    expect_buffer(layer, "x_transposed_scales", "{\"of\": \"M\", \"div\": 128}", "1000");
    expect_buffer(layer, "w_row_scales", "20", "8");
    expect_buffer(layer, "w_transposed_scales", "8", "20");
    assert_true(json_is_string(json_object_get(layer, "transpose")));
    json_t *kernels = json_object_get(plan, "kernels");
    const char *name = string_of(step_of(pass_of(layer, "weight"), "quantize_block"), "kernel");
    assert_string_equal(string_of(json_object_get(named(kernels, name), "semantics"), "block"),
                        "128x128");
    json_decref(plan);
}

static void test_bf16(void **state)
{
    (void)state;
    json_t *plan = plan_of(LAYER "compute = \"bf16\""), *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "");
    expect_ops(pass_of(layer, "fprop"), "gemm");
    expect_ops(pass_of(layer, "quantize_dy"), "amax column_sums"); /* dbias */
    expect_product(layer, "fprop", "bf16 bf16", "none none");
    expect_product(layer, "dgrad", "bf16 bf16", "none none");
    json_t *dgrad = step_of(pass_of(layer, "dgrad"), "gemm");
    assert_false(json_is_true(json_object_get(dgrad, "a_transposed")));
    assert_true(json_is_true(json_object_get(dgrad, "b_transposed")));
    expect_text(dgrad, "b", "w");
    expect_buffer(layer, "x_scales", NULL, NULL);
    expect_buffer(layer, "w_row", NULL, NULL);
    assert_string_equal(string_of(json_object_get(layer, "accumulation"), "fprop"), "split");
    assert_int_equal(json_object_size(json_object_get(layer, "dequantize")), 0);
    json_decref(plan);
    plan = plan_of("in_features = 8, out_features = 8, compute = \"bf16\"");
    expect_ops(pass_of(first_layer(plan), "quantize_dy"), "");
    json_decref(plan);
}

/* The plan of one spec, held to the rules of every plan. */
static json_t *plan_text_of(const char *text)
{
    fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "t.lua", text, strlen(text)), FP8GEN_OK);
    json_t *plan = json_loads(plan_text(gen), 0, NULL);
    check_plan(plan);
    fp8gen_close(gen);
    return plan;
}

static const char *op_of_collective(const json_t *plan, size_t index)
{
    return string_of(json_array_get(json_object_get(plan, "collectives"), index), "op");
}

/* A scale for each shard of w: three of 896 rows, the last of them short. */
static void test_shard_scales(void **state)
{
    (void)state;
    json_t *plan =
        plan_text_of("return model \"m\" { mesh = { fsdp = 3 }, layers = { linear \"a\" { " LAYER
                     "recipe = recipe.current { weight_scale = \"shard\" } } } }");
    json_t *layer = first_layer(plan);
    expect_ops(pass_of(layer, "weight"), "cast cast transpose");
    const json_t *weight = pass_of(layer, "weight");
    json_t *amax = json_array_get(weight, 0), *cast = json_array_get(weight, 1);
    expect_text(amax, "amax", "shard_amaxes");
    expect_text(amax, "row", NULL);
    expect_text(amax, "transposed", NULL);
    expect_text(amax, "row_scales", NULL);
    expect_text(amax, "found_inf", "found_inf");
    expect_text(cast, "known", "shard_amaxes");
    expect_text(cast, "row_scales", "w_row_scales");
    expect_text(cast, "transposed", "w_transposed");
    expect_text(json_array_get(weight, 2), "source", NULL);
    expect_buffer(layer, "shard_amaxes", "1", "3");
    expect_buffer(layer, "w_row_scales", "1", "2560");
    expect_buffer(layer, "w_transposed_scales", "8", "20");
    expect_product(layer, "fprop", "e4m3 e4m3", "tensor row");
    expect_product(layer, "wgrad", "e5m2 e4m3", "tensor tensor");
    expect_product(layer, "dgrad", "e5m2 e4m3", "tensor tile");
    json_t *given = json_object_get(layer, "given");
    expect_ops(json_object_get(given, "x"), "cast");
    expect_ops(json_object_get(given, "w"), "");
    assert_int_equal(integer_of(json_object_get(layer, "shard"), "rows"), 896);
    assert_int_equal(integer_of(json_object_get(layer, "shard"), "multiple"), 128);
    assert_string_equal(op_of_collective(plan, 0), "all_gather");
    json_decref(plan);
    plan = plan_text_of("return model \"m\" { mesh = { fsdp = 3 }, layers = { linear \"a\" { " LAYER
                        "recipe = recipe.current { weight_scale = \"tensor\" } } } }");
    expect_ops(pass_of(first_layer(plan), "weight"), "amax quantize");
    assert_string_equal(op_of_collective(plan, 0), "all_reduce_max");
    json_decref(plan);
}

/* Bytes of quantising 8192 x 8192 elements of x, by the count of one element. */
static void test_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        double most, least;
    } wanted[] = {
        { "current", 6.01, 6.0 }, { "delayed", 4.01, 4.0 },         { "rowwise", 6.3, 6.0 },
        { "block", 4.1, 4.0 },    { "rowwise_hp_wgrad", 3.1, 3.0 }, /* the row copy alone */
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        char fields[256];
        snprintf(fields, sizeof(fields),
                 "in_features = 512, out_features = 8192, recipe = recipe.%s {}", wanted[i].recipe);
        json_t *plan = plan_of(fields);
        json_t *cost = json_object_get(json_object_get(first_layer(plan), "cost"), "quantize_dy");
        double bytes = json_number_value(json_object_get(cost, "bytes")) / (8192.0 * 8192.0);
        if (bytes > wanted[i].most || bytes < wanted[i].least)
            fail_msg("%s moves %.3f bytes an element", wanted[i].recipe, bytes);
        json_decref(plan);
    }
}

/* Layers with recipes of their own in one model, one of them in bf16: each has what it would have
 * alone. */
static void test_mixed(void **state)
{
    (void)state;
    static const char text[] =
        "return model \"m\" { recipe = recipe.block {}, layers = {\n"
        " linear \"a\" { in_features = 64, out_features = 64 },\n"
        " linear \"b\" { in_features = 64, out_features = 64, recipe = recipe.delayed {} },\n"
        " linear \"c\" { in_features = 64, out_features = 64, compute = \"bf16\" } } }";
    json_t *plan = plan_text_of(text);
    json_t *layers = json_object_get(plan, "layers");
    expect_ops(pass_of(json_array_get(layers, 0), "weight"), "quantize_block");
    expect_ops(pass_of(json_array_get(layers, 1), "weight"), "cast");
    expect_ops(pass_of(json_array_get(layers, 2), "weight"), "");
    json_decref(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_current),
        cmocka_unit_test(test_fused),
        cmocka_unit_test(test_delayed),
        cmocka_unit_test(test_rowwise),
        cmocka_unit_test(test_rowwise_hp_wgrad),
        cmocka_unit_test(test_block),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_shard_scales),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_mixed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
